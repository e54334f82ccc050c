import sys

import verl

rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
settings = {"num_generations": 8, "max_completion_length": 8, "learning_rate": 1e-3, "max_steps": 10}
result = verl.train(sys.argv[1], rows, lambda solution_str, answer: float(answer in solution_str), **settings)
print(result.model, result.metrics[-1]["critic/score/mean"])
