"""A check that a model gives correct log-probs, padded, packed and with shared sequences, on two short sequences.

Layers that look beyond attention masks would mix packed sequences without an error, and a head that transforms its
logits in a way that ``LogitRule`` does not cover would give wrong log-probs. So both are compared with the model's own
forward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from verl.errors import ConfigError
from verl.utils.model_facts.config_fields import layers_beyond_attention
from verl.utils.transformers_private import attention_of, keeps_state, takes_any_attention, use_attention
from verl.workers.engine.model.headed import HeadedModel
from verl.workers.engine.model.inputs import ModelInputs, divide
from verl.workers.forward_check import is_rounding, largest_difference, probe_sequences, short_windows
from verl.workers.packed_attention import PACKED_ATTENTION, Packing
from verl.workers.padded_attention import PADDED_ATTENTION

logger = logging.getLogger(__name__)

_LENGTHS = (5, 3)  # tokens of the two sequences
_WINDOW = 2  # tokens of sliding windows during the check, fewer than the sequences have, or windows would not matter


class PackingCheck:
    """Comparison of log-probs of a few tokens with the model's own forward pass. Collective.

    For a model with a scalar head, hidden states are compared. The model must be sharded already; the tolerance follows
    from ``dtype``, the format in which it computes. With ``group`` its ranks will share sequences.

    Raises:
        ConfigError: the model's own results are not finite.
    """

    def __init__(
        self, model: HeadedModel, device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup | None = None
    ) -> None:
        self._model, self._dtype, self._group = model, dtype, group
        rows = probe_sequences(model.hf.config, [max(_LENGTHS)] * len(_LENGTHS), device)
        self._sequences = [row[:length] for row, length in zip(rows, _LENGTHS, strict=True)]
        # Tokens after the end of a sequence change nothing before it, so that one pass needs no padding.
        results = self._run(self._row(rows, packed=False), "reference").split(max(_LENGTHS))
        self._expected = torch.cat([part[:length] for part, length in zip(results, _LENGTHS, strict=True)])
        if not bool(self._expected.isfinite().all()):
            raise ConfigError(
                f"{type(model.hf).__name__} gives results that are not finite for a few tokens, though its weights "
                f"are finite: it overflows in {str(dtype).removeprefix('torch.')}. Set fsdp_config.dtype=bfloat16 or "
                "float32, or take the weights of a model that works."
            )

    def settle(self, may_pack: bool, use_fast_layers: Callable[[], Callable[[], None] | None]) -> bool:
        """Run the model packed and on faster layers, as far as its results stay the same, else warn and undo it.

        A pass gathers all weights, so one compares everything; only if results differ do more passes show the cause.

        Args:
            may_pack: whether to run it packed.
            use_fast_layers: replaces layers and returns what undoes it, or returns None.

        Returns:
            whether it runs packed.

        Raises:
            ConfigError: its results differ even padded and with its own layers, or, padded, once ranks share sequences.
        """
        hf = self._model.hf
        is_shared = self._group is not None
        if (may_pack or is_shared) and (reason := self._why_never()) is not None:
            if is_shared:
                raise self._unshared(reason)
            self._warn_of_padding(reason)
            may_pack = False
        before = attention_of(hf.config.get_text_config())
        if may_pack or is_shared:
            use_attention(hf, PACKED_ATTENTION if may_pack else PADDED_ATTENTION)
        undo = use_fast_layers()
        if self._why_not(may_pack) is None:
            return may_pack
        if undo is not None:
            undo()
        if may_pack or is_shared:
            use_attention(hf, before)
        return self._settle_in_turn(may_pack, use_fast_layers)

    def _settle_in_turn(self, may_pack: bool, use_fast_layers: Callable[[], Callable[[], None] | None]) -> bool:
        """Do what :meth:`settle` does, with a pass for each change of the model."""
        hf = self._model.hf
        before = attention_of(hf.config.get_text_config())
        if (difference := self._difference(packed=False)) is not None:
            raise ConfigError(
                f"{type(hf).__name__} changes its logits in a way that this engine does not know (log-probs "
                f"differ by {difference:.2g} from the model's own), so it cannot be trained here."
            )
        if may_pack:
            use_attention(hf, PACKED_ATTENTION)
            if (reason := self._why_not(packed=True)) is not None:
                use_attention(hf, before)
                self._warn_of_padding(reason)
                may_pack = False
        if self._group is not None and not may_pack:
            use_attention(hf, PADDED_ATTENTION)
            if (reason := self._why_not(packed=False)) is not None:
                raise self._unshared(reason)
        undo = use_fast_layers()
        if undo is not None and (difference := self._difference(may_pack)) is not None:
            undo()
            logger.warning(
                "%s uses the layers of Transformers, which are slower: with the fast layers its log-probs differ by "
                "%.2g from its own.",
                type(hf).__name__,
                difference,
            )
        return may_pack

    def _warn_of_padding(self, reason: str) -> None:
        logger.warning(
            "%s runs padded: %s. Results are the same, at the cost of the padding; set use_remove_padding=false to "
            "silence this.",
            type(self._model.hf).__name__,
            reason,
        )

    def _unshared(self, reason: str) -> ConfigError:
        return ConfigError(
            f"the ranks cannot share the sequences of {type(self._model.hf).__name__}: {reason}. Set "
            "ulysses_sequence_parallel_size=1."
        )

    def _why_never(self) -> str | None:
        """Return why the model can neither run packed nor share sequences, whatever it computes; None if it may."""
        text = self._model.hf.config.get_text_config()
        # Their results may differ by less than rounding on a few tokens, and by more on the next ones.
        if other := layers_beyond_attention(getattr(text, "layer_types", None)):
            return f"it has layers ({', '.join(other)}) for which a row is one sequence"
        if keeps_state(self._model.hf):
            return "its layers carry a state from token to token"
        return None if takes_any_attention(self._model.hf) else "its code has no exchangeable attention"

    def _why_not(self, packed: bool) -> str | None:
        """Return why the model cannot run as it is set, or None."""
        try:
            difference = self._difference(packed)
        except (ConfigError, TypeError) as error:
            return str(error).rstrip(".")
        if difference is None:
            return None
        return (
            "tokens see other sequences, or past a window that attention is not told of, or each other outside of "
            f"attention (log-probs differ by {difference:.2g})"
        )

    def _difference(self, packed: bool) -> float | None:
        """Return the largest difference from the model's own results; None if it is rounding on every rank.

        The sequences are packed in one row, or padded after the shorter one.
        """
        actual = self._run(self._row(self._sequences, packed), "log_probs")
        verdict = torch.tensor(float(is_rounding(actual, self._expected, self._dtype)), device=actual.device)
        dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
        return None if verdict else largest_difference(actual, self._expected)

    @torch.no_grad()
    def _run(self, inputs: ModelInputs, output: str) -> Tensor:
        """Return ``output`` at each token, or its hidden state if the head is scalar."""
        is_shared = attention_of(self._model.hf.config.get_text_config()) in (PACKED_ATTENTION, PADDED_ATTENTION)
        name = "hidden" if self._model.head.out_features == 1 else output
        if self._group is not None and is_shared:
            inputs = divide(inputs, self._group)
        with short_windows(self._model.hf, _WINDOW):
            return self._model(inputs, frozenset({name}), 1.0)[name].float()

    def _row(self, sequences: list[Tensor], packed: bool) -> ModelInputs:
        """Return the inputs of sequences in one packed row, or in rows that are padded at their ends."""
        # The log-prob is that of the same token, not of the next one: it serves a comparison as well.
        tokens, device = torch.cat(sequences), sequences[0].device
        lengths = torch.tensor([len(ids) for ids in sequences], device=device)
        mask = torch.arange(int(lengths.max()), device=device) < lengths.unsqueeze(1)
        positions = torch.arange(mask.shape[1], device=device).expand_as(mask)
        if packed:
            positions, mask = positions[mask].unsqueeze(0), torch.ones_like(tokens, dtype=torch.bool).unsqueeze(0)
        return ModelInputs(
            input_ids=torch.zeros_like(positions).masked_scatter(mask, tokens),
            position_ids=positions,
            attention_mask=None if packed else mask,
            packing=Packing.from_lengths(lengths.tolist(), device) if packed else None,
            take=mask.flatten().nonzero().flatten(),
            targets=tokens,
            rows=torch.zeros_like(tokens),
            columns=torch.arange(len(tokens), device=device),
            shape=(1, len(tokens)),
        )


@torch.no_grad()
def shared_prompt_difference(
    model: HeadedModel, device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup | None = None
) -> float | None:
    """Compare the packed log-probs of two responses to one prompt with those of a pass that has the prompt once.

    Collective. For a model with a scalar head, hidden states are compared. The model must run packed already; arguments
    are as for :class:`PackingCheck`.

    Returns:
        the largest difference; None if it is rounding on every rank.
    """
    prompt, first, second = probe_sequences(model.hf.config, (3, 2, 3), device)
    sequences = [torch.cat([prompt, first]), torch.cat([prompt, second])]
    ids = torch.cat(sequences)
    positions = torch.cat([torch.arange(len(part), device=device) for part in sequences])
    shared = [*range(5), *range(3), *range(5, 8)]  # the index of each of the 11 tokens among the 8 that are kept
    kept_indices = torch.tensor([*range(5), *range(8, 11)], device=device)
    passes = {
        "apart": (ids, positions, Packing.from_lengths([5, 6], device), list(range(len(ids)))),
        "shared": (
            ids[kept_indices],
            positions[kept_indices],
            Packing.continuing([3, 2, 3], [None, 0, 0], device),
            shared,
        ),
    }
    output = "hidden" if model.head.out_features == 1 else "log_probs"
    actual: dict[str, Tensor] = {}
    with short_windows(model.hf, _WINDOW):
        for name, (tokens, places, packing, take) in passes.items():
            inputs = ModelInputs(
                input_ids=tokens.unsqueeze(0),
                position_ids=places.unsqueeze(0),
                attention_mask=None,
                packing=packing,
                take=torch.tensor(take, device=device),
                targets=ids,
                rows=torch.zeros_like(ids),
                columns=torch.arange(len(ids), device=device),
                shape=(1, len(ids)),
            )
            inputs = inputs if group is None else divide(inputs, group)
            actual[name] = model(inputs, frozenset({output}), 1.0)[output].float()
    verdict = torch.tensor(float(is_rounding(actual["shared"], actual["apart"], dtype)), device=device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
    return None if verdict else largest_difference(actual["shared"], actual["apart"])
