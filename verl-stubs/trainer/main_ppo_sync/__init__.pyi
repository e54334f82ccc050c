from verl.trainer.main_ppo import TaskRunner as TaskRunner
from verl.trainer.main_ppo import main as main
from verl.trainer.main_ppo import run_ppo as run_ppo
