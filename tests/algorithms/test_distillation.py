"""Divergences from a teacher: values by hand, float64 oracles, what their gradients descend, bounds, masks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from verl.algorithms.distillation import (
    DISTILLATION_LOSSES,
    check_distillation_loss,
    distillation_loss_info,
    distillation_rewards,
    evaluate_distillation_loss,
)
from verl.algorithms.kl import KL_KINDS
from verl.base.registry import scoped_registrations
from verl.config import ActorConfig, DistillationConfig, DistillationLossConfig
from verl.errors import ConfigError, SchemaError
from verl.trainer.distillation.losses import (
    DistillationLossSettings,
    compute_distillation_loss_range,
    compute_distillation_loss_reverse_kl_estimator,
    compute_forward_kl_topk,
    get_distillation_loss_fn,
    get_distillation_loss_settings,
    no_padding_2_padding,
    register_distillation_loss,
)

TOPK = ("forward_kl_topk", "reverse_kl_topk", "jsd_topk")
ACTOR = ActorConfig(ppo_mini_batch_size=1, ppo_micro_batch_size_per_gpu=1)


def evaluate(name: str, outputs: dict[str, Tensor], columns: dict[str, Tensor], **settings: object):
    """Losses per token and metrics of some rows."""
    section = DistillationConfig(distillation_loss=replace(DistillationLossConfig(), **settings))  # type: ignore[arg-type]
    info = distillation_loss_info(name)
    return evaluate_distillation_loss(info, outputs, columns, section.distillation_loss, (ACTOR, section))


def of_tokens(name: str, student: Tensor, teacher: Tensor, **settings: object) -> Tensor:
    """The losses of one response: log-probs (tokens,) of the sampled tokens, or (tokens, k) of the most likely."""
    mask = torch.ones(1, len(student))
    if student.dim() == 1:
        outputs, columns = {"log_probs": student[None]}, {"teacher_logprobs": teacher[None]}
    else:
        ids = torch.zeros(teacher[None].shape, dtype=torch.int32)
        outputs = {"topk_log_probs": student[None]}
        columns = {"teacher_topk_ids": ids, "teacher_topk_logprobs": teacher[None]}
    return evaluate(name, outputs, columns | {"response_mask": mask}, **settings)[0][0]


@pytest.mark.proof("by hand", *KL_KINDS)
def test_sampled_tokens_by_hand():
    # p = 1/2, q = 1/4: Δ = ln 2;   k2 = (ln 2)²/2 = 0.2402265;   k3 = 1/2 + ln 2 - 1 = 0.1931472
    by_hand = {"k1": 0.6931472, "kl": 0.6931472, "abs": 0.6931472, "k2": 0.2402265, "mse": 0.2402265}
    by_hand |= {"k3": 0.1931472, "low_var_kl": 0.1931472}
    student, teacher = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    for name, value in by_hand.items():
        for kind in (name, f"{name}+"):
            assert_close(of_tokens(kind, student, teacher), torch.tensor([value]))


def test_spans_of_text_by_hand():
    """A span's divergence is of the sums of log-probs, on its last token; a token without a span has none."""
    student = torch.tensor([[-1.0, -2.0, -3.0, -4.0, 9.0]] * 3, requires_grad=True)
    columns = {
        "teacher_logprobs": torch.tensor([[0.0, -4.0, -1.0, 0.0, 9.0]] * 3),
        "span_ends": torch.tensor([[1, 1, 2, -1, -1], [1, 1, 2, -1, -1], [0, -1, 3, 3, -1]]),
        # The first token of the second row was rejected.
        "response_mask": torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 0, 0], [1, 1, 1, 1, 0]]),
    }
    # Δ of the span of two tokens: -1 - 2 + 4 = 1; of the third token: -3 + 1 = -2. In the last row -1 and -3 - 4 = -7
    k1 = torch.tensor([[0.0, 1.0, -2.0, 0.0, 0.0], [0.0, 0.0, -2.0, 0.0, 0.0], [-1.0, 0.0, 0.0, -7.0, 0.0]])
    losses, metrics = evaluate("k1", {"log_probs": student}, columns)
    assert_close(losses, k1)
    assert (metrics["distillation/loss_max"], metrics["distillation/loss_min"]) == (1.0, -7.0)
    assert_close(evaluate("k2", {"log_probs": student}, columns)[0], k1**2 / 2)
    # As advantages each token of a span has that of the whole.
    config = DistillationLossConfig(loss_mode="k1", use_policy_gradient=True)
    rewards = distillation_rewards(distillation_loss_info("k1"), student, columns, config)
    assert_close(rewards, torch.tensor([[-1.0, -1, 2, 0, 0], [0, 0, 2, 0, 0], [1, 0, 7, 7, 0]]))
    # ∇ Δ²/2 = Δ for each token of the span
    (gradient,) = torch.autograd.grad(evaluate("k2", {"log_probs": student}, columns)[0].sum(), student)
    assert_close(gradient, torch.tensor([[1.0, 1, -2, 0, 0], [0, 0, -2, 0, 0], [-1, 0, -7, -7, 0]]))
    # A loss of a user's that is not 0 for equal models counts once for each span.
    with scoped_registrations():
        settings = DistillationLossSettings("one", use_estimator=True)
        register_distillation_loss(settings)(lambda log_probs, teacher_logprobs, config: torch.ones_like(log_probs))
        assert evaluate("one", {"log_probs": student}, columns)[0].tolist() == [
            [0, 1, 1, 0, 0],
            [0, 0, 1, 0, 0],
            [1, 0, 0, 1, 0],
        ]


def test_spans_of_one_token_are_the_tokens():
    log_probs, teacher = -torch.rand(2, 3, 6, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0] * 6])
    plain = {"teacher_logprobs": teacher, "response_mask": mask}
    by_span = plain | {"span_ends": torch.arange(6).expand(3, 6).masked_fill(mask == 0, -1)}
    for name in KL_KINDS:
        for columns in (plain, by_span):
            config = DistillationLossConfig(loss_mode=name, use_policy_gradient=True, loss_max_clamp=0.2)
            rewards = distillation_rewards(distillation_loss_info(name), log_probs, columns, config)
            assert_close(rewards, distillation_rewards(distillation_loss_info(name), log_probs, plain, config))


@pytest.mark.proof("by hand", *TOPK)
def test_most_likely_tokens_by_hand():
    # Of 4 tokens the teacher's likeliest is read: q = 1/2 and 1/2 of all others; p = 1/4 and 3/4 of all others.
    # forward: ½ ln 2 + ½ ln ⅔ = 0.1438410;   reverse: ¼ ln ½ + ¾ ln 3/2 = 0.1308120
    # jsd, β = ½: m = 3/8, 5/8: ½ (½ ln 4/3 + ½ ln 4/5) + ½ (¼ ln 2/3 + ¾ ln 6/5) = 0.0338216
    student, teacher = torch.tensor([[0.25]]).log(), torch.tensor([[0.5]]).log()
    for name, value in zip(TOPK, (0.1438410, 0.1308120, 0.0338216), strict=True):
        assert_close(of_tokens(name, student, teacher), torch.tensor([value]))


def oracle(kind: str, p: Tensor, q: Tensor, beta: float) -> Tensor:
    """The divergence of two distributions by a loop over classes."""
    total = torch.zeros((), dtype=torch.float64)
    for one_p, one_q in zip(p, q, strict=True):
        m = beta * one_q + (1 - beta) * one_p
        if kind == "forward_kl":
            total = total + one_q * (one_q / one_p).log()
        elif kind == "reverse_kl":
            total = total + one_p * (one_p / one_q).log()
        else:
            total = total + beta * one_q * (one_q / m).log() + (1 - beta) * one_p * (one_p / m).log()
    return total


@pytest.mark.proof("oracle", param="name")
@pytest.mark.proof("gradient", param="name")
@pytest.mark.parametrize("name", TOPK)
def test_most_likely_tokens_equal_the_oracle(name: str):
    """Values and gradients in the policy's logits, for k of 11 tokens and for all of them."""
    generator = torch.Generator().manual_seed(0)
    logits, of_teacher = torch.randn(2, 6, 11, generator=generator, dtype=torch.float64)
    for k in (1, 4, 11):
        exact = logits.clone().requires_grad_()
        p, q = exact.softmax(-1), of_teacher.softmax(-1)
        top = q.topk(k).indices
        expected = []
        for row in range(6):
            chosen = [int(token) for token in top[row]]
            rest = [token for token in range(11) if token not in chosen]
            classes = [
                torch.cat([x[row][chosen], *([x[row][rest].sum()[None]] if rest else [])]) for x in (p, q)
            ]  # fmt: skip
            expected.append(oracle(name.removesuffix("_topk"), *classes, beta=0.3))
        (grad,) = torch.autograd.grad(torch.stack(expected).sum(), exact)

        ours = logits.float().requires_grad_()
        student = ours.log_softmax(-1).gather(-1, top)
        teacher = of_teacher.float().log_softmax(-1).gather(-1, top)
        losses = of_tokens(name, student, teacher, beta=0.3)
        assert_close(losses.double(), torch.stack(expected).detach(), rtol=1e-5, atol=2e-6)
        (our_grad,) = torch.autograd.grad(losses.sum(), ours)
        assert_close(our_grad.double(), grad, rtol=1e-4, atol=2e-6)


def test_a_certain_teacher_has_no_tail_and_no_nan():
    """All its mass on the token that is read; the policy's mass on it is 0.1, so KL(q ‖ p) = ln 10."""
    student = torch.tensor([[math.log(0.1)]], requires_grad=True)
    teacher = torch.zeros(1, 1)
    losses = of_tokens("forward_kl_topk", student, teacher)
    losses.sum().backward()
    assert_close(losses, torch.tensor([math.log(10)]), atol=1e-5, rtol=0)
    assert_close(student.grad, torch.tensor([[-1.0]]), atol=1e-5, rtol=0)


@pytest.mark.proof("oracle", *KL_KINDS)
@pytest.mark.proof("gradient", *KL_KINDS)
def test_what_the_expected_gradient_of_each_estimator_descends():
    """Over all tokens of a small vocabulary, weighted by p: exact expectations, in float64."""
    generator = torch.Generator().manual_seed(1)
    start, of_teacher = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    q = of_teacher.softmax(-1)

    def gradient(function) -> Tensor:
        logits = start.clone().requires_grad_()
        return torch.autograd.grad(function(logits.log_softmax(-1)), logits)[0]

    reverse = gradient(lambda log_p: (log_p.exp() * (log_p - q.log())).sum())
    forward = gradient(lambda log_p: (q * (q.log() - log_p)).sum())
    variation = gradient(lambda log_p: (log_p.exp() - q).abs().sum())
    zero = torch.zeros_like(start)
    descends = {"kl": zero, "k1": zero, "abs": variation, "mse": reverse, "k2": reverse}
    descends |= {"low_var_kl": forward, "k3": forward}
    for kind in KL_KINDS:
        p = start.softmax(-1)
        ours = gradient(lambda log_p, kind=kind, p=p: (p * of_tokens(kind, log_p, q.log())).sum())
        assert_close(ours, reverse if kind.endswith("+") else descends[kind], atol=1e-12, rtol=0)


def test_rewards_of_k1_have_the_policy_gradient_of_the_reverse_kl():
    generator = torch.Generator().manual_seed(2)
    start, of_teacher = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    log_p, log_q = start.log_softmax(-1), of_teacher.log_softmax(-1)
    columns = {"teacher_logprobs": log_q[None], "response_mask": torch.ones(1, 7)}
    rewards = distillation_rewards(distillation_loss_info("k1"), log_p[None], columns, DistillationLossConfig())[0]
    logits = start.clone().requires_grad_()
    ascent = torch.autograd.grad((log_p.exp() * rewards * logits.log_softmax(-1)).sum(), logits)[0]
    kl = (logits.softmax(-1) * (logits.log_softmax(-1) - log_q)).sum()
    assert_close(ascent, -torch.autograd.grad(kl, logits)[0], atol=1e-12, rtol=0)


def test_bounds():
    """log p from -10 on; |loss| up to 5: k1 of log p = -30, log q = -1 is -29, and -9 with the first bound alone."""
    student, teacher = torch.tensor([-30.0, -1.0, -1.0]), torch.tensor([-1.0, -30.0, -2.0])
    assert of_tokens("k1", student, teacher).tolist() == [-29.0, 29.0, 1.0]
    assert of_tokens("k1", student, teacher, log_prob_min_clamp=-10.0).tolist() == [-9.0, 9.0, 1.0]
    assert of_tokens("k1", student, teacher, loss_max_clamp=5.0).tolist() == [-5.0, 5.0, 1.0]
    # Of distributions the logarithms are bounded, not their weights: q = 1/2, p = e^-30 of the token that is read:
    # ½ (ln ½ + 10) + ½ (ln ½ - ln(1 - e^-30)) = 5 - ln 2
    losses = of_tokens("forward_kl_topk", student[:1, None], torch.tensor([[0.5]]).log(), log_prob_min_clamp=-10.0)
    assert_close(losses, torch.tensor([5 - math.log(2)]))


@pytest.mark.proof("masks", param="name")
@pytest.mark.parametrize("name", sorted(DISTILLATION_LOSSES))
def test_masked_tokens_change_nothing(name: str):
    reads = distillation_loss_info(name).reads
    generator = torch.Generator().manual_seed(3)
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    shape = (2, 3, 4) if reads == "topk" else (2, 3)
    student, teacher = (torch.rand(2, *shape, generator=generator) / 5 + 0.01).log()
    results = []
    for junk in (0.0, float("nan"), float("-inf")):
        is_valid = mask.bool().view(2, 3, *[1] * (len(shape) - 2))
        outputs = torch.where(is_valid, student, junk).requires_grad_()
        column = torch.where(is_valid, teacher, junk)
        if reads == "full":
            losses, metrics = evaluate(name, {"divergence": outputs}, {"response_mask": mask})
        elif reads == "topk":
            columns = {"teacher_topk_ids": torch.zeros(shape, dtype=torch.int32), "teacher_topk_logprobs": column}
            losses, metrics = evaluate(name, {"topk_log_probs": outputs}, columns | {"response_mask": mask})
        else:
            columns = {"teacher_logprobs": column, "response_mask": mask}
            losses, metrics = evaluate(name, {"log_probs": outputs}, columns)
        losses.sum().backward()
        assert losses[mask == 0].tolist() == [0] * 4
        assert outputs.grad is not None
        assert (outputs.grad[mask == 0] == 0).all()
        results.append((losses.detach(), outputs.grad, metrics))
    for result in results[1:]:
        assert_close(result, results[0])
    assert bool(losses[mask == 1].abs().gt(0).all())


def test_metrics():
    """Two valid tokens of three: the third must not count."""
    mask = torch.tensor([[1, 1, 0]])
    outputs = {
        "topk_log_probs": torch.tensor([[[0.5, 0.25], [0.25, 0.25], [0.1, 0.1]]]).log(),
        "agreement": torch.tensor([[1.0, 0.0, 1.0]]),
    }
    teacher = torch.tensor([[[0.5, 0.375], [0.5, 0.25], [0.1, 0.1]]]).log()
    columns = {"teacher_topk_ids": torch.zeros(1, 3, 2, dtype=torch.int32), "teacher_topk_logprobs": teacher}
    losses, metrics = evaluate("forward_kl_topk", outputs, columns | {"response_mask": mask})
    assert_close(metrics["distillation/agreement"], torch.tensor(0.5))
    assert_close(metrics["distillation/student_tail"], torch.tensor(0.375))  # (1/4 + 1/2) / 2
    assert_close(metrics["distillation/teacher_tail"], torch.tensor(0.1875))  # (1/8 + 1/4) / 2
    assert_close(metrics["distillation/loss_max"], losses.max())
    assert_close(metrics["distillation/loss_min"], losses[0, :2].min())
    extremes = {name: metric.aggregate() for name, metric in compute_distillation_loss_range(losses, mask).items()}
    assert extremes == {name: float(metrics[name]) for name in extremes}
    columns |= {"response_mask": mask}
    assert_close(compute_forward_kl_topk(ACTOR, DistillationConfig(), outputs, columns), (losses, metrics))


def test_the_estimator_of_the_configuration():
    columns = {"teacher_logprobs": torch.tensor([[-3.0]]), "response_mask": torch.ones(1, 1)}
    section = DistillationConfig(distillation_loss=replace(DistillationLossConfig(), loss_mode="k2"))
    outputs = {"log_probs": torch.tensor([[-1.0]])}
    assert compute_distillation_loss_reverse_kl_estimator(ACTOR, section, outputs, columns)[0].tolist() == [[2.0]]


def test_losses_of_users():
    mask = torch.tensor([[1, 0]])
    outputs, columns = {"log_probs": torch.tensor([[-1.0, 7.0]])}, {"teacher_logprobs": torch.tensor([[-3.0, 7.0]])}
    columns |= {"response_mask": mask, "responses": mask, "attention_mask": torch.tensor([[1, 1, 0]])}
    with scoped_registrations():

        @register_distillation_loss(DistillationLossSettings(names=["squared", "sq"], use_estimator=True))
        def squared(log_probs: Tensor, teacher_logprobs: Tensor, config: DistillationLossConfig) -> Tensor:
            return (log_probs - teacher_logprobs) ** 2

        @register_distillation_loss(DistillationLossSettings(names="public", use_estimator=True))
        def public(config, distillation_config, model_output, data):
            log_probs = no_padding_2_padding(model_output["log_probs"], data)
            gap = log_probs - data["teacher_logprobs"]
            return gap * distillation_config.distillation_loss.beta, {"distillation/gap": gap.mean()}

        assert distillation_loss_info("sq").reads == "sampled"
        for name in ("squared", "sq"):
            assert evaluate(name, outputs, columns)[0].tolist() == [[4.0, 0.0]]
        losses, metrics = evaluate("public", outputs, columns, beta=0.25, loss_max_clamp=0.4)
        assert losses.tolist() == [[pytest.approx(0.4), 0.0]]
        assert metrics["distillation/gap"] == 1.0
        with pytest.raises(ConfigError, match=r"'public' reads the sections of verl\.trainer\.main_ppo"):
            evaluate_distillation_loss(distillation_loss_info("public"), outputs, columns, DistillationLossConfig())
        assert get_distillation_loss_settings("sq").all_names == ["squared", "sq"]
        in_public_form = get_distillation_loss_fn("squared")
        assert in_public_form(ACTOR, DistillationConfig(), outputs, columns)[0].tolist() == [[4.0, 0.0]]

        @register_distillation_loss(DistillationLossSettings(names="scalar", use_estimator=True))
        def scalar(log_probs: Tensor, teacher_logprobs: Tensor, config: DistillationLossConfig) -> Tensor:
            return log_probs.mean()

        with pytest.raises(SchemaError, match=r"'scalar' returned Tensor \(\); it must return one loss per token"):
            evaluate("scalar", outputs, columns)
        with pytest.raises(ConfigError, match="'k1' is registered twice"):
            register_distillation_loss(DistillationLossSettings(names="k1", use_estimator=True))(squared)
    with pytest.raises(ConfigError, match="neither use_topk nor use_estimator"):
        register_distillation_loss(DistillationLossSettings(names="mine"))
    with pytest.raises(ConfigError, match="use_topk and use_estimator"):
        DistillationLossSettings(names="mine", use_topk=True, use_estimator=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_mode": "k4"}, "unknown distillation loss 'k4'. Known: abs"),
        ({"loss_mode": "jsd_topk", "topk": None}, "jsd_topk reads the teacher's topk"),
        ({"loss_mode": "forward_kl", "use_policy_gradient": True}, "gradient of expectation zero"),
        ({"loss_mode": "kl"}, "the policy learns nothing"),
    ],
)
def test_losses_from_which_nothing_is_learnt_are_refused(settings: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        check_distillation_loss(replace(DistillationLossConfig(), **settings))  # type: ignore[arg-type]
    good = replace(DistillationLossConfig(), loss_mode="k1", use_policy_gradient=True)
    assert check_distillation_loss(good).name == "k1"
