"""Bytes of one model on one rank: what it keeps, and what a pass over some tokens takes besides.

Under FSDP2 every rank stores a part of each parameter in ``model_dtype``, its gradient and Adam's two moments in the
same format; a matrix that Muon trains has one moment. A pass gathers one decoder layer after another in the format of
the computation, and the root (embedding and head) for the whole of it. Under Megatron a rank computes with the weights
that it stores; gradients lie in fp32 buffers, and the optimizer has fp32 weights and two moments.

Activations are those that autograd keeps of Transformers' layers. With b bytes per number of the computation, H the
hidden size, A the width of queries, K that of keys, I the inner width of the feed-forward layer, one layer keeps of
each token

    norms          2 · (4 + 2b) H     input in fp32, normed value, output
    head norms     (4 + b) (A + K)    where queries and keys are normalised
    attention      b · (2A + 2K)      queries, keys, values, output
    feed-forward   4b · I             gate, its activation, up, their product

or with gradient checkpointing only its input, b · H, while one layer at a time is computed again. Where responses share
a prompt, attention keeps b · 2K more for each token of a copy of the prompt's keys and values.

Layers of megatron-core compute queries, keys and values in one tensor, which stays whole while the values are needed,
and gate and up in another, of whose second half they make a copy; and each layer makes its own cosines and sines of the
angles, for queries and for keys. With D the width of a head, that is

    rotation       4b · D
    attention      b · (3A + 3K)
    feed-forward   5b · I

Ranks that share matrices divide all of it but the rotation, and the norms only with sequence parallelism. With
checkpointing a pass keeps the fp32 angles, 4 · D, besides the layers' inputs.

Of p pipeline stages stage i, counted from 0, keeps p - i micro-batches of its layers; in v pieces each
(arXiv:2104.04473, section 2.2) the first keeps what (v p + p - 1) / (v p) times all layers keep of one, if all stages
have equally many. The last, which has the head, keeps one micro-batch of its layers, or (v p - p + 1) / (v p) times
all. Weights are those of the stage with most, whose activations may be fewer: a plan adds up both.

Multi-head latent attention keeps queries, keys and outputs as above, with the heads' widths; values in one tensor with
the keys' unrotated part; and the input in fp32, value and output of the norms of its latent vectors, of r numbers:

    latent vectors   (4 + 2b) · r
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from verl.plugins.plan.passes import PassTokens
from verl.plugins.plan.shapes import ModelShape

LOGITS_AT_ONCE = 2**27
"""Logits in memory at once: as :data:`verl.workers.engine.model.head.GPU_CHUNK_ELEMENTS`."""
_ADAM_MOMENTS = 2  # the running means of the gradient and of its square
BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
"""Bytes of one number by the name of its format."""


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """Division of one model among ranks."""

    shards: int = 1
    """Ranks over which stored weights, gradients and optimizer state are divided (FSDP)."""
    tensor: int = 1
    """Ranks that share each weight matrix."""
    divides_norms: bool = True
    """True if they divide the tokens between attention and feed-forward too (sequence parallelism)."""
    pipeline: int = 1
    """Ranks that share the layers (Megatron)."""
    pieces: int = 1
    """Pieces of the model on each of them, in turn."""
    piece_layers: tuple[int, ...] = ()
    """Layers of each piece, in their order; () is equally many."""
    expert: int = 1
    """Ranks that share the experts of a layer (Megatron)."""
    expert_tensor: int | None = None
    """Ranks that share the matrices of each expert; None is as many as share the other matrices."""
    replicas: int = 1
    """Ranks that hold the same part of the model."""
    is_on_host: bool = False
    """True if stored weights, gradients and optimizer state are in the host's memory, where the optimizer computes
    (FSDP's `offload_policy`)."""
    divides_optimizer: bool = True
    """True if they divide its optimizer state."""
    sequence: int = 1
    """Ranks that share each sequence (Ulysses)."""
    stored_bytes: int = 4
    """Bytes of a stored parameter."""
    compute_bytes: int = 2
    """Bytes of a number inside the passes."""
    is_gathered: bool = True
    """True if a pass computes with gathered copies: under FSDP, unless one rank stores what it computes with."""
    reshards: bool = True
    """True if a layer's copy is freed after its forward pass."""
    is_megatron: bool = False

    @property
    def ranks_per_model(self) -> int:
        """Ranks that compute the same rows."""
        return self.sequence * self.tensor * self.pipeline

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold the experts of one layer together."""
        return self.expert * (self.tensor if self.expert_tensor is None else self.expert_tensor)

    @property
    def expert_replicas(self) -> float:
        """Ranks that hold the same part of the experts."""
        return self.replicas * self.tensor / self.expert_ranks

    def piece_ranges(self, layers: int) -> list[tuple[int, int]]:
        """First and last layer (excluded) of each piece, in their order: those of stage i are i, p + i, 2 p + i ..."""
        count = self.pipeline * self.pieces
        counts = self.piece_layers or [
            layers * (piece + 1) // count - layers * piece // count for piece in range(count)
        ]
        ends = list(accumulate(counts))
        return [(end - size, end) for size, end in zip(counts, ends, strict=True)]


@dataclass(frozen=True, kw_only=True)
class ModelMemory:
    """One model on one rank.

    Attributes:
        outputs: width of the head; None is the vocabulary size.
        trained: parameters that are trained: all, those of adapters, or 0 for a frozen model.
        checkpoints: whether layers are computed again in the backward pass.
        with_entropy: whether training passes compute entropies.
    """

    shape: ModelShape
    layout: RankLayout
    trained: int
    checkpoints: bool = True
    outputs: int | None = None
    with_entropy: bool = True
    adapters: int = 0
    """Parameters of adapters, stored beside the model's, under FSDP in fp32."""
    is_muon: bool = False
    """True if matrices of layers, and adapters, are trained by Muon."""
    adam_bytes: int = 4 * _ADAM_MOMENTS
    """Bytes of the moments of one parameter that Adam trains, under Megatron."""
    offload_fraction: float = 0.0
    """Part of the optimizer's state that stays in host memory, under Megatron."""
    heads: int = 0
    """Heads of multi-token prediction, which are trained on the last stage of a pipeline."""

    # ---- what lies in memory between passes

    def _part(self, parameters: float, is_divided_further: bool = False) -> float:
        """Return how many of ``parameters`` are on one rank; experts are divided over other ranks than the rest.

        With ``is_divided_further`` the ranks with equal parts divide them.
        """
        lay = self.layout
        replicas, expert_replicas = (lay.replicas, lay.expert_replicas) if is_divided_further else (1, 1)
        largest = max(
            rest / lay.tensor / replicas + experts / lay.expert_ranks / expert_replicas
            for rest, experts in self._stage_parameters
        )
        return largest * parameters / self.parameters

    @property
    def parameters(self) -> int:
        """Parameters of the model and its heads."""
        return self.shape.parameters(self.outputs) + self.heads * sum(self.shape.parameters_of_head)

    @cached_property
    def _stage_parameters(self) -> list[tuple[int, int]]:
        """Return for each pipeline stage the parameters of all but experts, and of experts.

        A head that is the embedding is on the last stage once more.
        """
        s, lay = self.shape, self.layout
        head_sizes = [self.heads * size for size in s.parameters_of_head]
        if lay.pipeline == 1:
            return [
                (s.parameters(self.outputs) - s.expert_parameters + head_sizes[0], s.expert_parameters + head_sizes[1])
            ]
        stages = [[0, 0] for _ in range(lay.pipeline)]
        for piece, ends in enumerate(lay.piece_ranges(s.layers)):
            for kind, size in enumerate(s.parameters_of_layers(*ends)):
                stages[piece % lay.pipeline][kind] += size
        stages[0][0] += s.embedding_parameters
        stages[-1][0] += s.hidden + (s.head_parameters(self.outputs) or s.embedding_parameters)
        # Heads read tokens by a copy of the embedding.
        copied = s.embedding_parameters if self.heads and not s.is_tied else 0
        stages[-1] = [size + head_size for size, head_size in zip(stages[-1], head_sizes, strict=True)]
        stages[-1][0] += copied
        return [(rest, experts) for rest, experts in stages]

    @property
    def weights(self) -> float:
        """Bytes of the stored weights."""
        lay = self.layout
        if lay.is_on_host:
            return 0.0
        adapters = self._part(self.adapters) * lay.stored_bytes if lay.is_megatron else self.adapters * 4
        return (self._part(self.parameters) * lay.stored_bytes + adapters) / lay.shards

    @property
    def gradients(self) -> float:
        """Bytes of the gradients between backward pass and optimizer step."""
        lay = self.layout
        if lay.is_on_host:
            return 0.0
        size = 4 if lay.is_megatron or self.adapters else lay.stored_bytes
        return self._part(self.trained) * size / lay.shards

    @property
    def optimizer(self) -> float:
        """Bytes of Adam's moments, and under Megatron of the fp32 weights."""
        lay = self.layout
        if lay.is_on_host:
            return 0.0
        if lay.is_megatron:
            return self._optimizer_of_megatron - self.state_on_host
        size = 4 if self.adapters else lay.stored_bytes
        return self._moments * size / lay.shards / lay.tensor

    @property
    def state_on_host(self) -> float:
        """Bytes of optimizer state and fp32 weights that stay in host memory between steps, under Megatron."""
        return self.offload_fraction * self._optimizer_of_megatron if self.layout.is_megatron else 0.0

    @property
    def _optimizer_of_megatron(self) -> float:
        per_parameter = self._moment_bytes + (4 if self.layout.stored_bytes < 4 else 0)
        return self._part(self.trained, self.layout.divides_optimizer) * per_parameter

    @property
    def _moments(self) -> int:
        """Numbers that the optimizer keeps of all parameters under FSDP."""
        return self.trained * _ADAM_MOMENTS - self._by_muon

    @property
    def _by_muon(self) -> int:
        return min(self.trained, self.adapters or self.shape.matrix_parameters) if self.is_muon else 0

    @property
    def _moment_bytes(self) -> float:
        """Bytes that the optimizer keeps of a parameter under Megatron, the mean over all: 4 of those of Muon."""
        return self.adam_bytes - (self.adam_bytes - 4) * self._by_muon / max(self.trained, 1)

    @property
    def state(self) -> float:
        """Bytes that a checkpoint, or a copy in memory, has of this rank: trained weights and their moments."""
        lay = self.layout
        if lay.is_megatron:
            return self._part(self.trained, lay.divides_optimizer) * (4 + self._moment_bytes)
        size = 4 if self.adapters else lay.stored_bytes
        return (self.trained + self._moments) * size / lay.shards / lay.tensor

    # ---- what a pass takes

    def layer_activations(self, is_sparse: bool) -> float:
        """Bytes that a layer keeps for its backward pass, per token of this rank's part; a sparse one has experts."""
        s, b = self.shape, self.layout.compute_bytes
        width = s.active_experts * s.expert_width + s.shared_width if is_sparse else s.feed_forward
        # Experts' inputs and outputs are copies, sorted by expert; some routers compute with hidden states in fp32.
        routed = s.active_experts * s.hidden * b * 3 if is_sparse else 0
        routed += 4 * s.hidden if is_sparse and s.has_exact_routers else 0
        norms = 2 * (4 + 2 * b) * s.hidden
        head_norms = (4 + b) * (s.attention_width + s.kv_width) if s.has_head_norms else 0
        attention = b * (s.attention_width + s.keys_and_values + s.output_width)
        if s.latent:
            attention += b * s.heads * s.latent.unrotated
            norms += (4 + 2 * b) * s.latent.ranks
        if not self.layout.is_megatron:
            return norms + (head_norms + attention + 4 * b * width + routed) / self.layout.tensor
        if not s.latent:
            attention += b * (s.attention_width + s.kv_width)
        divided = head_norms + attention + 5 * b * width + routed
        rotation = 0 if s.latent else 4 * b * s.head_dim
        return norms / self._norm_ranks + divided / self.layout.tensor + rotation

    @property
    def _largest_activations(self) -> float:
        """As :meth:`layer_activations`, of the layer that keeps most."""
        return max(self.layer_activations(is_sparse) for is_sparse in self.shape.kinds)

    @property
    def _norm_ranks(self) -> int:
        """Ranks that divide what is between attention and feed-forward."""
        return self.layout.tensor if self.layout.divides_norms else 1

    @property
    def copied_keys(self) -> float:
        """Bytes of keys and values in one layer, per token."""
        return self.layout.compute_bytes * self.shape.keys_and_values / self.layout.tensor

    def kept_activations(self, tokens: float, copies: float = 0.0) -> float:
        """Bytes that all layers keep of ``tokens`` tokens of this rank's part until their backward passes.

        ``copies`` are tokens of this part whose keys and values were copied for responses that share a prompt. In a
        pipeline these are the bytes of the stage that keeps most.
        """
        lay = self.layout
        return max(
            self._stage_activations(tokens, copies, stage, has_head=lay.pipeline == 1) for stage in range(lay.pipeline)
        )

    def _kept_by_last_stage(self, tokens: float, copies: float) -> float:
        return self._stage_activations(tokens, copies, self.layout.pipeline - 1, has_head=True)

    def _stage_activations(self, tokens: float, copies: float, stage: int, has_head: bool) -> float:
        """Bytes kept by a stage of its passes before its first backward pass, with a norm before the head.

        Passes go through the pieces of a stage in turn, p micro-batches through each.
        """
        s, lay = self.shape, self.layout
        passes = lay.pipeline - stage
        if lay.pieces > 1:
            passes += lay.pipeline - stage - 1 + (lay.pieces - 1) * lay.pipeline
        pieces = lay.piece_ranges(s.layers)[stage :: lay.pipeline]
        norm = (4 + lay.compute_bytes) * s.hidden / self._norm_ranks if has_head else 0.0
        angle_width = s.latent.rotated if s.latent else s.head_dim
        angles = 4 * angle_width if self.checkpoints and lay.is_megatron else 0
        per_token, layers = norm + passes * angles, 0
        for pass_index in range(passes):
            dense, sparse = s.layers_between(*pieces[pass_index // lay.pipeline % lay.pieces])
            layers = dense + sparse
            if self.checkpoints:
                per_token += layers * lay.compute_bytes * s.hidden / self._norm_ranks
            else:
                per_token += dense * self.layer_activations(False) + sparse * self.layer_activations(True)
        if stage == lay.pipeline - 1:
            is_sparse = s.layers - 1 in s.sparse_layers
            layer_input = lay.compute_bytes * s.hidden / self._norm_ranks
            per_token += self.heads * (layer_input if self.checkpoints else self.layer_activations(is_sparse))
        copied = 0.0 if self.checkpoints else copies * self.copied_keys * layers
        return tokens * per_token + copied

    def logits(self, tokens: float, with_gradient: bool) -> float:
        """Bytes of the logits that are in memory at once.

        Under FSDP four copies in fp32, two without gradients, and one in another compute format. Under Megatron three
        in fp32, and a fourth for the gradient of the entropy, else the gradient in another compute format.
        """
        if self.outputs is not None:
            return 0.0
        vocabulary = self.shape.vocabulary / self.layout.tensor
        at_once = min(tokens * vocabulary, max(LOGITS_AT_ONCE, vocabulary))
        converted = self.layout.compute_bytes if self.layout.compute_bytes < 4 else 0
        if self.layout.is_megatron:
            last = (4 if self.with_entropy else converted) if with_gradient else 0
            return at_once * (3 * 4 + last)
        return at_once * ((4 * 4 if with_gradient else 2 * 4) + converted)

    def _gathered_layers(self, with_gradient: bool) -> float:
        lay = self.layout
        if lay.is_megatron or not lay.is_gathered:
            return 0.0
        size = self.shape.largest_layer_parameters / lay.tensor
        if not lay.reshards:
            gathered = sum(self.shape.parameters_of_layers(0, self.shape.layers)) / lay.tensor * lay.compute_bytes
            return gathered + (size * (lay.compute_bytes + 4) if with_gradient else 0)
        # This layer's, the next one's, and the gradient in the format of the computation and of the reduction.
        trains = with_gradient and not self.adapters
        return size * (2 * lay.compute_bytes + (lay.compute_bytes + 4 if trains else 0))

    def _root(self) -> tuple[float, float]:
        """Bytes of embedding and head as gathered, and of the gradient of the head alone."""
        s, b = self.shape, self.layout.compute_bytes
        if self.layout.is_megatron or not self.layout.is_gathered:
            return 0.0, 0.0
        head = s.head_parameters(self.outputs) or s.embedding_parameters
        total = s.embedding_parameters + s.head_parameters(self.outputs)
        trains = self.trained > 0 and not self.adapters
        divided = b / self.layout.tensor
        return total * divided, head * divided if trains else 0.0

    def training_pass(self, tokens: PassTokens) -> Mapping[str, float]:
        """Bytes at the highest point of a forward and backward pass over a micro-batch, by part.

        ``tokens`` are those of all ranks that share the micro-batch.
        """
        s, lay, b = self.shape, self.layout, self.layout.compute_bytes
        own_tokens, copies = tokens.computed / lay.sequence, (tokens.keys - tokens.computed) / lay.sequence
        root, head_gradient = self._root()
        responses = tokens.responses / lay.sequence
        head, hidden = self.logits(responses, with_gradient=True), own_tokens * b * s.hidden
        layer = own_tokens * self._largest_activations + copies * self.copied_keys if self.checkpoints else 0.0
        layer += own_tokens * 2 * b * (s.feed_forward / lay.tensor + s.hidden)  # gradients
        everything = (s.embedding_parameters + s.head_parameters(self.outputs)) / lay.tensor
        root_moment = {  # its gradients, once more in the format of the reduction
            "activations": 0.0,
            "gathered": root * 2 + everything * 4 if head_gradient else root,
            "logits": 0.0,
        }
        if lay.is_megatron and self.trained:
            hidden += 2 * responses * b * s.hidden  # those of the responses, and their gradients
        if lay.is_megatron and self.trained and not self.adapters:
            # Gradients of weights are made one matrix after the other, and added to their buffers.
            head += (s.head_parameters(self.outputs) or s.embedding_parameters) * b / lay.tensor
            layer += 2 * s.hidden * s.feed_forward * b / lay.tensor
            root_moment["activations"] = s.embedding_parameters * b / lay.tensor
        moments = (
            {
                "activations": self._kept_by_last_stage(own_tokens, copies) + hidden,
                "gathered": root + head_gradient,
                "logits": head,
            },
            {
                "activations": self.kept_activations(own_tokens, copies) + layer,
                "gathered": root + head_gradient + self._gathered_layers(with_gradient=True),
                "logits": 0.0,
            },
            root_moment,
        )
        return max(moments, key=lambda parts: sum(parts.values()))

    def inference_pass(self, tokens: PassTokens) -> Mapping[str, float]:
        """As :meth:`training_pass`, without gradients."""
        s, lay = self.shape, self.layout
        own_tokens, b = tokens.computed / lay.sequence, lay.compute_bytes
        copies = (tokens.keys - tokens.computed) / lay.sequence
        root, _ = self._root()
        at_once = (
            own_tokens * ((4 + 3 * b) * s.hidden + 3 * b * s.feed_forward / lay.tensor) + copies * self.copied_keys
        )
        head = self.logits(tokens.responses / lay.sequence, with_gradient=False)
        layers = {"activations": at_once, "gathered": root + self._gathered_layers(with_gradient=False), "logits": 0.0}
        last = {"activations": own_tokens * 2 * b * s.hidden, "gathered": root, "logits": head}
        return max((layers, last), key=lambda parts: sum(parts.values()))
