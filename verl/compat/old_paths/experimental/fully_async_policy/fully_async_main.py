"""Public path of :mod:`verl.trainer.main_async`: training beside sampling on other ranks."""

from verl.trainer.main_async import fully_async as main
from verl.trainer.main_ppo import TaskRunner as FullyAsyncTaskRunner

if __name__ == "__main__":
    main()
