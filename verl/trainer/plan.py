"""``python -m verl.trainer.plan``: memory and time of a run before it starts; see :mod:`verl.plugins.plan.command`."""

from __future__ import annotations

from verl.base.plugins import load

main = load("plan.command:main")

if __name__ == "__main__":
    main()
