"""Differences of the divergences from float64: values and gradients, fp32 hidden states and a large vocabulary.

Each divergence of distributions is computed as engines do, from hidden states in chunks, and from full logits in
float64. Those of sampled tokens are computed from the log-probs of random tokens. ::

    python -m benchmarks.distillation_losses [--tokens 64] [--vocabulary 151936] [--hidden 64] [--topk 32]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from verl.algorithms.distillation import DISTILLATION_LOSSES, distillation_loss_info
from verl.algorithms.kl import KL_KINDS
from verl.config import DistillationLossConfig
from verl.workers.engine.model.divergence import FullDivergence, OutputMatrix, vocabulary_divergence
from verl.workers.engine.model.head import LogitRule, token_log_probs

CONFIG = DistillationLossConfig(beta=0.3)


def oracle(name: str, log_p: Tensor, log_q: Tensor) -> Tensor:
    """The formulas at float64, over the last dimension."""
    p, q = log_p.exp(), log_q.exp()
    if name.startswith("forward_kl"):
        return (q * (log_q - log_p)).sum(-1)
    if name.startswith("reverse_kl"):
        return (p * (log_p - log_q)).sum(-1)
    m = CONFIG.beta * q + (1 - CONFIG.beta) * p
    return (CONFIG.beta * q * (log_q - m.log()) + (1 - CONFIG.beta) * p * (log_p - m.log())).sum(-1)


def classes(log_probs: Tensor, top: Tensor) -> Tensor:
    """Log-probs of the tokens ``top`` and of all others."""
    rest = log_probs.scatter(-1, top, float("-inf")).logsumexp(-1, keepdim=True)
    return torch.cat([log_probs.gather(-1, top), rest], dim=-1)


def estimate(kind: str, log_p: Tensor, log_q: Tensor) -> Tensor:
    """The estimators at float64, without the bounds of k3, which these tokens do not reach."""
    delta = log_p - log_q
    values = {"k1": delta, "abs": delta.abs(), "k2": delta**2 / 2, "k3": (-delta).exp() + delta - 1}
    return values[{"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(kind, kind)]


def difference(ours: Callable[[Tensor], Tensor], exact: Callable[[Tensor], Tensor], hidden: Tensor) -> list[float]:
    """Largest difference of a value, of a gradient, and the largest entry of the gradient."""
    found = []
    for function, dtype in ((ours, torch.float32), (exact, torch.float64)):
        variable = hidden.to(dtype).requires_grad_()
        losses = function(variable)
        found.append((losses.detach().double(), torch.autograd.grad(losses.sum(), variable)[0].double()))
    (value, grad), (exact_value, exact_grad) = found
    return [
        float((value - exact_value).abs().max()),
        float((grad - exact_grad).abs().max()),
        float(exact_grad.abs().max()),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 64), ("vocabulary", 151936), ("hidden", 64), ("topk", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    g = torch.Generator().manual_seed(0)
    hidden, of_teacher = torch.randn(2, args.tokens, args.hidden, generator=g)
    weight = torch.randn(args.vocabulary, args.hidden, generator=g).mul_(0.4)
    teacher_weight = weight + torch.randn(args.vocabulary, args.hidden, generator=g).mul_(0.1)
    of_teacher = hidden + 0.2 * of_teacher
    log_q = (of_teacher.double() @ teacher_weight.double().t()).log_softmax(-1)
    top = log_q.topk(args.topk).indices
    targets = torch.multinomial((hidden @ weight.t()).softmax(-1), 1, generator=g)[:, 0]

    def log_softmax(x: Tensor) -> Tensor:
        return (x @ weight.double().t()).log_softmax(-1)

    def chosen(log_probs: Tensor, ids: Tensor) -> Tensor:
        return log_probs.gather(-1, ids[:, None])[:, 0]

    print(f"{args.tokens} tokens, {args.vocabulary} words, hidden {args.hidden}, top {args.topk}: largest difference")
    print("| loss | value | gradient | largest gradient |\n|---|---|---|---|")
    for name in DISTILLATION_LOSSES:
        info = distillation_loss_info(name)
        if name in KL_KINDS and name.endswith("+"):
            continue

        def ours(x: Tensor, name: str = name, info=info) -> Tensor:
            if info.reads == "full":
                spec = FullDivergence(
                    kind=name,  # type: ignore[arg-type]
                    teachers=[OutputMatrix(weight=teacher_weight, bias=None, rule=LogitRule())],
                    beta=CONFIG.beta,
                )
                policy = OutputMatrix(weight=weight, bias=None, rule=LogitRule())
                return vocabulary_divergence(x, policy, of_teacher, None, spec).divergence
            found = token_log_probs(x, weight, None, targets, candidates=top)
            if info.reads == "topk":
                return info.function(found.topk_log_probs, log_q.gather(-1, top).float(), CONFIG)
            return info.function(found.log_probs, chosen(log_q, targets).float(), CONFIG)

        def exact(x: Tensor, name: str = name, info=info) -> Tensor:
            log_p = log_softmax(x)
            if info.reads == "full":
                return oracle(name, log_p, log_q)
            if info.reads == "topk":
                return oracle(name, classes(log_p, top), classes(log_q, top))
            return estimate(name, chosen(log_p, targets), chosen(log_q, targets))

        print(f"| `{name}` | " + " | ".join(f"{number:.1e}" for number in difference(ours, exact, hidden)) + " |")


if __name__ == "__main__":
    main()
