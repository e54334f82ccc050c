"""Public path of :mod:`verl.trainer.main_ppo`: the trainer that moved batches by a queue computed the same."""

from verl.trainer.main_ppo import TaskRunner as TaskRunner
from verl.trainer.main_ppo import main as main
from verl.trainer.main_ppo import run_ppo as run_ppo

if __name__ == "__main__":
    main()
