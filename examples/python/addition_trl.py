import sys

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]


def right(completions, answer, **columns):
    return [float(true in text) for text, true in zip(completions, answer, strict=True)]


sizes = {"per_device_train_batch_size": 128, "num_generations": 8, "max_completion_length": 8, "max_steps": 10}
on_cpu = {"use_cpu": True, "bf16": False}
args = GRPOConfig(output_dir="outputs/trl", learning_rate=1e-3, report_to="none", logging_steps=1, **sizes, **on_cpu)
trainer = GRPOTrainer(sys.argv[1], reward_funcs=right, args=args, train_dataset=Dataset.from_list(rows))
trainer.train()
trainer.save_model("outputs/trl/model")
print("outputs/trl/model", [row["reward"] for row in trainer.state.log_history if "reward" in row][-1])
