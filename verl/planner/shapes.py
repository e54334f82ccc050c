"""Sizes of a decoder's parts, from its ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from verl.errors import ConfigError
from verl.utils.flops_counter import FlopsCounter
from verl.utils.model_facts.experts import ExpertSizes

if TYPE_CHECKING:
    from verl.base.types import JsonMapping

FAMILIES = ("gemma", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""``model_type`` of models whose parameters and activations are counted; each is compared with Transformers."""

_TIED = ("gemma",)
"""Families whose head is their embedding unless the file says otherwise."""
_HEAD_NORMS = ("qwen3", "qwen3_moe")
"""Families that normalise queries and keys."""
_BIASED_INPUTS = ("qwen2",)
"""Families whose projections to queries, keys and values have a bias."""
_FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


class _Fields(SimpleNamespace):
    """Entries of config.json as attributes, in the form that FlopsCounter reads."""

    def get_text_config(self) -> _Fields:
        return self


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
    """Whether the head is the embedding."""
    has_biases: bool
    """Whether all projections of attention have a bias."""
    dense_layers: int
    """Layers without experts."""
    experts: int
    """Experts of the other layers."""
    active_experts: int
    """Experts that each token takes."""
    expert_width: int
    fields: Mapping[str, object]
    """Entries of config.json."""

    @classmethod
    def of(cls, fields: JsonMapping, where: str) -> ModelShape:
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
        if missing := [name for name in _FIELDS if not isinstance(fields.get(name), int)]:
            raise ConfigError(f"{where}: {', '.join(missing)} must be whole numbers. Take the model's own config.json.")
        heads, layers = fields["num_attention_heads"], fields["num_hidden_layers"]
        experts = ExpertSizes.of(_Fields(**fields))
        return cls(
            family=family,
            layers=layers,
            hidden=fields["hidden_size"],
            heads=heads,
            kv_heads=fields.get("num_key_value_heads") or heads,
            head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
            feed_forward=fields["intermediate_size"],
            vocabulary=fields["vocab_size"],
            is_tied=bool(fields.get("tie_word_embeddings", family in _TIED)),
            has_biases=bool(fields.get("attention_bias", False)) and family not in _BIASED_INPUTS,
            dense_layers=layers - sum(experts.sparse) if experts else layers,
            experts=experts.count if experts else 0,
            active_experts=experts.per_token if experts else 0,
            expert_width=experts.width if experts else 0,
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
        return cls.of({**fields, **(overrides or {})}, str(file))

    @property
    def attention_width(self) -> int:
        """Width of all queries."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all keys."""
        return self.kv_heads * self.head_dim

    @property
    def has_head_norms(self) -> bool:
        """Whether queries and keys are normalised."""
        return self.family in _HEAD_NORMS

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding."""
        return self.vocabulary * self.hidden

    def head_parameters(self, outputs: int | None = None) -> int:
        """Parameters that only the head has; ``outputs`` is its width if it is not the vocabulary's."""
        if outputs is not None:
            return (self.hidden + 1) * outputs
        return 0 if self.is_tied else self.embedding_parameters

    @property
    def linear_sizes(self) -> dict[str, tuple[int, int, int]]:
        """Linear layers of all decoder layers: name → (inputs, outputs, how many there are)."""
        h, a, kv = self.hidden, self.attention_width, self.kv_width
        sparse = (self.layers - self.dense_layers) * self.experts
        sizes = {
            "q_proj": (h, a, self.layers),
            "k_proj": (h, kv, self.layers),
            "v_proj": (h, kv, self.layers),
            "o_proj": (a, h, self.layers),
        }
        for name, width, count in (
            ("", self.feed_forward, self.dense_layers),
            ("experts.", self.expert_width, sparse),
        ):
            if count:
                sizes |= {f"{name}gate_proj": (h, width, count), f"{name}up_proj": (h, width, count)}
                sizes[f"{name}down_proj"] = (width, h, count)
        return sizes

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts, without their routers."""
        sizes = (size for name, size in self.linear_sizes.items() if name.startswith("experts."))
        return sum(inputs * outputs * count for inputs, outputs, count in sizes)

    @property
    def matrix_parameters(self) -> int:
        """Parameters of all matrices of decoder layers, routers among them."""
        linear = sum(inputs * outputs * count for inputs, outputs, count in self.linear_sizes.values())
        return linear + (self.layers - self.dense_layers) * self.experts * self.hidden

    @property
    def layer_parameters(self) -> float:
        """Parameters of a decoder layer, on average."""
        h = self.hidden
        norms = 2 * h + (2 * self.head_dim if self.has_head_norms else 0)
        biases = self.attention_width + 2 * self.kv_width if self.has_biases or self.family in _BIASED_INPUTS else 0
        biases += h if self.has_biases else 0
        return self.matrix_parameters / self.layers + norms + biases

    def parameters(self, outputs: int | None = None) -> int:
        """All parameters; ``outputs`` as in :meth:`head_parameters`."""
        layers = round(self.layer_parameters * self.layers)
        return layers + self.hidden + self.embedding_parameters + self.head_parameters(outputs)

    def adapter_parameters(
        self, rank: int, names: tuple[str, ...] | None = None, of_experts: tuple[str, ...] = ()
    ) -> int:
        """Parameters of LoRA adapters of a rank.

        Args:
            rank: of each adapter.
            names: endings of the linear layers that have them; None is all. A mixture of experts has linear layers in
                attention alone.
            of_experts: endings of the weights of several experts that have one for each expert.
        """
        feed_forward = ("gate_proj", "up_proj", "down_proj")
        sizes = {
            name: size
            for name, size in self.linear_sizes.items()
            if not (self.experts and name.rpartition(".")[2] in feed_forward)
            and (names is None or any(name.endswith(ending) for ending in names))
        }
        count, h, width = (self.layers - self.dense_layers) * self.experts, self.hidden, self.expert_width
        joined = {"gate_up_proj": (h, 2 * width, count), "down_proj": (width, h, count)}
        sizes |= {f"experts.{name}": size for name, size in joined.items() if any(e.endswith(name) for e in of_experts)}
        return sum(rank * (inputs + outputs) * count for inputs, outputs, count in sizes.values())

    def kv_bytes(self, bytes_per_number: int) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_width * bytes_per_number

    def flops(self, outputs: int | None = None, is_frozen: bool = False) -> FlopsCounter:
        """Return the counter of the FLOPs of this model's passes."""
        fields = {"num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, **self.fields}
        config: Any = _Fields(**fields)
        return FlopsCounter(config, outputs, is_frozen)


def config_file(name_or_path: str) -> Path:
    """Return the config.json of a model folder, or of a name on the Hugging Face hub, which is downloaded.

    Raises:
        ConfigError: there is none.
    """
    folder = Path(name_or_path).expanduser()
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
