"""Model inputs from batch columns, as one packed row or as a padded rectangle, and checks of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from verl.base.device_copies import to_device
from verl.errors import ConfigError, SchemaError
from verl.protocol import DataProto
from verl.utils.ulysses import place_outputs
from verl.vision.families import VisionConfig
from verl.vision.model import ImageInputs
from verl.workers.engine.model.images import image_places, images_of
from verl.workers.packed_attention import Packing
from verl.workers.padded_attention import Padding
from verl.workers.routers import unknown
from verl.workers.shared_prompts import same_prompts


@dataclass(frozen=True, kw_only=True)
class SequenceShare:
    """The part of the N response tokens that this rank computes, where several ranks share the sequences."""

    places: Tensor
    """(n,) indices among the N tokens."""
    count: int
    """N."""
    group: dist.ProcessGroup
    """The ranks that share the sequences."""

    def collect(self, values: Tensor) -> Tensor:
        """Return the outputs of all N tokens from those of this rank's tokens. Differentiable, collective."""
        return place_outputs(values, self.places, self.count, self.group)

    def joined(self, part: Tensor) -> Tensor:
        """Join integers of all ranks' parts of the rows, (bsz, length of a part, ...). Collective."""
        mine = part.to(torch.int32)  # gloo and NCCL send no int16
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, mine.contiguous(), group=self.group)
        return torch.cat(parts, dim=1).to(part.dtype)


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """Inputs of one micro-batch on the device; N is the number of its response tokens.

    Where several ranks share the sequences (:func:`divide`), tokens, ``take`` and ``targets`` are those of this rank.
    """

    input_ids: Tensor
    """(1, tokens) if packed, (bsz, length) if padded."""
    position_ids: Tensor
    """Same shape as ``input_ids``; (4, ...) for a model with images (:mod:`verl.vision.positions`)."""
    attention_mask: Tensor | None
    """(bsz, length) if padded, None if packed or shared."""
    packing: Packing | None
    """Bounds of the sequences in a packed row, None if padded."""
    take: Tensor
    """(N,) index into the flattened ``input_ids`` at which the model's output for each response token is read: the
    token before it, whose hidden state predicts it, or the response token itself."""
    targets: Tensor
    """(N,) ids of the response tokens."""
    rows: Tensor
    """(N,) row of each response token in the batch."""
    columns: Tensor
    """(N,) column of each response token in the response."""
    shape: tuple[int, int]
    """(bsz, response_length)."""
    real: Tensor | None = None
    """Same shape as ``input_ids``, False on padding; None without padding."""
    padding: Padding | None = None
    """Padding of the rows, if they are padded and shared by ranks."""
    share: SequenceShare | None = None
    """Tokens that this rank computes; None: all."""
    images: ImageInputs | None = None
    """Images of the sequences, if the vision tower runs."""
    topk_ids: Tensor | None = None
    """(N, K) ids whose log-probs are computed in addition to ``targets``: the column ``teacher_topk_ids``."""
    kept_ids: Tensor | None = None
    """(N, K) ids over which log-probs are normalised, then -1; all -1 for the whole vocabulary."""
    teacher_hidden: Tensor | None = None
    """(N, H) last hidden states of the teacher that predict the response tokens."""
    teacher_index: Tensor | None = None
    """(N,) number of the teacher of each token; None for a single one."""
    routed_experts: Tensor | None = None
    """(tokens, routers, experts per token) experts to be chosen for the flattened ``input_ids``; None: the routers
    choose. See :mod:`verl.workers.routers`."""

    def scatter(self, flat: Tensor) -> Tensor:
        """Place (N, ...) values at their tokens in (bsz, response_length, ...), 0 elsewhere."""
        return flat.new_zeros(*self.shape, *flat.shape[1:]).index_put((self.rows, self.columns), flat)

    def joined_expert_ids(self, expert_ids: Tensor) -> Tensor:
        """Return the choice of experts of all real tokens from that of this rank's. Collective if they are shared."""
        if self.share is None or self.real is None:
            return expert_ids
        rows = expert_ids.new_zeros(*self.real.shape, *expert_ids.shape[1:])
        rows[self.real] = expert_ids
        return self.share.joined(rows)[self.share.joined(self.real)]

    def to(self, device: torch.device) -> ModelInputs:
        """Move all tensors to ``device``."""
        moved: dict[str, object] = {
            name: to_device(value, device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        if self.packing is not None:
            moved["packing"] = self.packing.to(device)
        if self.padding is not None:
            moved["padding"] = replace(self.padding, real=to_device(self.padding.real, device))
        if self.images is not None:
            moved["images"] = self.images.to(device)
        if self.share is not None:
            moved["share"] = replace(self.share, places=to_device(self.share.places, device))
        return replace(self, **moved)


def prepare_inputs(
    batch: DataProto,
    packed: bool,
    device: torch.device,
    at_token: bool = False,
    group: dist.ProcessGroup | None = None,
    vision: VisionConfig | None = None,
    runs_tower: bool = False,
    shares_prompts: bool = False,
) -> ModelInputs:
    """Remove the padding of a micro-batch: all of it if ``packed``, else all but that after the shorter sequences.

    Padding before a sequence would move it in its row, and layers that carry a state from token to token, or choose
    among blocks of a row, would compute something else. Padding after a sequence is seen by none of its tokens.

    The batch needs input_ids, attention_mask and position_ids, (bsz, prompt_length + response_length), and responses
    and response_mask, (bsz, response_length). If it has ``routed_experts``, they are replayed; ``teacher_topk_ids``,
    ``teacher_hidden``, ``teacher_index`` and ``kept_ids`` are those of :class:`ModelInputs`. With ``at_token`` the
    model is read at each response token itself instead of at the token before it. With ``group`` its ranks share the
    sequences; see :func:`divide`.

    For a model with images, whose config is ``vision``, position_ids are (bsz, 4, length), and ``multi_modal_inputs``
    holds the images of each row. ``runs_tower`` adds a filler to a micro-batch without images.

    With ``shares_prompts`` a packed row has the prompt of rows with equal prompts once, before their responses; see
    :func:`_packed_tokens`. Not with images.

    Raises:
        SchemaError: a response token has no token before it (allowed with ``at_token``) or is masked out, padding lies
            between tokens, a row has no tokens, or its image tokens are not those of its images.
    """
    columns = batch.batch
    mask, is_computed = columns["attention_mask"].bool(), columns["response_mask"].bool()
    response_length = is_computed.shape[1]
    prompt_length = mask.shape[1] - response_length
    if shares_prompts and (not packed or vision is not None or "routed_experts" in columns.keys()):
        raise ConfigError(
            "use_prefix_grouper=true: a shared prompt needs packed rows (model.use_remove_padding=true) without "
            "images and without replayed routing (actor.router_replay.mode=disabled). Set use_prefix_grouper=false."
        )
    _check(mask, is_computed, prompt_length, at_token)
    if "observation_weights" in columns.keys():  # a loss of tokens that the environment wrote
        observed = columns["observation_weights"] > 0
        if vision is not None:
            observed &= ~image_places(batch, vision)[:, prompt_length:]
        is_computed = is_computed | observed
    rows, places = is_computed.nonzero(as_tuple=True)
    where = places + prompt_length - (0 if at_token else 1)
    routed = columns.get("routed_experts", None)  # (bsz, length, routers, experts per token)
    if packed:
        first_rows = same_prompts(batch) if shares_prompts else list(range(len(mask)))
        is_kept, place_of, packing = _packed_tokens(mask, prompt_length, first_rows)
        input_ids = columns["input_ids"][is_kept].unsqueeze(0)
        position_ids = _packed_positions(columns["position_ids"], is_kept)
        take = place_of[rows, where]
        attention_mask = None
        routed = None if routed is None else routed[is_kept]
    else:
        lengths, starts = mask.sum(-1), mask.int().argmax(-1)
        width = max(int(lengths.max()), 1) if len(mask) else 1
        attention_mask = torch.arange(width, device=mask.device) < lengths.unsqueeze(1)

        def moved(column: Tensor, padding: int = 0) -> Tensor:
            """Move each sequence of a column, (bsz, length, ...), to the beginning of its row."""
            rows_of_padding = column.new_full((*attention_mask.shape, *column.shape[2:]), padding)
            rows_of_padding[attention_mask] = column[mask]
            return rows_of_padding

        input_ids, positions = moved(columns["input_ids"]), columns["position_ids"]
        position_ids = moved(positions.movedim(-1, 1)).movedim(-1, 0) if positions.dim() == 3 else moved(positions)
        take = rows * width + where - starts[rows]
        packing = None
        routed = None if routed is None else moved(routed, unknown(routed.dtype)).flatten(0, 1)
    images = None
    if vision is not None:
        is_image = image_places(batch, vision)
        is_image = is_image[mask].unsqueeze(0) if packed else moved(is_image)
        images = images_of(batch, is_image)
        if images is None and runs_tower:
            images = ImageInputs.filler(vision, input_ids)
    topk_ids, kept_ids, teacher_hidden = (
        columns.get(name, None) for name in ("teacher_topk_ids", "kept_ids", "teacher_hidden")
    )
    if kept_ids is not None and (topk_ids is not None or teacher_hidden is not None):
        raise ConfigError(
            "rollout.keep_sampling_mask=true: a distillation compares the policy with its teacher over the whole "
            "vocabulary, and kept_ids restrict it. Set keep_sampling_mask=false."
        )
    teacher_index = columns.get("teacher_index", None)  # (bsz,)
    inputs = ModelInputs(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=attention_mask,
        real=attention_mask,
        packing=packing,
        take=take,
        targets=columns["responses"][rows, places],
        rows=rows,
        columns=places,
        shape=(mask.shape[0], response_length),
        images=images,
        topk_ids=None if topk_ids is None else topk_ids[rows, places],
        kept_ids=None if kept_ids is None else kept_ids[rows, places],
        teacher_hidden=None if teacher_hidden is None else teacher_hidden[rows, places],
        teacher_index=None if teacher_index is None else teacher_index[rows],
        routed_experts=routed,
    )
    return (inputs if group is None else divide(inputs, group)).to(device)


def _packed_tokens(mask: Tensor, prompt_length: int, first_rows: Sequence[int]) -> tuple[Tensor, Tensor, Packing]:
    """Choose the tokens of a packed row, in the order of the batch's rows.

    Args:
        mask: (bsz, length), False on padding.
        prompt_length: width of the prompts.
        first_rows: for each row the index of the first row with the same prompt, whose prompt is kept for both.

    Returns:
        (bsz, length) which tokens are kept; (bsz, length) the index of each token in the packed row, where tokens of a
        shared prompt have the index of the kept copy; and the packing, in which responses continue a shared prompt.
    """
    first = torch.tensor(first_rows, device=mask.device)
    is_kept = mask.clone()
    is_kept[:, :prompt_length] &= (first == torch.arange(len(mask), device=mask.device)).unsqueeze(1)
    place_of = (is_kept.flatten().cumsum(0) - 1).view_as(is_kept)
    place_of = torch.cat([place_of[first, :prompt_length], place_of[:, prompt_length:]], dim=1)
    shared = {of for row, of in enumerate(first_rows) if of != row}
    lengths: list[int] = []
    before: list[int | None] = []
    prompt_of: dict[int, int] = {}  # row with a shared prompt: index of the prompt's sequence
    bounds = zip(mask[:, :prompt_length].sum(-1).tolist(), mask[:, prompt_length:].sum(-1).tolist(), strict=True)
    for row, (prompt, response) in enumerate(bounds):
        if row in shared:
            prompt_of[row] = len(lengths)
            lengths.append(prompt)
            before.append(None)
        parent = prompt_of.get(first_rows[row])
        tokens = response if parent is not None else prompt + response
        if tokens:
            lengths.append(tokens)
            before.append(parent)
    return is_kept, place_of, Packing.continuing(lengths, before, mask.device)


def _packed_positions(positions: Tensor, mask: Tensor) -> Tensor:
    """Lay out the positions of a packed row: (1, tokens), or (4, 1, tokens) from (bsz, 4, length)."""
    if positions.dim() == 2:
        return positions[mask].unsqueeze(0)
    return positions.transpose(0, 1)[:, mask].unsqueeze(1)


def divide(inputs: ModelInputs, group: dist.ProcessGroup) -> ModelInputs:
    """Return this rank's part of every row: the r-th of equal contiguous parts, after padding at the end.

    The padding of a packed row becomes one more sequence, which no other attends to. The vision tower runs over all
    images on every rank, and each rank takes the features of its own image tokens.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    length = inputs.input_ids.shape[1]
    extra = -length % ranks
    part = (length + extra) // ranks
    first = rank * part
    share = slice(first, first + part)
    # Padding is a sequence of its own, whose positions begin at 0.
    positions = torch.arange(extra, device=inputs.position_ids.device).expand(*inputs.position_ids.shape[:-1], extra)
    packing, padding = inputs.packing, None
    if packing is not None:
        longer = packing.followed_by(extra, inputs.input_ids.device) if extra else packing
        packing = replace(longer, group=group)
    elif inputs.attention_mask is not None:
        padding = Padding(functional.pad(inputs.attention_mask, (0, extra)), group)
    real = torch.ones_like(inputs.input_ids, dtype=torch.bool) if inputs.real is None else inputs.real
    images = inputs.images
    if images is not None:
        places = functional.pad(images.places, (0, extra))
        is_own = torch.zeros_like(places)
        is_own[:, share] = True
        # Mask of this rank's tokens among all image tokens, in order, which selects their features; a filler has none.
        in_pass = None if images.is_filler else is_own[places]
        images = replace(images, places=places[:, share], in_pass=in_pass)
    routed = inputs.routed_experts
    if routed is not None:
        # The routers choose for padding themselves.
        routed_rows = routed.view(*inputs.input_ids.shape, *routed.shape[1:])
        routed = functional.pad(routed_rows, (0, 0, 0, 0, 0, extra), value=unknown(routed.dtype))[:, share].flatten(
            0, 1
        )
    row, column = inputs.take // length, inputs.take % length
    mine = ((column >= first) & (column < first + part)).nonzero().flatten()
    per_token = {name: getattr(inputs, name) for name in ("topk_ids", "kept_ids", "teacher_hidden", "teacher_index")}
    return replace(
        inputs,
        input_ids=functional.pad(inputs.input_ids, (0, extra))[:, share],
        position_ids=torch.cat([inputs.position_ids, positions], dim=-1)[..., share],
        attention_mask=None,
        real=functional.pad(real, (0, extra))[:, share],
        packing=packing,
        padding=padding,
        take=row[mine] * part + column[mine] - first,
        targets=inputs.targets[mine],
        images=images,
        routed_experts=routed,
        **{name: None if values is None else values[mine] for name, values in per_token.items()},
        share=SequenceShare(places=mine, count=len(inputs.take), group=group),
    )


def check_token_ids(batch: DataProto, vocab_size: int) -> None:
    """Raise SchemaError if a token id is outside the vocabulary, which on a GPU would crash the process."""
    teacher_ids = batch.batch.get("teacher_topk_ids", None)
    if teacher_ids is not None and teacher_ids.numel() and (teacher_ids.max() >= vocab_size or teacher_ids.min() < 0):
        worst = int(teacher_ids.max() if teacher_ids.max() >= vocab_size else teacher_ids.min())
        raise SchemaError(
            f"the teacher's most likely tokens have the id {worst}, and the policy's vocabulary has {vocab_size} "
            "tokens: they have different tokenizers. Use a teacher with the policy's tokenizer."
        )
    ids = batch.batch["input_ids"]
    if ids.numel() and (int(ids.max()) >= vocab_size or int(ids.min()) < 0):
        row, column = ((ids >= vocab_size) | (ids < 0)).nonzero()[0].tolist()
        raise SchemaError(
            f"row {row} of the batch has the token id {int(ids[row, column])}, and the model's embedding has "
            f"{vocab_size} rows. Tokenize with the model's own tokenizer (model.tokenizer_path), take the text with "
            "that token out, or use a model whose embedding was resized."
        )


def check_one_rotation(batch: DataProto, threshold: int | None) -> None:
    """Raise ConfigError if some rows of a pass are longer than a longrope threshold, in tokens, and some are not.

    One long text changes the rotary embedding of all texts in its pass, and so the log-probs of the short ones. See
    :func:`verl.utils.model.longrope_threshold`; None allows everything.
    """
    if threshold is None:
        return
    lengths = batch.batch["attention_mask"].sum(-1)
    is_long = lengths > threshold
    if is_long.any() and not is_long.all():
        raise ConfigError(
            f"a pass has texts of {int(lengths.min())} to {int(lengths.max())} tokens, and the model's longrope "
            f"rotates all texts of a pass in another way once one has more than {threshold}: log-probs of the short "
            "ones would depend on their company. Set use_dynamic_bsz=false and micro-batch sizes of 1 (actor, ref "
            "and rollout.log_prob), or keep data.max_prompt_length + data.max_response_length at or below "
            f"{threshold}."
        )


def _check(mask: Tensor, is_response: Tensor, prompt_length: int, at_token: bool) -> None:
    """Refuse rows for which packed and padded inputs would give different results."""
    blocks = (mask[:, 1:] & ~mask[:, :-1]).sum(-1) + mask[:, 0]
    problems = {
        "has padding between its tokens; attention_mask must be zeros, then ones, then zeros": blocks > 1,
        "has response tokens (response_mask 1) where attention_mask is 0": (is_response & ~mask[:, prompt_length:]).any(
            -1
        ),
        "has a response without a prompt; its first token has nothing before it to predict it": (
            is_response.any(-1) & ~mask[:, :prompt_length].any(-1) & (not at_token)
        ),
        "has no token at all": blocks == 0,
    }
    for problem, rows in problems.items():
        if rows.any():
            raise SchemaError(f"row {int(rows.nonzero()[0])} of the batch {problem}.")
