"""``python -m verl.trainer.inspect_rollouts``: samples of a run; see :mod:`verl.plugins.inspect.rollouts`."""

from __future__ import annotations

from verl.base.plugins import load

main = load("inspect.rollouts:main")

if __name__ == "__main__":
    main()
