"""A whole GRPO step with a reference model: ours against TRL's GRPOTrainer, in one run.

    python -m benchmarks.grpo_step [--rollout native] [--rounds 5] [--trl_micro 32] [--max_tokens 16384]

Both generate, score with the same trivial function, ask the reference, and make one optimizer step in fp32 with a KL
term, on the same prompts and as many tokens. Ours is the trainer itself with one worker in its process
(``trainer.controller=local``). TRL runs at what was fastest for it on two cores without vLLM: ``--trl_micro`` 32
sequences per pass (of 8, 16, 32 and 64), the ordinary key/value cache (a static one made its step a tenth slower), not
compiled (start and four steps took more than 90 seconds, against 40), no gradient checkpointing, no dropout, logging
once at the end; it skips the pass for the old log-probs by itself. ``--trl '{"cache_implementation": "static"}'`` and
the like try others.
"""

from __future__ import annotations

import json
import statistics
import string
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import shape
from benchmarks.shape import TINY, Row, Turns, Work

TARGET = 2.0
KL_COEFFICIENT = 0.04
LEARNING_RATE = 1e-6
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return solution_str.count("e") / 10
"""


def conversations(work: Work) -> list[list[dict[str, str]]]:
    """The prompts as chats; the template adds a token before and one after the text."""
    letters = string.ascii_letters
    texts = ("".join(letters[token % len(letters)] for token in ids[2:]) for ids in work.prompt_ids())
    return [[{"role": "user", "content": text}] for text in texts]


# ---- ours -----------------------------------------------------------------------------------------


def our_overrides(arguments: Any, folder: Path, work: Work) -> list[str]:
    """The command line of such a run."""
    micro = {"use_dynamic_bsz": "true", "ppo_max_token_len_per_gpu": arguments.max_tokens}
    settings: dict[str, object] = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "prompts.jsonl",
        "data.val_files": folder / "prompts.jsonl",
        "data.train_batch_size": work.prompts,
        "data.max_prompt_length": work.prompt_length,
        "data.max_response_length": work.response_length,
        "data.dataloader_num_workers": 0,
        "custom_reward_function.path": folder / "reward.py",
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.model.enable_gradient_checkpointing": "false",
        "actor_rollout_ref.actor.ppo_mini_batch_size": work.prompts,
        **{f"actor_rollout_ref.actor.{key}": value for key, value in micro.items()},
        "actor_rollout_ref.actor.use_kl_loss": "true",
        "actor_rollout_ref.actor.kl_loss_coef": KL_COEFFICIENT,
        "actor_rollout_ref.actor.optim.lr": LEARNING_RATE,
        "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
        "actor_rollout_ref.ref.fsdp_config.dtype": "float32",
        "actor_rollout_ref.rollout.name": arguments.rollout,
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.n": work.samples,
        "actor_rollout_ref.rollout.ignore_eos": "true",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "trainer.controller": "local",
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": 10**6,
        "trainer.val_before_train": "false",
        "trainer.logger": "[]",
        "trainer.default_local_dir": folder / "checkpoints",
        "trainer.progress": "off",
    }
    return [f"{key}={value}" for key, value in settings.items()] + arguments.overrides


def our_steps(arguments: Any, folder: Path, work: Work) -> Iterator[dict[str, float]]:
    """The metrics of one step after the other, each of the full work."""
    for metrics in steps_of(our_overrides(arguments, folder, work)):
        assert metrics["prompt_length/mean"] == work.prompt_length
        assert metrics["response_length/mean"] == work.response_length
        yield metrics


def steps_of(overrides: list[str]) -> Iterator[dict[str, float]]:
    """The metrics of one step after the other of a run; assembled as ``verl.trainer.main_ppo`` does."""
    from verl.datasets import collate_fn, create_rl_dataset, create_rl_sampler
    from verl.single_controller import local
    from verl.trainer.config.command_line import compose
    from verl.trainer.config.load import load_config
    from verl.trainer.main_ppo import TaskRunner
    from verl.trainer.ppo.reward import load_reward_manager
    from verl.trainer.ppo.trainer import PPOTrainer
    from verl.utils import hf_tokenizer

    config = load_config(compose(overrides))
    runner = TaskRunner()
    runner.add_actor_rollout_worker(config)
    runner.add_ref_policy_worker(config)
    tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
    dataset = create_rl_dataset(config.data.train_files, config.data, tokenizer, None, is_train=True)
    trainer = PPOTrainer(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping=runner.role_worker_mapping,
        resource_pool_manager=runner.init_resource_pool_mgr(config),
        ray_worker_group_cls=local.WorkerGroup,
        reward_fn=load_reward_manager(config, tokenizer, num_examine=0),
        train_dataset=dataset,
        collate_fn=collate_fn,
        train_sampler=create_rl_sampler(config.data, dataset),
        device_name="cpu",
    )
    trainer.init_workers()
    while True:
        trainer.global_steps += 1
        context = trainer.context_class(trainer.global_steps)
        with context.stage("step"):
            batch = trainer.step(context)
        yield context.metrics | trainer.step_metrics(batch, context)


def play_ours(arguments: Any, folder: Path, work: Work) -> None:
    """Be our contestant."""
    serve_steps(Turns(), our_steps(arguments, folder, work))


def serve_steps(turns: Turns, steps: Iterator[dict[str, float]]) -> None:
    """Make one step in each turn, and report its stages."""

    def run() -> dict[str, Any]:
        prefix = "timing_s/"
        return {"stages": {k.removeprefix(prefix): v for k, v in next(steps).items() if k.startswith(prefix)}}

    turns.serve(run, versions=shape.versions("torch", "transformers"))


# ---- TRL ------------------------------------------------------------------------------------------


def count_e(completions: Sequence[Sequence[Mapping[str, str]]], **_: Any) -> list[float]:
    """The reward function as TRL calls it."""
    return [completion[0]["content"].count("e") / 10 for completion in completions]


def play_trl(arguments: Any, folder: Path, work: Work) -> None:
    """Be TRL with the same work."""
    turns = Turns()
    from datasets import Dataset
    from transformers import AutoTokenizer

    def reply(metrics: Mapping[str, float]) -> dict[str, Any]:
        assert metrics["completions/min_length"] == work.response_length
        return {}

    passes = max(1, work.sequences // arguments.trl_micro)
    settings = {
        "per_device_train_batch_size": work.sequences // passes,
        "gradient_accumulation_steps": passes,
        "num_generations": work.samples,
        "max_completion_length": work.response_length,
        # End tokens are not drawn: all responses are of one length.
        "generation_kwargs": {"min_new_tokens": work.response_length},
        "beta": KL_COEFFICIENT,
        "learning_rate": LEARNING_RATE,
    }
    serve_trl(
        turns,
        folder,
        settings | arguments.trl,
        reply,
        reward_funcs=count_e,
        train_dataset=Dataset.from_dict({"prompt": conversations(work)}),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )


def serve_trl(
    turns: Turns,
    folder: Path,
    settings: Mapping[str, Any],
    reply: Callable[[Mapping[str, float]], dict[str, Any]],
    **arguments: Any,
) -> None:
    """Run TRL's own loop on ``folder / "model"`` in fp32, held up at the beginning of each step until it is its turn.

    Args:
        settings: of ``GRPOConfig``, beside :func:`trl_settings`.
        reply: checks a step by its metrics; what it returns is told beside the seconds.
        arguments: of ``GRPOTrainer``.
    """
    from trl import GRPOConfig, GRPOTrainer

    def last_metrics() -> dict[str, Any]:
        return reply({name: values[-1] for name, values in trainer._metrics["train"].items()})

    config = GRPOConfig(**trl_settings(folder), log_completions=False, **settings)
    callback = turn_taker(turns, last_metrics)
    trainer = GRPOTrainer(model=str(folder / "model"), args=config, callbacks=[callback], **arguments)
    trainer.train()


def trl_settings(folder: Path) -> dict[str, Any]:
    """Settings of any trainer of TRL that leave a CPU nothing to do but training in fp32."""
    import torch

    return {
        "output_dir": str(folder / "trl"),
        "use_cpu": True,
        "bf16": False,
        "model_init_kwargs": {"dtype": torch.float32},
        "gradient_checkpointing": False,
        "max_steps": 10**6,
        "logging_steps": 10**6,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def turn_taker(turns: Turns, reply: Callable[[], dict[str, Any]]) -> Any:
    """A callback of Transformers' Trainer that holds it up at the beginning of each step until it is its turn.

    ``reply`` is called after each step; what it returns is told beside the seconds.
    """
    from transformers import TrainerCallback

    warm_up = 1

    class TakeTurns(TrainerCallback):
        """A turn is a step."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == warm_up:
                turns.ready(versions=shape.versions("torch", "transformers", "trl"))
            if state.global_step >= warm_up and not turns.wait():
                raise SystemExit
            self.start, self.cpu_start = time.perf_counter(), time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seconds, cpu_s = time.perf_counter() - self.start, time.process_time() - self.cpu_start
            told = reply()
            if state.global_step > warm_up:
                turns.done(seconds, cpu_s=cpu_s, **told)

    return TakeTurns()


# ---- the comparison -------------------------------------------------------------------------------


def prepare(folder: Path, work: Work) -> None:
    """Model, prompts and reward function of both."""
    work.save_model(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    rows = [
        {"data_source": "letters", "prompt": chat, "reward_model": {"ground_truth": ""}, "extra_info": {"index": i}}
        for i, chat in enumerate(conversations(work))
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """The command line."""
    parser = shape.parser(__doc__)
    parser.add_argument("--rollout", default="native", help="rollout.name of our run")
    parser.add_argument("--max_tokens", type=int, default=16384, help="tokens per pass of our update")
    parser.add_argument("--trl_micro", type=int, default=32, help="sequences per pass of TRL's update")
    parser.add_argument("--trl", type=json.loads, default={}, help="further settings of TRL's GRPOConfig, as JSON")
    parser.add_argument("--only", choices=("ours", "TRL"), help="one of them alone, to look at it")
    parser.add_argument("--contestant", help=shape.argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=shape.argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="further settings of our run, key=value")
    arguments = parser.parse_args()
    work = TINY if arguments.tiny else Work()
    if arguments.contestant:
        {"ours": play_ours, "TRL": play_trl}[arguments.contestant](arguments, arguments.folder, work)
        return
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), work)
        own = [f"--rollout={arguments.rollout}", f"--max_tokens={arguments.max_tokens}", *arguments.overrides]
        theirs = [f"--trl_micro={arguments.trl_micro}", f"--trl={json.dumps(arguments.trl)}"]
        common = [
            sys.executable,
            "-m",
            "benchmarks.grpo_step",
            *(["--tiny"] if arguments.tiny else []),
            "--folder",
            name,
        ]
        env = {"OMP_NUM_THREADS": str(arguments.threads)}
        commands = {
            "ours": ([*common, "--contestant", "ours", *own], env),
            "TRL": ([*common, "--contestant", "TRL", *theirs], env),
        }
        chosen = {name: command for name, command in commands.items() if arguments.only in (None, name)}
        found = shape.compare(chosen, arguments.rounds)
    found.print_times()
    stages = stages_of(found.replies.get("ours", []))
    print(", ".join(f"{name} {value:.3f} s" for name, value in stages.items()))
    rows = rows_against_trl(f"whole GRPO step ({arguments.rollout})", found, TARGET)
    found.write(arguments.json, part="grpo_step", work=work.describe(), rows=rows, stages=stages)


def rows_against_trl(what: str, found: shape.Comparison, target: float) -> list[Row]:
    """The one row of a comparison with TRL; none if one of the two ran alone."""
    if len(found.replies) < 2:
        return []
    return [shape.speed_row(what, "TRL's GRPOTrainer", found.seconds, "ours", "TRL", target)]


def stages_of(replies: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Our stages, each with its median over the steps."""
    names = [name for reply in replies[:1] for name in reply["stages"]]
    return {name: statistics.median(reply["stages"][name] for reply in replies) for name in names}


if __name__ == "__main__":
    main()
