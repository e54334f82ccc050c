from verl.trainer.sft_trainer import SFTTrainer as SFTTrainer
from verl.trainer.sft_trainer import main as main
from verl.trainer.sft_trainer import run_sft as run_sft
