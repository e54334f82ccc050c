"""Configuration of distillation: teachers, and the loss by which the policy learns from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from verl.config.actor import follows_clip_ratio
from verl.config.base import BaseConfig, config_fields, section, setting, subsection
from verl.config.data import Truncation
from verl.config.machine import DTYPE
from verl.config.model import DType
from verl.config.problems import Problem
from verl.config.rollout import NO_OTHER_ENGINE, SERVER_ENGINES, RolloutConfig

TeacherEngineName = Literal["native", "hf", "vllm", "sglang", "openai", "trtllm"]
FORWARD_PASSES = ("native", "hf")
"""Teachers that are a forward pass of the training engine, without a rollout engine."""
VLLM_MAX_LOGPROBS = 20
"""Most likely tokens that vLLM returns by default."""
UNNAMED = "teacher_model"
"""Name of the teacher that the YAML files declare, for runs with a single one."""


@section
class TeacherInferenceConfig(BaseConfig):
    """Batch sizes and engine with which a teacher computes log-probs."""

    hydra_target: ClassVar[str] = "verl.workers.config.RolloutConfig"

    name: TeacherEngineName = setting(
        "native",
        refuse_values={"trtllm": NO_OTHER_ENGINE},
        interpolation="${oc.select:actor_rollout_ref.rollout.name,native}",
    )
    """`native` and `hf`: a forward pass of the training engine, with the back end, precision and sizes of
    `actor_rollout_ref.ref`; `vllm` and `sglang`: an engine; `openai`: an endpoint at `base_url` that gives log-probs of
    prompts."""
    base_url: str | None = setting(None)
    """Address of the endpoint, such as `http://host:8000/v1`, with `name=openai`."""
    api_key_env: str | None = setting(None)
    """Environment variable with the key of the endpoint; null for one that asks for none."""
    temperature: float = setting(1.0, ge=0, interpolation="${oc.select:actor_rollout_ref.rollout.temperature,1.0}")
    """Divisor of the teacher's logits; by default that of the rollout, and 1 where it is greedy."""
    prompt_length: int = setting(512, ge=1, interpolation="${oc.select:actor_rollout_ref.rollout.prompt_length,512}")
    """Maximum length of a prompt, in tokens."""
    response_length: int = setting(
        512, ge=1, interpolation="${oc.select:actor_rollout_ref.rollout.response_length,512}"
    )
    """Maximum length of a response, in tokens."""
    dtype: DType = setting("bfloat16", interpolation=DTYPE)
    """Precision of the weights inside an engine; by default bfloat16 on GPUs and float32 on a CPU."""
    gpu_memory_utilization: float = setting(0.5, gt=0, le=1)
    """Fraction of a GPU's memory that an engine may use."""
    enforce_eager: bool = setting(True)
    """Do not capture CUDA graphs (`vllm`, `sglang`)."""
    cudagraph_capture_sizes: tuple[int, ...] | None = setting(None)
    """Batch sizes for which CUDA graphs are captured (`vllm`, `sglang`); null lets the engine choose."""
    free_cache_engine: bool = setting(True)
    """Free the teacher's device memory while others compute: an engine sleeps, weights of a forward pass move to main
    memory. On ranks of its own a single teacher always stays loaded."""
    data_parallel_size: int = setting(1, ge=1)
    """Copies of all but the experts, as in `actor_rollout_ref.rollout`."""
    expert_parallel_size: int = setting(1, ge=1)
    """Ranks that split the experts of one layer (`vllm`, `sglang`); other engines allow only 1."""
    tensor_model_parallel_size: int = setting(2, ge=1)
    """Ranks that split each layer (`vllm`, `sglang`). If unset: 1 if 2 does not divide the ranks."""
    max_num_batched_tokens: int = setting(8192, ge=1)
    """Maximum number of tokens that the engine computes in one pass (`vllm`, `sglang`)."""
    max_model_len: int | None = setting(None, ge=1)
    """Maximum length of prompt and response together plus one, in the teacher's tokens; null uses the sum of both
    limits, or twice that sum of a teacher with another tokenizer."""
    max_num_seqs: int = setting(1024, ge=1)
    """Sequences that the engine, or an endpoint, computes at once."""
    engine_kwargs: dict[str, Any] = setting(factory=dict)
    """Further arguments of the engine, as in `actor_rollout_ref.rollout`."""
    enable_chunked_prefill: bool = setting(True)
    """Process long sequences in several passes (`vllm`, `sglang`)."""
    enable_prefix_caching: bool = setting(True)
    """Compute common prefixes of sequences only once (`vllm`, `sglang`)."""
    disable_log_stats: bool = setting(True)
    """Leave statistics out of the engine's log (`vllm`, `sglang`)."""

    @property
    def is_forward_pass(self) -> bool:
        """True if the teacher is a forward pass of the training engine."""
        return self.name in FORWARD_PASSES

    @property
    def is_engine(self) -> bool:
        """True if the teacher is a rollout engine."""
        return self.name in SERVER_ENGINES

    def rollout(self, topk: int = 0, stays_awake: bool = False) -> RolloutConfig:
        """Return the settings of the teacher's engine as those of a rollout engine.

        Args:
            topk: how many most likely tokens are asked for.
            stays_awake: keep the engine's memory between calls.
        """
        shared = config_fields(type(self)).keys() & config_fields(RolloutConfig).keys()
        settings = {name: self[name] for name in shared}
        settings["temperature"] = self.temperature or 1.0
        settings["free_cache_engine"] = self.free_cache_engine and not stays_awake
        settings["max_model_len"] = self.max_model_len or self.prompt_length + self.response_length + 1
        if self.name == "vllm":
            most = {"max_logprobs": max(topk, VLLM_MAX_LOGPROBS)}
            settings["engine_kwargs"] = self.engine_kwargs | {"vllm": most | dict(self.engine_kwargs.get("vllm") or {})}
        return RolloutConfig(**settings)

    def problems_of_engine(self, path: str) -> Iterator[Problem]:
        """The engine is installed and has room for a token more than prompt and response; the endpoint has an address.

        The section ``path`` is that of a teacher which is used.
        """
        needed = self.prompt_length + self.response_length + 1
        if self.is_engine:
            yield from self.rollout().problems(path)
            if self.max_model_len is not None and self.max_model_len < needed:
                cause = f"the longest prompt and response have {needed - 1} tokens, and an engine draws one more"
                yield Problem(f"{path}.max_model_len", self.max_model_len, cause, f">= {needed}, or null")
        if self.name == "openai" and not (self.base_url or "").startswith(("http://", "https://")):
            cause = "name=openai asks an endpoint, and this is no address of one"
            yield Problem(f"{path}.base_url", self.base_url, cause, "http://HOST:PORT/v1 or https://HOST/v1")
        if self.name == "openai" and self.temperature not in (0, 1):
            cause = "an endpoint gives the log-probs of the logits as they are"
            remedy = f"set {path}.temperature=1 (the policy's is not changed), or take another kind of teacher"
            yield Problem(f"{path}.temperature", self.temperature, cause, "1", remedy)


@section
class DistillationTeacherModelConfig(BaseConfig):
    """One teacher."""

    hydra_target: ClassVar[str] = "verl.workers.config.DistillationTeacherModelConfig"

    key: str | None = setting(None)
    """The rows that this teacher scores: those whose column `distillation.teacher_key` has this value; null only for a
    single teacher, which scores all rows."""
    model_path: str | None = setting(None, path=True, remote=True)
    """Model folder or Hugging Face name; its vocabulary is the policy's, unless `distillation.alignment` is `text`."""
    inference: TeacherInferenceConfig = subsection(TeacherInferenceConfig)
    """Batch sizes and engine with which the teacher computes log-probs."""


@section
class DivergenceConfig(BaseConfig):
    """The divergence between model and teacher, and its weight in the loss."""

    loss_mode: str = setting("k3")
    """Registered divergence: of sampled tokens k1, k2, k3, abs; of the teacher's `topk` tokens forward_kl_topk,
    reverse_kl_topk, jsd_topk; of the whole vocabulary forward_kl, reverse_kl, jsd; or your own
    (`register_distillation_loss`)."""
    topk: int | None = setting(32, ge=1)
    """Most likely tokens of the teacher that a divergence of them reads; all others count as one more token."""
    beta: float = setting(0.5, gt=0, lt=1)
    """Weight of the teacher in the mixture of the Jensen-Shannon divergence (jsd, jsd_topk)."""
    distillation_loss_coef: float = setting(1.0, ge=0)
    """Weight of the distillation loss beside the other loss."""
    loss_max_clamp: float | None = setting(None, gt=0)
    """Bound on the absolute divergence of one token; null is no bound."""
    log_prob_min_clamp: float | None = setting(None, lt=0)
    """Least log-prob of model and teacher that a divergence reads; null is no bound."""


@section
class DistillationLossConfig(DivergenceConfig):
    """The divergence between policy and teacher, and how the policy learns from it."""

    hydra_target: ClassVar[str] = "verl.workers.config.DistillationLossConfig"

    use_task_rewards: bool = setting(True)
    """Learn from the rewards too; false learns from the teacher alone."""
    use_policy_gradient: bool = setting(False)
    """Take the negative divergence of each token as its advantage in a policy loss, instead of as a loss whose gradient
    is followed."""
    policy_loss_mode: str = setting("vanilla")
    """Policy loss of these advantages, with `use_policy_gradient`."""
    clip_ratio: float = setting(0.2, ge=0)
    """Clip range of that policy loss."""
    clip_ratio_low: float = setting(factory=follows_clip_ratio, ge=0)
    """Clip range for falling probabilities; by default `clip_ratio`."""
    clip_ratio_high: float = setting(factory=follows_clip_ratio, ge=0)
    """Clip range for rising probabilities; by default `clip_ratio`."""


SELF_TEMPLATES = ("reference", "demonstration", "attempts")
"""Built-in templates of the prompt under which a policy teaches itself; see :mod:`verl.trainer.ppo.privileged`."""


@section
class SelfDistillationConfig(BaseConfig):
    """Self-distillation: the teacher is the policy itself, with context in its prompt that the policy does not see."""

    enabled: bool = setting(False)
    """Learn from the policy itself instead of from `teacher_models`; needs `distillation.enabled`."""
    weights: Literal["policy", "initial", "ema"] = setting("policy")
    """Weights of the teacher: the policy's at the beginning of the step, those before training, or their exponential
    moving average."""
    ema_decay: float = setting(0.99, ge=0, le=1)
    """Share of the average that a step keeps, with `weights=ema`: 0 is `policy`, 1 is `initial`."""
    template: str | None = setting(None)
    """Last user message for the teacher: Jinja text, or the name of a built-in template (reference,
    demonstration, attempts). A row for which it renders nothing is not learnt from."""
    template_path: str | None = setting(None, path=True)
    """File of the Jinja text, instead of `template`."""
    success_score: float = setting(1.0)
    """Least score of another response to the prompt that a template may show as `best_response`."""
    teacher_prompt_length: int = setting(1024, ge=1)
    """Maximum length of the teacher's prompt, in tokens."""
    teacher_prompt_truncation: Truncation = setting("error")
    """Treatment of a longer one: an error, or truncation on the left, on the right or in the middle."""

    def problems(self, path: str) -> Iterator[Problem]:
        """There is one template."""
        if not self.enabled:
            return
        if (self.template is None) == (self.template_path is None):
            cause = "the prompt of the teacher needs one template"
            allowed = f"Jinja text, or one of {', '.join(SELF_TEMPLATES)}"
            remedy = f"set {path}.template or {path}.template_path, not both"
            yield Problem(f"{path}.template", self.template, cause, allowed, remedy)
        elif self.template is not None and "{" not in self.template and self.template not in SELF_TEMPLATES:
            cause = "it is no built-in template and has no Jinja expression, so that all rows would have one prompt"
            yield Problem(
                f"{path}.template", self.template, cause, f"one of {', '.join(SELF_TEMPLATES)}, or Jinja text"
            )


def _one_teacher() -> dict[str, DistillationTeacherModelConfig]:
    return {UNNAMED: DistillationTeacherModelConfig()}


@section
class DistillationConfig(BaseConfig):
    """Learning from teachers, on the responses of the policy."""

    hydra_target: ClassVar[str] = "verl.workers.config.DistillationConfig"

    enabled: bool = setting(False)
    """Compute the log-probs of teachers, and learn from them."""
    n_gpus_per_node: int = setting(8, ge=0)
    """Ranks on each node of the teachers' own pool."""
    nnodes: int = setting(0, ge=0)
    """Nodes of the teachers' own pool; 0 runs them on the ranks of the trainer."""
    teacher_models: dict[str, DistillationTeacherModelConfig] = setting(factory=_one_teacher)
    """Teachers, by names of your own."""
    teacher_key: str = setting("data_source")
    """Column of the data that says which of several teachers scores a row."""
    distillation_loss: DistillationLossConfig = subsection(DistillationLossConfig)
    """The divergence between policy and teacher, and how the policy learns from it."""
    self_distillation: SelfDistillationConfig = subsection(SelfDistillationConfig)
    """Self-distillation."""
    alignment: Literal["token", "text"] = setting("token")
    """`token`: teachers have the policy's tokenizer. `text`: one with another tokenizer reads the text of prompt and
    response in its own, and is compared with the policy on the spans of text whose ends are ends of tokens of both."""

    @property
    def aligns_text(self) -> bool:
        """True if teachers may have other tokenizers than the policy."""
        return self.enabled and self.alignment == "text" and not self.is_self_distillation

    @property
    def teachers(self) -> Mapping[str, DistillationTeacherModelConfig]:
        """The teachers of the run by name, without the one that the YAML files declare if only others have a model.

        Of a policy that teaches itself it is that one, without a model.
        """
        if self.is_self_distillation:
            return _one_teacher() | {name: teacher for name, teacher in self.teacher_models.items() if name == UNNAMED}
        named = {name: teacher for name, teacher in self.teacher_models.items() if name != UNNAMED}
        unnamed = self.teacher_models.get(UNNAMED)
        if named and (unnamed is None or unnamed.model_path is None):
            return named
        return self.teacher_models

    @property
    def is_self_distillation(self) -> bool:
        """True if the policy is its own teacher, so that no other is loaded."""
        return self.enabled and self.self_distillation.enabled

    @property
    def replaces_rewards(self) -> bool:
        """True if the policy learns from teachers alone: rewards, and the advantages made of them, are metrics."""
        return self.enabled and not self.distillation_loss.use_task_rewards

    @property
    def has_forward_passes(self) -> bool:
        """True if the teachers are forward passes of the training engine, which all are or none."""
        return any(teacher.inference.is_forward_pass for teacher in self.teachers.values())

    @property
    def ranks(self) -> int:
        """Ranks of the teachers' own pool; 0 where they run on those of the trainer."""
        return self.nnodes * self.n_gpus_per_node

    def problems(self, path: str) -> Iterator[Problem]:
        """Each teacher has a model, and each of several a key of its own."""
        is_self_taught = self.self_distillation.enabled
        if not self.enabled:
            if is_self_taught:
                remedy = f"set {path}.enabled=true too"
                yield Problem(f"{path}.self_distillation.enabled", True, f"{path}.enabled is false", remedy=remedy)
            return
        if is_self_taught:
            yield from self._problems_of_itself(path)
            return
        if self.nnodes > 0 and self.n_gpus_per_node == 0:
            cause = f"{path}.nnodes={self.nnodes} gives the teachers ranks of their own, and a node has none"
            yield Problem(f"{path}.n_gpus_per_node", 0, cause, ">= 1", f"set it, or {path}.nnodes=0")
        teachers = self.teachers
        if not teachers:
            remedy = f"set {path}.teacher_models.{UNNAMED}.model_path"
            yield Problem(f"{path}.teacher_models", {}, "there is no teacher to learn from", remedy=remedy)
        names: dict[str, str] = {}
        for name, teacher in teachers.items():
            key = f"{path}.teacher_models.{name}"
            if teacher.model_path is None:
                cause = f"{path}.enabled=true, and this teacher has no model"
                yield Problem(f"{key}.model_path", None, cause, "a model folder or Hugging Face name")
            if len(teachers) > 1 and teacher.key is None:
                cause = f"with {len(teachers)} teachers, rows must say which of them scores them"
                remedy = f"name the value of {path}.teacher_key={self.teacher_key} whose rows this teacher scores"
                yield Problem(f"{key}.key", None, cause, remedy=remedy)
            elif teacher.key is not None and teacher.key in names:
                cause = f"the teacher {names[teacher.key]} scores these rows already"
                yield Problem(f"{key}.key", teacher.key, cause, "a key of its own for each teacher")
            names.setdefault(str(teacher.key), name)
            yield from teacher.inference.problems_of_engine(f"{key}.inference")
        engines = {name: teacher.inference for name, teacher in teachers.items() if teacher.inference.is_engine}
        if len(sizes := {name: engine.tensor_model_parallel_size for name, engine in engines.items()}) > 1:
            first = next(iter(sizes))
            for name in [name for name in sizes if sizes[name] != sizes[first]]:
                key = f"{path}.teacher_models.{name}.inference.tensor_model_parallel_size"
                cause = f"all teachers have engines on the same ranks, which are divided as for {first}"
                yield Problem(key, sizes[name], cause, str(sizes[first]))

    def _problems_of_itself(self, path: str) -> Iterator[Problem]:
        for name, teacher in self.teacher_models.items():
            if teacher.model_path is not None:
                cause = f"with {path}.self_distillation.enabled=true the policy is its own teacher"
                remedy = f"leave it out, or set {path}.self_distillation.enabled=false"
                yield Problem(f"{path}.teacher_models.{name}.model_path", teacher.model_path, cause, "null", remedy)
        if self.nnodes > 0:
            cause = "the policy is its own teacher, on the ranks where it is trained"
            yield Problem(f"{path}.nnodes", self.nnodes, cause, "0")
