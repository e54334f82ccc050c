"""Sizes of a decoder's parts, from its ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from verl.errors import ConfigError
from verl.utils.flops_counter import FlopsCounter
from verl.utils.model_facts.experts import ExpertSizes
from verl.utils.model_facts.model_files import GGUF

if TYPE_CHECKING:
    from verl.base.types import JsonMapping

FAMILIES = ("deepseek_v3", "gemma", "glm4_moe", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""``model_type`` of models whose parameters and activations are counted; each is compared with Transformers."""

_TIED = ("gemma",)
"""Families whose head is their embedding unless the file says otherwise."""
_HEAD_NORMS = ("qwen3", "qwen3_moe")
"""Families that normalise queries and keys."""
_BIASED_INPUTS = ("qwen2",)
"""Families whose projections to queries, keys and values have a bias."""
_EXACT_ROUTERS = ("deepseek_v3", "glm4_moe")
"""Families whose routers compute in fp32."""
_UNBIASED_OUTPUTS = ("glm4_moe",)
"""Families whose `attention_bias` is of queries, keys and values alone."""
_FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_LATENT_FIELDS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_OPTIONAL = (
    "num_key_value_heads", "head_dim", "q_lora_rank", "num_experts", "num_local_experts", "n_routed_experts",
    "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "n_shared_experts",
    "first_k_dense_replace", "decoder_sparse_step",
)  # fmt: skip
"""Entries that may be missing, null or 0."""


class _Fields(SimpleNamespace):
    """Entries of config.json as attributes, in the form that FlopsCounter reads."""

    def get_text_config(self) -> _Fields:
        return self


@dataclass(frozen=True, kw_only=True)
class LatentWidths:
    """Widths of multi-head latent attention (arXiv:2405.04434)."""

    query_rank: int | None
    """Width of the latent vectors of queries; None if queries are projected from hidden states."""
    kv_rank: int
    """Width of the latent vectors of keys and values."""
    rotated: int
    """Numbers of a query or a key that depend on the position; those of the key are one for all heads."""
    unrotated: int
    value: int
    """Width of a head's value."""

    @classmethod
    def from_fields(cls, fields: JsonMapping) -> LatentWidths | None:
        """Read the entries of a config.json; None if they are of another attention."""
        if not fields.get("kv_lora_rank"):
            return None
        return cls(
            query_rank=fields.get("q_lora_rank"),
            kv_rank=fields["kv_lora_rank"],
            rotated=fields["qk_rope_head_dim"],
            unrotated=fields["qk_nope_head_dim"],
            value=fields["v_head_dim"],
        )

    @property
    def cached(self) -> int:
        """Numbers of a token that engines cache: the latent vector, and the rotated part of the keys."""
        return self.kv_rank + self.rotated

    @property
    def ranks(self) -> int:
        """Width of all latent vectors of a token."""
        return self.kv_rank + (self.query_rank or 0)

    def linear_sizes(self, hidden: int, heads: int, layers: int) -> dict[str, tuple[int, int, int]]:
        """As :attr:`ModelShape.linear_sizes`, of attention alone."""
        query = heads * (self.unrotated + self.rotated)
        queries = {"q_proj": (hidden, query, layers)}
        if self.query_rank:
            queries = {
                "q_a_proj": (hidden, self.query_rank, layers),
                "q_b_proj": (self.query_rank, query, layers),
            }
        return queries | {
            "kv_a_proj_with_mqa": (hidden, self.cached, layers),
            "kv_b_proj": (self.kv_rank, heads * (self.unrotated + self.value), layers),
            "o_proj": (heads * self.value, hidden, layers),
        }


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder with rotary attention, RMS norms and gated feed-forward layers, dense or of experts."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    """Inner width of a dense layer."""
    vocabulary: int
    is_tied: bool
    """True if the head is the embedding."""
    has_biases: bool
    """True if all projections of attention have a bias."""
    has_head_norms: bool
    """True if queries and keys are normalised."""
    latent: LatentWidths | None
    sparse_layers: tuple[int, ...] = ()
    """Numbers of the layers that have experts."""
    experts: int
    """Experts of each of them."""
    active_experts: int
    """Experts that each token takes."""
    expert_width: int
    shared_width: int
    """Inner width of what every token passes beside its experts; 0 without."""
    fields: Mapping[str, object] = field(hash=False)
    """Entries of config.json."""

    @classmethod
    def from_fields(cls, fields: JsonMapping, where: str) -> ModelShape:
        """Read the entries of a config.json; ``where`` names it in errors.

        Raises:
            ConfigError: it is of a family that is not counted, or lacks an entry.
        """
        family = fields.get("model_type")
        if family not in FAMILIES:
            raise ConfigError(
                f"{where}: model_type={family} is not planned for; its parts are of other sizes. Planned for are "
                f"{', '.join(FAMILIES)}."
            )
        needed = (*_FIELDS, *(_LATENT_FIELDS if family == "deepseek_v3" or fields.get("kv_lora_rank") else ()))
        invalid = [name for name in needed if not isinstance(value := fields.get(name), int) or value < 1]
        invalid += [name for name in _OPTIONAL if not isinstance(value := fields.get(name) or 0, int) or value < 0]
        listed = fields.get("mlp_only_layers") or []
        if not isinstance(listed, list) or not all(isinstance(layer, int) for layer in listed):
            raise ConfigError(
                f"{where}: mlp_only_layers={listed!r} must be a list of numbers of layers. Take the model's own "
                "config.json."
            )
        if invalid:
            raise ConfigError(f"{where}: {', '.join(invalid)} must be whole numbers. Take the model's own config.json.")
        heads, layers = fields["num_attention_heads"], fields["num_hidden_layers"]
        experts, latent = ExpertSizes.from_config(_Fields(**fields)), LatentWidths.from_fields(fields)
        head_width = latent.unrotated + latent.rotated if latent else fields["hidden_size"] // heads
        return cls(
            family=family,
            layers=layers,
            hidden=fields["hidden_size"],
            heads=heads,
            kv_heads=fields.get("num_key_value_heads") or heads,
            head_dim=head_width if latent else fields.get("head_dim") or head_width,
            feed_forward=fields["intermediate_size"],
            vocabulary=fields["vocab_size"],
            is_tied=bool(fields.get("tie_word_embeddings", family in _TIED)),
            has_biases=bool(fields.get("attention_bias", False)) and family not in _BIASED_INPUTS,
            has_head_norms=family in _HEAD_NORMS or bool(fields.get("use_qk_norm", False)),
            latent=latent,
            sparse_layers=experts.sparse_layers if experts else (),
            experts=experts.count if experts else 0,
            active_experts=experts.per_token if experts else 0,
            expert_width=experts.width if experts else 0,
            shared_width=experts.shared_width if experts else 0,
            fields=fields,
        )

    @classmethod
    def read(cls, name_or_path: str, overrides: Mapping[str, object] | None = None) -> ModelShape:
        """Read the shape of a model folder, or of a name on the Hugging Face hub.

        ``overrides`` replace entries of the file (``model.override_config``).

        Raises:
            ConfigError: there is no such file, or it describes another kind of model.
        """
        file = config_file(name_or_path)
        try:
            fields = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read as the config of a model: {error}.") from error
        return cls.from_fields({**fields, **(overrides or {})}, str(file))

    @property
    def dense_layers(self) -> int:
        """Return the number of layers without experts."""
        return self.layers - len(self.sparse_layers)

    @property
    def has_exact_routers(self) -> bool:
        """Return whether routers compute in fp32."""
        return self.family in _EXACT_ROUTERS

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Return the kinds of layers that occur: False for those without experts, True for those with experts."""
        return (*([False] if self.dense_layers else []), *([True] if self.sparse_layers else []))

    @property
    def attention_width(self) -> int:
        """Width of all queries."""
        return self.heads * self.head_dim

    @property
    def output_width(self) -> int:
        """Width of what attention returns for all heads."""
        return self.heads * self.latent.value if self.latent else self.attention_width

    @property
    def kv_width(self) -> int:
        """Width of all keys."""
        return self.kv_heads * self.head_dim

    @property
    def keys_and_values(self) -> int:
        """Width of all keys and values together, as attention reads them in training."""
        return self.kv_width + self.kv_heads * (self.latent.value if self.latent else self.head_dim)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding."""
        return self.vocabulary * self.hidden

    def head_parameters(self, outputs: int | None = None) -> int:
        """Parameters that only the head has; ``outputs`` is its width if it is not the vocabulary's."""
        if outputs is not None:
            return (self.hidden + 1) * outputs
        return 0 if self.is_tied else self.embedding_parameters

    @cached_property
    def linear_sizes(self) -> dict[str, tuple[int, int, int]]:
        """Linear layers of all decoder layers: name → (inputs, outputs, how many there are)."""
        h, a, kv = self.hidden, self.attention_width, self.kv_width
        sparse = len(self.sparse_layers)
        if self.latent:
            sizes = self.latent.linear_sizes(h, self.heads, self.layers)
        else:
            sizes = {
                "q_proj": (h, a, self.layers),
                "k_proj": (h, kv, self.layers),
                "v_proj": (h, kv, self.layers),
                "o_proj": (a, h, self.layers),
            }
        for name, width, count in (
            ("", self.feed_forward, self.dense_layers),
            ("experts.", self.expert_width, sparse * self.experts),
            ("shared_experts.", self.shared_width, sparse),
        ):
            if count and width:
                sizes |= {f"{name}gate_proj": (h, width, count), f"{name}up_proj": (h, width, count)}
                sizes[f"{name}down_proj"] = (width, h, count)
        return sizes

    @property
    def tensors(self) -> int:
        """Tensors of a checkpoint."""
        linear = sum(count for _, _, count in self.linear_sizes.values())
        norms = 4 if self.has_head_norms or self.latent else 2
        biases = 3 if self.family in _BIASED_INPUTS or self.has_biases else 0
        return linear + self.layers * (norms + biases) + len(self.sparse_layers) + 3 - self.is_tied

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts, without their routers."""
        sizes = (size for name, size in self.linear_sizes.items() if name.startswith("experts."))
        return sum(inputs * outputs * count for inputs, outputs, count in sizes)

    @property
    def matrix_parameters(self) -> int:
        """Parameters of all matrices of decoder layers, routers among them."""
        linear = sum(inputs * outputs * count for inputs, outputs, count in self.linear_sizes.values())
        return linear + len(self.sparse_layers) * self.experts * self.hidden

    @cached_property
    def largest_layer_parameters(self) -> int:
        """Parameters of the largest decoder layer."""
        return max(sum(self.parameters_of_layers(layer, layer + 1)) for layer in range(self.layers))

    @property
    def _vector_parameters(self) -> int:
        """Parameters of a layer's norms and biases."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.has_head_norms else 0)
        if self.latent:
            biases = (self.latent.query_rank or 0) + self.latent.cached + self.hidden if self.has_biases else 0
            return norms + self.latent.ranks + biases
        biases = self.attention_width + 2 * self.kv_width if self.has_biases or self.family in _BIASED_INPUTS else 0
        biases += self.hidden if self.has_biases and self.family not in _UNBIASED_OUTPUTS else 0
        return norms + biases

    def layers_between(self, first: int, last: int) -> tuple[int, int]:
        """Count the layers ``first`` to ``last`` (excluded) without experts, and those with experts."""
        sparse = sum(first <= layer < last for layer in self.sparse_layers)
        return last - first - sparse, sparse

    def matrices_of_layer(self, is_sparse: bool) -> tuple[int, int]:
        """Parameters of the matrices of a layer without or with experts: of all but experts, and of experts."""
        attention = sum(
            inputs * outputs for name, (inputs, outputs, _) in self.linear_sizes.items() if _is_of_attention(name)
        )
        if not is_sparse:
            return attention + 3 * self.hidden * self.feed_forward, 0
        rest = attention + self.hidden * (3 * self.shared_width + self.experts)
        return rest, self.experts * 3 * self.hidden * self.expert_width

    def parameters_of_layers(self, first: int, last: int) -> tuple[int, int]:
        """Parameters of layers ``first`` to ``last`` (excluded): of all but experts, and of experts."""
        rest, experts = (last - first) * self._vector_parameters, 0
        for is_sparse, count in zip((False, True), self.layers_between(first, last), strict=True):
            matrices, expert_matrices = self.matrices_of_layer(is_sparse)
            rest += count * matrices
            experts += count * expert_matrices
        return rest, experts

    @property
    def parameters_of_head(self) -> tuple[int, int]:
        """Parameters of a head of multi-token prediction: of all but experts, and of experts.

        It is a layer like the last one, a product with both its inputs, and three norms; embedding and output matrix
        are the model's (arXiv:2412.19437, section 2.2).
        """
        rest, experts = self.parameters_of_layers(self.layers - 1, self.layers)
        return rest + (2 * self.hidden + 3) * self.hidden, experts

    def parameters(self, outputs: int | None = None) -> int:
        """All parameters; ``outputs`` as in :meth:`head_parameters`."""
        layers = sum(self.parameters_of_layers(0, self.layers))
        return layers + self.hidden + self.embedding_parameters + self.head_parameters(outputs)

    def adapter_parameters(
        self, rank: int, names: tuple[str, ...] | None = None, expert_names: tuple[str, ...] = ()
    ) -> int:
        """Parameters of LoRA adapters of a rank.

        Args:
            rank: of each adapter.
            names: endings of the linear layers that have them; None is all. A mixture of experts has linear layers in
                attention alone.
            expert_names: endings of the weights of several experts that have one for each expert.
        """
        sizes = {
            name: size
            for name, size in self.linear_sizes.items()
            if not (self.experts and not _is_of_attention(name))
            and (names is None or any(name.endswith(ending) for ending in names))
        }
        count, h, width = len(self.sparse_layers) * self.experts, self.hidden, self.expert_width
        joined = {"gate_up_proj": (h, 2 * width, count), "down_proj": (width, h, count)}
        sizes |= {
            f"experts.{name}": size for name, size in joined.items() if any(e.endswith(name) for e in expert_names)
        }
        return sum(rank * (inputs + outputs) * count for inputs, outputs, count in sizes.values())

    def cached_bytes(self, bytes_per_number: int, ranks: int = 1, per_head: bool = False) -> float:
        """Bytes of one token's keys and values in all layers, on each of ``ranks`` ranks that share the heads.

        More ranks than key heads repeat these. With latent attention engines cache the latent vector, on every rank;
        with ``per_head`` the keys and values of all heads that are made of it, as Transformers does.
        """
        if self.latent and not per_head:
            return float(self.layers * self.latent.cached * bytes_per_number)
        return self.layers * self.keys_and_values * bytes_per_number / min(ranks, self.kv_heads)

    def flops(self, outputs: int | None = None, is_frozen: bool = False, heads: int = 0) -> FlopsCounter:
        """Return the counter of the FLOPs of this model's passes."""
        fields = {"num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, **self.fields}
        config: Any = _Fields(**fields)
        return FlopsCounter(config, outputs, is_frozen, heads)


def _is_of_attention(name: str) -> bool:
    return name.rpartition(".")[2] not in ("gate_proj", "up_proj", "down_proj")


def config_file(name_or_path: str) -> Path:
    """Return the config.json of a model folder or GGUF file, or of a name on the Hugging Face hub, which is downloaded.

    Raises:
        ConfigError: there is none.
    """
    folder = Path(name_or_path).expanduser()
    if folder.suffix == GGUF:
        from verl.utils.model import resolve_model_path  # with PyTorch, which other plans do without

        folder = Path(resolve_model_path(name_or_path))
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} holds no config.json. Name the folder of a model.")
        return folder / "config.json"
    if folder.is_absolute() or len(folder.parts) > 2:
        raise ConfigError(f"there is no folder {folder}. Name the folder of a model, or its name on the hub.")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name_or_path, "config.json"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"config.json of {name_or_path} is neither in a folder of that name nor to be had from the hub "
            f"({type(error).__name__}). A file config.json in a folder is all that a plan needs."
        ) from error
