"""The token losses against numbers worked out by hand, and the rules of their sources."""

import math

import pytest
import torch

from strop.core.train.losses import (
    LossOptions,
    dppo,
    dppo_drops,
    kl_estimates,
    mismatch_mask,
    ppo,
    token_losses,
    token_weights,
)


def logs(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log()


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_ppo_by_hand():
    # ratios 1.0, 1.5, 1.5, 0.5, 0.5 with bounds 0.8 and 1.3
    new, old = logs(0.4, 0.6, 0.6, 0.2, 0.2), logs(0.4, 0.4, 0.4, 0.4, 0.4)
    result = ppo(new, old, numbers(2, 2, -2, 2, -2), low=0.2, high=0.3)
    torch.testing.assert_close(result.loss, numbers(-2, -2.6, 3, -1, 1.6), rtol=0, atol=1e-12)
    assert result.clipped.tolist() == [False, True, False, False, True]
    assert not result.masked.any()


def test_ppo_gradient_is_rho_a_where_not_clipped_and_zero_where_clipped():
    new = logs(0.6, 0.6, 0.2, 0.2).requires_grad_()
    old, advantages = logs(0.4, 0.4, 0.4, 0.4), numbers(2, -2, 2, -2)
    ppo(new, old, advantages, 0.2, 0.2).loss.sum().backward()
    torch.testing.assert_close(new.grad, numbers(0, 3, -1, 0), rtol=0, atol=1e-12)


# p, q, A, dropped: A > 0 is dropped where p - q > 0.2, A <= 0 where p - q < -0.2 (sheet frognano, 1.5).
DPPO_TABLE = [
    (0.8, 0.5, 1.0, True),
    (0.71, 0.5, 1.0, True),
    (0.69, 0.5, 1.0, False),
    (0.2, 0.5, 1.0, False),
    (0.2, 0.5, -1.0, True),
    (0.29, 0.5, -1.0, True),
    (0.31, 0.5, -1.0, False),
    (0.8, 0.5, -1.0, False),
    (0.2, 0.5, 0.0, True),
    (0.8, 0.5, 0.0, False),
    # A ratio of 100 on a rare token is no reason to drop it: the rule looks at the difference.
    (0.1, 0.001, 1.0, False),
    (0.0001, 0.19, -1.0, False),
]


@pytest.mark.parametrize(("p", "q", "advantage", "dropped"), DPPO_TABLE)
def test_dppo_rule_table(p, q, advantage, dropped):
    drops = dppo_drops(numbers(p), numbers(q), numbers(advantage), low=0.2, high=0.2)
    assert drops.tolist() == [dropped]
    result = dppo(logs(p), logs(q), numbers(advantage), low=0.2, high=0.2)
    assert result.masked.tolist() == [dropped]
    expected = 0.0 if dropped else -advantage * p / q
    assert result.loss.item() == pytest.approx(expected, abs=1e-12)


def test_dppo_thresholds_are_separate():
    p, q, advantages = numbers(0.65, 0.35), numbers(0.5, 0.5), numbers(1, -1)
    assert dppo_drops(p, q, advantages, low=0.2, high=0.1).tolist() == [True, False]
    assert dppo_drops(p, q, advantages, low=0.1, high=0.2).tolist() == [False, True]


def test_dppo_rule_on_the_numbers_that_slime_tests():
    """The case of slime's own test of `dppo_binary_tv`, bounds 0.2 and 0.28 (public repository THUDM/slime)."""
    p, q, advantages = numbers(0.35, 0.1, 0.9, 0.2), numbers(0.1, 0.4, 0.5, 0.7), numbers(1, -1, 1, -1)
    assert dppo_drops(p, q, advantages, low=0.2, high=0.28).tolist() == [False, True, True, True]
    result = dppo(p.log(), q.log(), advantages, low=0.2, high=0.28, ratio="stable-rl")
    torch.testing.assert_close(result.loss, numbers(-3.5 * math.log(0.35), 0, 0, 0))


def test_dppo_ratio_forms_have_the_same_gradient_until_the_cap_of_ten():
    grads = {}
    for form in ("frognano", "stable-rl"):
        new = logs(0.3, 0.25).requires_grad_()
        dppo(new, logs(0.4, 0.01), numbers(1.5, 1), low=0.3, high=0.3, ratio=form).loss.sum().backward()
        grads[form] = new.grad.tolist()
    assert grads["frognano"] == pytest.approx([-1.5 * 0.75, -25])
    assert grads["stable-rl"] == pytest.approx([-1.5 * 0.75, -10])


def test_reinforce_and_sft():
    new, advantages = logs(0.5, 0.1), numbers(2, -1)
    nan = numbers(math.nan, math.nan)
    torch.testing.assert_close(
        token_losses(new, nan, advantages, LossOptions("reinforce")).loss, numbers(2 * math.log(2), math.log(0.1))
    )
    torch.testing.assert_close(
        token_losses(new, nan, advantages, LossOptions("sft")).loss, numbers(math.log(2), math.log(10))
    )


def test_mismatch_cap_masks_both_sides_and_leaves_sft_alone():
    new, old = logs(0.4, 0.41, 0.1, 0.09), logs(0.2, 0.2, 0.2, 0.2)
    assert mismatch_mask(new, old, 2.0001).tolist() == [False, True, False, True]
    options = LossOptions("reinforce", mismatch_cap=2.0001)
    result = token_losses(new, old, numbers(1, 1, 1, 1), options)
    assert result.masked.tolist() == [False, True, False, True]
    assert result.loss.tolist() == pytest.approx([-math.log(0.4), 0, -math.log(0.1), 0])
    assert not token_losses(new, old, numbers(1, 1, 1, 1), LossOptions("sft", mismatch_cap=2.0)).masked.any()


def test_dppo_and_mismatch_masks_add_up():
    options = LossOptions("dppo", mismatch_cap=5.0)
    result = token_losses(logs(0.9, 0.06, 0.5), logs(0.5, 0.01, 0.5), numbers(1, 1, 1), options)
    assert result.masked.tolist() == [True, True, False]


@pytest.mark.parametrize("loss", ["ppo", "dppo"])
def test_wild_ratios_stay_finite(loss):
    new = numbers(-1e-3, -300.0).requires_grad_()
    old, advantages = numbers(-300.0, -1e-3), numbers(-1, 1)
    result = token_losses(new, old, advantages, LossOptions(loss))
    result.loss.sum().backward()
    assert result.loss.isfinite().all()
    assert new.grad.isfinite().all()


def test_kl_estimators_by_hand():
    new, reference = logs(0.5, 0.2), logs(0.25, 0.4)
    two = math.log(2)
    assert kl_estimates(new, reference, "k1").tolist() == pytest.approx([two, -two])
    assert kl_estimates(new, reference, "k2").tolist() == pytest.approx([two**2 / 2, two**2 / 2])
    assert kl_estimates(new, reference, "k3").tolist() == pytest.approx([0.5 - 1 + two, 2 - 1 - two])


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimators_average_to_the_kl(estimator):
    p, r = numbers(0.1, 0.2, 0.3, 0.4), numbers(0.3, 0.3, 0.2, 0.2)
    exact = (p * (p / r).log()).sum()
    assert (p * kl_estimates(p.log(), r.log(), estimator)).sum().item() == pytest.approx(exact.item())


def test_only_k2_has_the_gradient_of_the_kl():
    """On policy, E[grad k2] is the KL's gradient, E[grad k1] is zero, E[grad k3] is that of KL(reference || policy)."""
    reference = numbers(0.3, 0.3, 0.2, 0.2)

    def gradient(of):
        logits = numbers(0.1, -0.5, 0.7, 0.2).requires_grad_()
        log_p = logits.log_softmax(-1)
        of(log_p).backward()
        return logits.grad

    def sampled(estimator):
        return gradient(lambda log_p: (log_p.detach().exp() * kl_estimates(log_p, reference.log(), estimator)).sum())

    kl = gradient(lambda log_p: (log_p.exp() * (log_p - reference.log())).sum())
    forward = gradient(lambda log_p: -(reference * log_p).sum())
    torch.testing.assert_close(sampled("k2"), kl)
    torch.testing.assert_close(sampled("k1"), torch.zeros_like(kl), rtol=0, atol=1e-12)
    torch.testing.assert_close(sampled("k3"), forward)


def test_denominators_by_hand():
    assert token_weights([3, 1], "token") == [1 / 4, 1 / 4]
    assert token_weights([3, 1], "sequence") == [1 / 6, 1 / 2]
    assert token_weights([3, 1], "constant", 10) == [1 / 20, 1 / 20]
