"""Public path of :mod:`verl.trainer.main_async`: sampling on other ranks, one step ahead of training."""

from verl.trainer.main_async import one_step_off as main
from verl.trainer.main_ppo import TaskRunner as OneStepTaskRunner

if __name__ == "__main__":
    main()
