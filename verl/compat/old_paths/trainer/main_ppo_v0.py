"""Public path of :mod:`verl.trainer.main_ppo`, whose one TaskRunner is the base of users' runners too."""

from verl.trainer.main_ppo import TaskRunner as BaseTaskRunner
from verl.trainer.main_ppo import TaskRunner as TaskRunner
from verl.trainer.main_ppo import main as main
from verl.trainer.main_ppo import run_ppo as run_ppo

if __name__ == "__main__":
    main()
