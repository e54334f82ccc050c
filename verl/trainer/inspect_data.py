"""``python -m verl.trainer.inspect_data``: the data of a run before it starts; see :mod:`verl.plugins.inspect.data`."""

from __future__ import annotations

from verl.base.plugins import load

main = load("inspect.data:main")

if __name__ == "__main__":
    main()
