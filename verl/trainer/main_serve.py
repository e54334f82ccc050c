"""``python -m verl.trainer.main_serve``: serve a model that clients train and sample from, by HTTP.

What it does is in :mod:`verl.plugins.serve.service`.
"""

from __future__ import annotations

from verl.config import ServeConfig
from verl.trainer.entry import entry

run_serve, main, __getattr__ = entry(globals(), ServeConfig, "verl.plugins.serve.service:Service")


if __name__ == "__main__":
    main()
