"""The fixtures of configurations, for the rules of this plug-in."""

from tests.trainer.config.conftest import no_cluster, run

__all__ = ["no_cluster", "run"]
