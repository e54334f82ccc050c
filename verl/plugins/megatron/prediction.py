"""Multi-token prediction (arXiv:2412.19437, section 2.2): heads that predict the tokens after the next one.

Head k = 1, 2 ... takes at token i the hidden state of the model, or of head k - 1, and the embedding of token i + k. It
projects both to one vector, passes that through a layer, and predicts token i + k + 1 by the model's own output matrix.
All heads are on the last pipeline stage, which has a copy of the embedding for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig

from verl.base.device_copies import to_device
from verl.config import HFModelConfig, MtpConfig
from verl.errors import ConfigError
from verl.plugins.megatron.files import ModelFiles
from verl.plugins.megatron.layers import PackedRow, RMSNorm, freeze_row
from verl.plugins.megatron.library import (
    LanguageModelEmbedding,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
    parallel_state,
    tensor_parallel,
)
from verl.plugins.megatron.weights import FP32_WEIGHTS
from verl.protocol import DataProto
from verl.utils.model_facts.prediction_heads import SHARED_WITH_HEADS, FurtherLayers, head_count
from verl.workers.engine.model.inputs import ModelInputs
from verl.workers.engine.model.vocab_parallel import vocab_parallel_log_probs

# ---- weights --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadWeights:
    """The weights of a model's heads, by the names in its files, where heads are named as further layers."""

    count: int = 0
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Copies of the model's weights: the names under which the files have a weight again for heads, by its name."""

    @property
    def trained(self) -> set[str]:
        """Names of those with gradients."""
        return {name for name in self.shapes if not name.endswith(FP32_WEIGHTS)}

    @classmethod
    def from_model(
        cls, hf: PretrainedConfig, model: HFModelConfig, shapes: Mapping[str, tuple[int, ...]], is_trained: bool
    ) -> HeadWeights:
        """Find the heads of a model; none unless they are trained.

        Args:
            hf: config of its decoder.
            model: its folder and settings.
            shapes: of the weights of the model without heads, by name.
            is_trained: whether the model is.

        Raises:
            ConfigError: it has none, its files lack them, or adapters are trained.
        """
        if not (is_trained and model.mtp.is_trained):
            return cls()
        if model.has_adapters:
            raise ConfigError(
                "model.mtp.enable_train=true, and LoRA adapters are trained in place of the model's weights: heads "
                "have none. Set model.mtp.enable_train=false, or train without adapters."
            )
        count, layers, path = head_count(hf.to_dict()), hf.num_hidden_layers, model.path
        if not count:
            raise ConfigError(
                f"model.mtp.enable_train=true, and '{path}' has no heads: its config.json has no "
                "num_nextn_predict_layers above 0. Set enable_train=false, or take a model with heads."
            )
        files = ModelFiles(path)
        prefixes = [f"model.layers.{layers + head}." for head in range(count)]
        for prefix in prefixes:
            if f"{prefix}eh_proj.weight" not in files:
                raise ConfigError(
                    f"model.mtp.enable_train=true, and the files of '{path}' do not contain {prefix}eh_proj.weight: "
                    "the heads are missing (Transformers drops them when it saves a model). Take the original folder."
                )
        copies = {
            name: tuple(f"{prefix}{copy}" for prefix in prefixes if f"{prefix}{copy}" in files)
            for name, copy in SHARED_WITH_HEADS.items()
        }
        return cls(count, FurtherLayers.from_last_layer(layers, count, hf.hidden_size, shapes).shapes, copies)

    def build(self, piece: Any, layer: Any, settings: MtpConfig, padding: int | None) -> PredictionHeads | None:
        """Make the heads on the last piece of a model; None if it has none. Arguments as of the class."""
        return PredictionHeads(piece, layer, self.count, settings.detach_encoder, padding) if self.count else None


# ---- modules --------------------------------------------------------------------------------------


class PredictionLayer(MultiTokenPredictionLayer):
    """megatron-core's head, which is given the embeddings of the tokens ahead instead of shifting the row itself."""

    def _get_embeddings(
        self,
        input_ids: None,
        position_ids: None,
        embedding: Tensor,
        hidden_states: Tensor,
        packed_seq_params: PackedRow | None = None,
    ) -> tuple[None, None, Tensor, Tensor]:
        return input_ids, position_ids, embedding, hidden_states

    def _checkpointed_forward(
        self, forward_func: Any, hidden_states: Tensor, decoder_input: Tensor, **settings: object
    ) -> Tensor:
        """Compute the head, and again in the backward pass; megatron-core's takes no description of packed rows."""

        def run(hidden: Tensor, embedded: Tensor) -> Tensor:
            return forward_func(hidden_states=hidden, decoder_input=embedded, **settings)

        return tensor_parallel.checkpoint(run, False, hidden_states, decoder_input)


class PredictionHeads(nn.Module):
    """All heads of a model, on its last pipeline stage.

    Args:
        piece: of the model that has the output layer (:class:`~verl.plugins.megatron.layers.DecoderModel`).
        layer: specification of the layer of a head.
        count: number of heads.
        is_detached: whether the model gets no gradient of their loss.
        padding: the token whose embedding gets no gradient, or None.
    """

    def __init__(self, piece: Any, layer: Any, count: int, is_detached: bool, padding: int | None) -> None:
        super().__init__()
        parts = MultiTokenPredictionLayerSubmodules(
            enorm=RMSNorm,
            hnorm=RMSNorm,
            eh_proj=tensor_parallel.ColumnParallelLinear,
            transformer_layer=layer,
            layer_norm=RMSNorm,
        )
        self.layers = nn.ModuleList(
            PredictionLayer(
                config=piece.config,
                submodules=parts,
                layer_number=head + 1,
                vp_stage=piece.vp_stage,
                pg_collection=piece.pg_collection,
            )
            for head in range(count)
        )
        self.is_detached = is_detached
        self.embedding: Any = None
        """A copy of the embedding, on a stage that has none."""
        if not piece.pre_process:
            self.embedding = LanguageModelEmbedding(
                config=piece.config,
                vocab_size=piece.vocab_size,
                max_sequence_length=piece.max_sequence_length,
                position_embedding_type="rope",
                tp_group=piece.pg_collection.tp,
            )
            if piece.share_embeddings_and_output_weights:
                self.embedding.word_embeddings.weight = piece.output_layer.weight
            else:
                self.embedding.word_embeddings.weight.shared_embedding = True
            if padding is not None:
                freeze_row(self.embedding.word_embeddings, padding)

    def forward(
        self,
        hidden: Tensor,
        embed: Any,
        tokens_ahead: Sequence[Tensor],
        rotary_pos_emb: Tensor,
        packed_seq_params: PackedRow | None,
    ) -> list[Tensor]:
        """Return the hidden states of each head, of the shape of ``hidden``, (length / ranks, bsz, hidden size).

        Args:
            hidden: of the model, after its last norm.
            embed: the model's embedding where it is on this stage.
            tokens_ahead: (bsz, length) for each head k, the token that follows k places later.
            rotary_pos_emb: angles of all tokens.
            packed_seq_params: of a packed row.
        """
        embed, states = self.embedding or embed, []
        if self.is_detached:
            hidden = hidden.detach()
        for layer, ids in zip(self.layers, tokens_ahead, strict=True):
            embedded = embed(input_ids=ids, position_ids=None)
            if self.is_detached:
                embedded = embedded.detach()
            if not hidden.requires_grad:  # what is computed again in the backward pass needs an input with a gradient
                hidden = hidden.requires_grad_()
            hidden, _, _ = layer(
                input_ids=None,
                position_ids=None,
                hidden_states=hidden,
                attention_mask=None,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
                embedding=embedded,
            )
            states.append(hidden)
        return states


# ---- inputs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokensAhead:
    """Tokens that one head k reads and predicts in a pass, on this rank."""

    ids: Tensor
    """(bsz, length), at each token the one that follows k places later; any token at the last k of a sequence."""
    take: Tensor
    """(M,) index into the flattened ``ids`` at which the head predicts a token of the loss."""
    targets: Tensor
    """(M,) these tokens."""

    def to(self, device: torch.device) -> TokensAhead:
        """Move all tensors to ``device``."""
        return TokensAhead(*(to_device(value, device) for value in (self.ids, self.take, self.targets)))


def tokens_ahead(
    inputs: ModelInputs, response_mask: Tensor, heads: int, group: dist.ProcessGroup | None
) -> tuple[TokensAhead, ...]:
    """Return what each head reads and predicts, with the layout of ``inputs``, before that is divided over ranks.

    A head k predicts a token if its sequence has at least k + 1 tokens before it.

    Args:
        inputs: packed, or padded at the ends of rows.
        response_mask: (bsz, response_length), the tokens of the loss; of those that ``inputs`` read there may be more.
        heads: how many there are.
        group: ranks that share each row, in equal parts.
    """
    length = inputs.input_ids.shape[1]
    is_counted = response_mask.bool()[inputs.rows, inputs.columns]
    position = inputs.take % length  # in the sequence, from 0
    if inputs.packing is not None:
        lengths = torch.tensor(inputs.packing.lengths)
        starts = lengths.cumsum(0) - lengths
        position = inputs.take - starts[torch.searchsorted(starts, inputs.take, right=True) - 1]
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    part = length // ranks
    ahead: list[TokensAhead] = []
    for k in range(1, heads + 1):
        exists = is_counted & (position >= k)
        row, column = (inputs.take[exists] - k) // length, (inputs.take[exists] - k) % length
        mine = column // part == rank
        ids = inputs.input_ids.roll(-k, dims=1)[:, rank * part : (rank + 1) * part]
        ahead.append(TokensAhead(ids, (row * part + column % part)[mine], inputs.targets[exists][mine]))
    return tuple(ahead)


# ---- loss -----------------------------------------------------------------------------------------


class PredictionLoss:
    """The loss of all heads in one mini-batch.

        w / D · Σ_k 1 / N_k · Σ_t -log p_k(t)

    for D heads, with the tokens t of the loss that head k predicts, and their number N_k over all ranks and passes. The
    probabilities are those at temperature 1.

    Args:
        heads: how many there are; with 0 nothing is computed.
        last: this rank's last piece of the model.
        head_weight: returns this rank's rows of the output matrix, on the last pipeline stage.
        vocab_size: of the model.
        settings: the section ``model.mtp``.
        device: of the computation.
    """

    def __init__(
        self,
        heads: int,
        last: Any,
        head_weight: Callable[[], Tensor],
        vocab_size: int,
        settings: MtpConfig,
        device: torch.device,
    ) -> None:
        self.heads = heads
        self.last = last
        self.head_weight = head_weight
        self.vocab_size = vocab_size
        self.device = device
        self.is_detached = settings.detach_encoder
        self.weight = settings.mtp_loss_scaling_factor
        self._tokens = self._sums = torch.zeros(self.heads, dtype=torch.float64)
        self._copies = 1

    def begin(self, batch: DataProto, copies: int, group: dist.ProcessGroup | None) -> None:
        """Count the tokens of the mini-batch of which ``batch`` is this rank's part. Collective.

        ``copies`` is the number of data-parallel ranks, and ``group`` consists of them.
        """
        if not self.heads:
            return
        columns = batch.batch
        is_response = columns["response_mask"].bool()
        before = columns["attention_mask"].cumsum(-1)[:, -is_response.shape[1] :][is_response] - 1  # tokens before each
        counts = torch.stack([(before > k).sum() for k in range(1, self.heads + 1)])
        counts = to_device(counts, self.device)
        dist.all_reduce(counts, group=group)
        self._tokens, self._copies = counts.cpu().double(), copies
        self._sums = torch.zeros(self.heads, dtype=torch.float64)

    def add(self, ahead: Sequence[TokensAhead], is_counted: bool) -> Tensor:
        """Return the part of the pass that has just run, with the factor of the data-parallel ranks. Collective.

        Of ranks that share sequences each has its own tokens.
        """
        group = parallel_state.get_tensor_model_parallel_group()
        weight = self.head_weight()
        weight = weight.detach() if self.is_detached else weight
        losses = []
        for hidden, tokens in zip(self.last.ahead, ahead, strict=True):
            states = hidden.flatten(0, 1).index_select(0, tokens.take)
            shared = tensor_parallel.copy_to_tensor_model_parallel_region(states)  # adds up the ranks' gradients
            log_probs = vocab_parallel_log_probs(shared, weight, tokens.targets, group, self.vocab_size).log_probs
            losses.append(-log_probs.sum())
        sums = torch.stack(losses)
        if is_counted:
            self._sums += sums.detach().cpu().double()
        return self.weight * self._copies * (sums / self._tokens.clamp(min=1).to(sums)).mean()

    def metrics(self) -> dict[str, float]:
        """Compute the unweighted mean loss of the heads, and with several heads the loss of each.

        The same on all ranks. Collective.
        """
        if not self.heads:
            return {}
        sums = to_device(self._sums.float(), self.device)
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        dist.all_reduce(sums, group=parallel_state.get_pipeline_model_parallel_group())  # stages without heads have 0
        means = (sums.cpu().double() / self._tokens.clamp(min=1)).tolist()
        head_losses = {f"mtp/loss_{k}": mean for k, mean in enumerate(means, 1)} if self.heads > 1 else {}
        return {"mtp/loss": sum(means) / self.heads} | head_losses
