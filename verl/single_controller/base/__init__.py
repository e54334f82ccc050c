"""What every controller shares: workers, groups of them, pools to put them in. Imports no Ray."""

from verl.single_controller.base.worker import Worker

__all__ = ["Worker"]
