"""The token losses of NSD and RTO beside float64 autograd of the printed formulas, the sheets' numbers, the edges."""

import math
from dataclasses import replace

import pytest
import torch

from strop.kernels.token_losses import (
    ANCHORS,
    PENALTIES,
    NsdOptions,
    nsd_gate,
    nsd_losses,
    rto_losses,
    rto_target_distribution,
    rto_target_probability,
)

GUARDS = [
    {},
    {"logp_floor": -2.0},
    {"prob_clamp": 0.8},
    {"loss_clamp": 0.9},
    {"logp_floor": -2.0, "prob_clamp": 0.7, "loss_clamp": 3.0},
]


def logs(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log()


def draw(count=400, seed=0):
    """Log-probabilities of student, reference and negative: uniform probabilities, some of them tiny."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(3, count, generator=generator, dtype=torch.float64) * 0.99 + 0.005
    return p.log() * torch.linspace(1, 3, count, dtype=torch.float64)


def plain(logprobs, ref, gate, options):
    """The printed formulas, term by term, with torch.clamp for the guards."""
    if options.logp_floor is not None:
        logprobs, ref = logprobs.clamp(min=options.logp_floor), ref.clamp(min=options.logp_floor)
    p, p_ref = logprobs.exp(), ref.exp()
    held = p if options.prob_clamp is None else p.clamp(max=options.prob_clamp)
    b = options.npo_beta
    penalty = {
        "bounded": lambda: torch.sigmoid(-torch.log(1 - held)),
        "unbounded": lambda: -torch.log(1 - held),
        "npo": lambda: -(2 / b) * torch.log(torch.sigmoid(-b * torch.log(p / p_ref))),
    }[options.penalty]()
    anchor = {
        "paper": lambda: p_ref * torch.log(p_ref / p),
        "importance": lambda: (p_ref / p) * torch.log(p_ref / p),
        "k1": lambda: logprobs - ref,
        "none": lambda: 0 * p,
    }[options.anchor]()
    loss = gate * penalty + options.alpha * anchor
    return loss if options.loss_clamp is None else loss.clamp(-options.loss_clamp, options.loss_clamp)


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("guards", GUARDS)
@pytest.mark.parametrize("form", ["probability", "log", None])
def test_values_and_gradients_are_those_of_the_printed_formulas(penalty, anchor, guards, form):
    logprobs, ref, neg = draw()
    options = NsdOptions(penalty, anchor, alpha=0.03, npo_beta=0.9, **guards)
    gate = None if form is None else nsd_gate(ref, neg, form=form)
    upstream = torch.linspace(-1, 2, len(ref), dtype=torch.float64)
    logprobs.requires_grad_()
    ours = nsd_losses(logprobs, ref, gate, None, options)
    theirs = plain(logprobs, ref, 1.0 if gate is None else gate, options)
    torch.testing.assert_close(ours.loss, theirs, rtol=1e-9, atol=1e-12)
    (mine,), (wanted,) = (torch.autograd.grad((loss * upstream).sum(), logprobs) for loss in (ours.loss, theirs))
    torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-12)
    assert wanted.any()
    torch.testing.assert_close(
        (ours.push + options.alpha * ours.anchor).clamp(-(options.loss_clamp or 1e9), options.loss_clamp or 1e9),
        ours.loss.detach(),
    )


@pytest.mark.parametrize(
    ("p", "p_ref", "p_neg", "gate", "push", "anchor", "loss"),
    [
        (0.3, 0.2, 0.5, 0.3, 0.176471, -0.081093, 0.175660),
        (0.9, 0.95, 0.94, 0.0, 0.0, 0.051364, 0.00051364),
        (0.99, 0.98, 0.99, 0.01, 0.00990099, None, 0.00980150),
    ],
)
def test_the_sheets_vectors(p, p_ref, p_neg, gate, push, anchor, loss):
    gate_T = nsd_gate(logs(p_ref), logs(p_neg))
    assert gate_T.item() == pytest.approx(gate, abs=1e-12)
    found = nsd_losses(logs(p), logs(p_ref), gate_T, None, NsdOptions())
    assert found.push.item() == pytest.approx(push, abs=5e-7)
    assert found.loss.item() == pytest.approx(loss, abs=5e-7)
    if anchor is not None:
        assert found.anchor.item() == pytest.approx(anchor, abs=5e-7)


def logit_gradient(p, gate, **options):
    """Derivative of the loss in the logit of the sampled token, which has one other beside it."""
    logit = torch.tensor(p, dtype=torch.float64).logit().requires_grad_()
    logprob = torch.nn.functional.logsigmoid(logit)
    loss = nsd_losses(logprob, logs(0.5)[0], torch.tensor(gate), None, NsdOptions(anchor="none", **options)).loss
    return torch.autograd.grad(loss, logit)[0].item()


def test_the_sheets_gradient_facts():
    grid = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    bounded = torch.tensor([logit_gradient(p, 0.4) for p in grid.tolist()], dtype=torch.float64)
    unbounded = torch.tensor([logit_gradient(p, 0.4, penalty="unbounded") for p in grid.tolist()], dtype=torch.float64)
    torch.testing.assert_close(unbounded, 0.4 * grid, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(bounded, 0.4 * grid * (1 - grid) / (2 - grid) ** 2, rtol=1e-6, atol=1e-9)
    assert abs(grid[bounded.argmax()].item() - 2 / 3) < 1e-3
    assert logit_gradient(2 / 3, 0.4) == pytest.approx(0.4 / 8, rel=1e-6)
    assert logit_gradient(1 - 1e-9, 0.4) < 1e-9
    # The push lies in [G/2, G].
    push = nsd_losses(logs(1e-12, 0.5, 1.0), logs(0.1, 0.1, 0.1), torch.full((3,), 0.4), None, NsdOptions()).push
    assert push.tolist() == pytest.approx([0.2, 0.4 / 1.5, 0.4], rel=1e-6)


def test_a_token_is_pushed_down_only_past_the_sheets_threshold():
    p, p_ref, alpha = 0.6, 0.5, 0.05
    threshold = alpha * p_ref * (2 - p) ** 2 / p
    for gate, sign in ((threshold * 0.99, -1), (threshold * 1.01, 1)):
        logprob = logs(p).requires_grad_()
        loss = nsd_losses(logprob, logs(p_ref), torch.tensor([gate]), None, NsdOptions(alpha=alpha)).loss
        (gradient,) = torch.autograd.grad(loss.sum(), logprob)
        assert math.copysign(1, gradient.item()) == sign


def test_npo_gradient_is_the_relatives_sheets():
    logprobs, ref, _ = draw()
    logprobs.requires_grad_()
    found = nsd_losses(logprobs, ref, None, None, NsdOptions(penalty="npo", anchor="none"))
    (gradient,) = torch.autograd.grad(found.loss.sum(), logprobs)
    p, p_ref = logprobs.detach().exp() ** 0.1, ref.exp() ** 0.1
    torch.testing.assert_close(gradient, 2 * p / (p + p_ref), rtol=1e-9, atol=0)


def anchor_over_the_vocabulary(logits, reference, anchor):
    """Mean over the student's tokens, samples held fixed: the value, and the gradient to the logits."""
    logits = logits.clone().requires_grad_()
    log_p = torch.log_softmax(logits, 0)
    found = nsd_losses(log_p, reference, torch.zeros_like(log_p), None, NsdOptions(anchor=anchor, alpha=1.0))
    mean = (log_p.detach().exp() * found.loss).sum()
    return mean.item(), torch.autograd.grad(mean, logits)[0]


def test_only_the_importance_anchor_estimates_the_divergence_and_rests_at_the_reference():
    generator = torch.Generator().manual_seed(3)
    logits, other = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    reference = torch.log_softmax(other, 0)
    divergence = (reference.exp() * (reference - torch.log_softmax(logits, 0))).sum().item()
    assert anchor_over_the_vocabulary(logits, reference, "importance")[0] == pytest.approx(divergence, rel=1e-12)
    assert anchor_over_the_vocabulary(logits, reference, "paper")[0] != pytest.approx(divergence, rel=0.1)
    at_rest = anchor_over_the_vocabulary(other, reference, "importance")[1]
    assert at_rest.abs().max() < 1e-15
    pull = anchor_over_the_vocabulary(other, reference, "paper")[1]
    p = reference.exp()
    torch.testing.assert_close(pull, -(p * (p - (p * p).sum())), rtol=1e-9, atol=1e-15)
    assert pull.argmin() == reference.argmax()  # the mode's logit is raised


EDGES = [0.0, 1e-9, -1e-9, -1e-8, -60.0, -79.0, -200.0, -1e5, -math.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("anchor", ANCHORS)
def test_the_edges_stay_finite(dtype, penalty, anchor):
    logprobs, ref, neg = (one.flatten() for one in torch.meshgrid(*[torch.tensor(EDGES)] * 3, indexing="ij"))
    logprobs = logprobs.to(dtype).requires_grad_()
    for gate in (None, nsd_gate(ref, neg), nsd_gate(ref, neg, form="log"), torch.zeros_like(ref)):
        found = nsd_losses(logprobs, ref, gate, None, NsdOptions(penalty, anchor))
        (gradient,) = torch.autograd.grad(found.loss.sum(), logprobs)
        assert all(one.isfinite().all() for one in (*found, gradient))
        assert gradient.dtype == dtype
        assert found.loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not found.push.any()


def test_a_certain_token_is_still_pushed():
    for penalty, slope in (("bounded", 0.5), ("unbounded", 0.5 / torch.finfo(torch.float32).eps)):
        logprob = torch.zeros(1, requires_grad=True)
        found = nsd_losses(logprob, torch.tensor([-1.0]), torch.tensor([0.5]), None, NsdOptions(penalty, "none"))
        (gradient,) = torch.autograd.grad(found.loss.sum(), logprob)
        assert gradient.item() == pytest.approx(slope, rel=1e-3)


def test_float32_keeps_the_small_difference_of_a_probability_from_one():
    # 1 - p computed from p would be off by 20% here.
    logprob = torch.tensor([-3e-7])
    push = nsd_losses(logprob, torch.tensor([-1.0]), None, None, NsdOptions("unbounded", "none")).push
    assert push.item() == pytest.approx(-math.log(3e-7), rel=1e-6)


def test_the_gate():
    ref, neg = logs(0.2, 0.5, 0.7, 1e-4), logs(0.5, 0.5, 0.1, 1e-3)
    assert nsd_gate(ref, neg).tolist() == pytest.approx([0.3, 0, 0, 9e-4])
    assert nsd_gate(ref, neg, form="log").tolist() == pytest.approx([math.log(2.5), 0, 0, math.log(10)])
    assert nsd_gate(ref, neg, form="log", logp_floor=-8.0)[3].item() == pytest.approx(math.log(1e-3) + 8)
    assert not nsd_gate(ref.requires_grad_(), neg.requires_grad_()).requires_grad
    excluded = torch.tensor([-math.inf])
    assert nsd_gate(excluded, excluded, form="log").item() == 0
    assert nsd_gate(excluded, torch.zeros(1)).item() == 1
    with pytest.raises(ValueError, match="neither"):
        nsd_gate(ref, neg, form="odds")


def test_the_trust_mask_is_one_sided_and_reads_nan_as_unknown():
    logprobs = logs(0.4, 0.4, 0.4, 0.4, 0.4).requires_grad_()
    old = torch.cat([logs(0.51, 0.49, 0.1), torch.tensor([math.nan, -math.inf], dtype=torch.float64)])
    gate, ref = torch.full((5,), 0.9), logs(*[0.3] * 5)
    found = nsd_losses(logprobs, ref, gate, old, NsdOptions(trust_ratio=0.2))
    assert found.masked.tolist() == [True, False, False, False, False]
    free = nsd_losses(logprobs, ref, gate, old, NsdOptions())
    assert not free.masked.any()
    assert found.loss.tolist() == [0, *free.loss.tolist()[1:]]
    (gradient,) = torch.autograd.grad(found.loss.sum(), logprobs)
    assert gradient[0] == 0
    assert gradient[1:].all()
    assert found.push.tolist() == free.push.tolist()
    with pytest.raises(ValueError, match="trust_ratio"):
        nsd_losses(logprobs, ref, gate, None, NsdOptions(trust_ratio=0.2))


def test_a_clamped_loss_is_marked_and_has_no_gradient():
    logprobs = logs(0.99, 0.1, 0.99).requires_grad_()
    old = logs(0.99, 0.1, 1.0) + torch.tensor([0.0, 0.0, 3.0])
    options = NsdOptions(loss_clamp=0.5, trust_ratio=0.2)
    found = nsd_losses(logprobs, logs(0.1, 0.1, 0.1), torch.full((3,), 0.9), old, options)
    assert found.clipped.tolist() == [True, False, False]  # the last is out already
    assert found.loss[0].item() == 0.5
    (gradient,) = torch.autograd.grad(found.loss.sum(), logprobs)
    assert gradient.ne(0).tolist() == [False, True, False]


def test_no_tokens():
    empty = torch.zeros(0, requires_grad=True)
    found = nsd_losses(empty, torch.zeros(0), torch.zeros(0), torch.zeros(0), NsdOptions(trust_ratio=0.2))
    assert all(one.shape == (0,) for one in found)
    torch.autograd.grad(found.loss.sum(), empty)


@pytest.mark.parametrize(
    "change",
    [
        {"penalty": "bound"},
        {"anchor": "full"},
        {"alpha": -0.1},
        {"alpha": math.nan},
        {"npo_beta": 0.0},
        {"logp_floor": 1.0},
        {"logp_floor": -100.0},
        {"prob_clamp": 1.0},
        {"loss_clamp": 0.0},
        {"trust_ratio": 1.5},
    ],
)
def test_options_without_a_meaning_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(NsdOptions(), **change)


def test_rto_targets_are_the_sheets():
    reference = torch.tensor([-1.0, -3.0], dtype=torch.float64)
    assert rto_target_distribution(reference, alpha=1.0).tolist() == pytest.approx([0.880797, 0.119203], abs=1e-6)
    assert rto_target_distribution(reference).tolist() == pytest.approx([0.731059, 0.268941], abs=1e-6)
    assert rto_target_distribution(reference, alpha=0.0).tolist() == [0.5, 0.5]
    three = torch.tensor([-1.0, -3.0, -2.5], dtype=torch.float64)
    u, v = torch.tensor([0, 0, 1]), torch.tensor([1, 2, 2])
    targets = rto_target_probability(three[u], three[v])
    assert targets.tolist() == pytest.approx([0.475021, 0.481259, 0.506250], abs=1e-6)
    # The closed form equals the definition through q and q_ref, also over more successes than the pair.
    q, q_ref = rto_target_distribution(three), rto_target_distribution(three, alpha=1.0)
    margin = (q[u] / q[v]).log() - (q_ref[u] / q_ref[v]).log()
    assert margin.tolist() == pytest.approx([-1, -0.75, 0.25], abs=1e-9)
    torch.testing.assert_close(torch.sigmoid(0.1 * margin), targets)
    assert rto_target_probability(three[u], three[v], alpha=1.0).tolist() == [0.5] * 3


@pytest.mark.parametrize("bad", [[-1.0, -math.inf], [-1.0, math.nan], [-1.0, -1e5]])
def test_a_success_without_a_positive_target_is_refused(bad):
    with pytest.raises(ValueError, match="not positive"):
        rto_target_distribution(torch.tensor(bad))


def test_rto_loss_and_gradient_are_those_of_the_printed_formula():
    generator = torch.Generator().manual_seed(1)
    parts = torch.randn(4, 50, generator=generator, dtype=torch.float64) * 20 - 60
    leaves = [one.requires_grad_() for one in parts[:2].clone()]
    target = torch.rand(50, generator=generator, dtype=torch.float64)
    found = rto_losses(*leaves, *parts[2:], target, beta=0.3)
    margin = (leaves[0] - leaves[1]) - (parts[2] - parts[3])
    p = torch.sigmoid(0.3 * margin)
    plain_kl = target * (target / p).log() + (1 - target) * ((1 - target) / (1 - p)).log()
    torch.testing.assert_close(found.loss, plain_kl, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(found.margin, margin.detach())
    torch.testing.assert_close(found.probability, p.detach())
    for mine, theirs in zip(
        torch.autograd.grad(found.loss.sum(), leaves), torch.autograd.grad(plain_kl.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-12)


def test_rto_at_target_one_is_dpo_and_at_the_target_rests():
    u = torch.tensor([-5.0, -9.0, -300.0], dtype=torch.float64, requires_grad=True)
    v, ref = torch.tensor([-6.0, -2.0, -3000.0], dtype=torch.float64), torch.tensor([-7.0, -7.0, -7.0])
    found = rto_losses(u, v, ref, ref, torch.ones(3))
    dpo = -torch.nn.functional.logsigmoid(0.1 * (u - v))
    torch.testing.assert_close(found.loss, dpo, rtol=1e-12, atol=1e-15)
    # The policy whose odds are q's: nothing moves, and the loss is not below 0.
    reference = torch.tensor([-1.0, -3.0])
    policy = (0.5 * reference).requires_grad_()
    target = rto_target_probability(reference[:1], reference[1:])
    rest = rto_losses(policy[:1], policy[1:], reference[:1], reference[1:], target)
    assert 0 <= rest.loss.item() < 1e-6
    assert torch.autograd.grad(rest.loss.sum(), policy)[0].abs().max() < 1e-7


def test_rto_of_far_margins_stays_finite():
    u = torch.tensor([0.0, -1e6, 0.0, -1e6], requires_grad=True)
    zero = torch.zeros(4)
    found = rto_losses(u, u.detach().flip(0), zero, zero, torch.tensor([1.0, 1.0, 0.0, 0.5]))
    (gradient,) = torch.autograd.grad(found.loss.sum(), u)
    assert found.loss.isfinite().all()
    assert gradient.tolist() == pytest.approx([0.0, -0.1, 0.1, -0.05])
