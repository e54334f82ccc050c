"""The JSON requests of the protocol; further fields of a newer client are ignored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Position = Annotated[int, Field(ge=0, lt=2**31)]
"""Position of a request, model or sampling session in the order in which its client made them."""


class _Request(BaseModel):
    model_config = ConfigDict(protected_namespaces=())


class LoraSettings(_Request):
    """The adapter of a new model."""

    rank: int
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerKind(_Request):
    """The family of an optimizer."""

    type: str = "adamw"


class CreateSession(_Request):
    """A client begins."""

    tags: list[str] = []
    user_metadata: dict[str, object] | None = None
    display_name: str | None = None


class OfSession(_Request):
    """A request that only names a session."""

    session_id: str


class CreateModel(_Request):
    """A new model: an adapter over the base model."""

    session_id: str
    model_seq_id: Position
    base_model: str
    lora_config: LoraSettings | None = None
    optimizer_config: OptimizerKind = OptimizerKind()
    user_metadata: dict[str, object] | None = None


class OfModel(_Request):
    """A request that only names a model."""

    model_id: str


class AdamParams(_Request):
    """Settings of one step of AdamW, within what fp32 can compute: an eps of 0 would divide 0 by 0."""

    learning_rate: float = Field(default=1e-4, ge=0, le=1e20)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=1e-30, le=1e20)
    weight_decay: float = Field(default=0.0, ge=0, le=1e10)
    grad_clip_norm: float = Field(default=0.0, ge=0)


class OptimStep(_Request):
    """One step with the gradients since the last."""

    model_id: str
    seq_id: Position
    adam_params: AdamParams | None = None


class SaveWeights(_Request):
    """Save weights, with the optimizer's state or for sampling alone."""

    model_id: str
    seq_id: Position
    path: str | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    sampling_session_seq_id: Position | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class LoadWeights(_Request):
    """Load saved weights into a model, or into a new one of a session."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: Position | None = None
    session_id: str | None = None
    model_seq_id: Position | None = None
    base_model: str | None = None
    user_metadata: dict[str, object] | None = None
    optimizer_config: OptimizerKind | None = None


class RetrieveFuture(_Request):
    """Ask for the result of an earlier request."""

    request_id: str


class CreateSamplingSession(_Request):
    """Sample with saved weights, or with the base model."""

    session_id: str
    sampling_session_seq_id: Position
    base_model: str | None = None
    model_path: str | None = None


class JoinSamplingSession(_Request):
    """Another process takes part in a sampling session."""

    sampling_session_id: str


class TokenChunk(_Request):
    """A part of a prompt."""

    type: str = "encoded_text"
    tokens: list[int] = []


class PromptTokens(_Request):
    """A prompt as tokens."""

    chunks: list[TokenChunk]


class SamplingSettings(_Request):
    """Sampling parameters of a request."""

    max_tokens: int | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[int] | list[str] | None = None
    temperature: float = Field(default=1.0, allow_inf_nan=False)
    top_k: int = Field(default=-1, lt=2**31)
    top_p: float = 1.0


class SampleRequest(_Request):
    """Responses to a prompt."""

    prompt: PromptTokens
    sampling_params: SamplingSettings
    num_samples: int = Field(default=1, ge=1, le=10_000)
    sampling_session_id: str | None = None
    seq_id: Position | None = None
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: dict[str, object] | None = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None


class OfPath(_Request):
    """A request that only names saved weights."""

    tinker_path: str


class Anything(_Request):
    """A request of which nothing is read."""
