"""A GRPO step whose single turns are sampled by one call of the batch, or by a conversation each, in one run.

    python -m benchmarks.sampling_roads [--rollout native] [--rounds 5]

Both are the trainer of ``benchmarks.grpo_step`` with the same prompts, model and tokens. ``batch`` samples as runs do
whose rows name no other agent loop than ``single_turn_agent``: one ``generate_sequences``. ``requests`` gives the same
agent loop another name, so that each response is a conversation, whose request goes through the session of engines.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks import grpo_step, shape
from benchmarks.shape import TINY, Work

AGENT = """
- name: requests
  _target_: verl.agents.single_turn.SingleTurnAgentLoop
"""
"""Of ``agent_loop_config_path``."""


def overrides(road: str, folder: Path) -> list[str]:
    """Settings that make a run sample by ``road``; ``folder`` gets the file that they name."""
    if road == "batch":
        return []
    path = folder / "agents.yaml"
    path.write_text(AGENT)
    agent = "actor_rollout_ref.rollout.agent"
    return [f"{agent}.agent_loop_config_path={path}", f"{agent}.default_agent_loop=requests"]


def main() -> None:
    """The command line."""
    parser = shape.parser(__doc__)
    parser.add_argument("--rollout", default="native", help="rollout.name of both")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, work = Path(name), TINY if arguments.tiny else Work()
        grpo_step.prepare(folder, work)
        tiny = ["--tiny"] if arguments.tiny else []
        own = ["--folder", name, "--contestant", "ours", f"--rollout={arguments.rollout}"]
        step, env = [sys.executable, "-m", "benchmarks.grpo_step"], {"OMP_NUM_THREADS": str(arguments.threads)}
        commands = {road: ([*step, *tiny, *own, *overrides(road, folder)], env) for road in ("batch", "requests")}
        comparison = shape.compare(commands, arguments.rounds)
    comparison.print_times()
    rows = []
    for stage in ("gen", "step"):
        seconds = {
            road: shape.summary([reply["stages"][stage] for reply in replies])
            for road, replies in comparison.replies.items()
        }
        what = f"{stage} of a GRPO step ({arguments.rollout}), single turns as requests"
        rows.append(shape.speed_row(what, "one call of the batch", seconds, "requests", "batch", 0.97))
    comparison.write(arguments.json, part="sampling_roads", work=work.describe(), rows=rows)


if __name__ == "__main__":
    main()
