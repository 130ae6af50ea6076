"""The improvement condition of gaca.md 2.4 in a small tabular world where the optimal advantage is known.

An episode: the policy says a sentence and walks (one action, any wording), chance puts it into a rich or a poor room,
and there it chooses a door, well or badly, half and half. The walk has advantage 0; a good door is worth +5, a bad one
-5, in either room. The episode part mixes the room's luck into the door's credit, the step part (same room) does not:
at doors more step weight is right. Whether modulation finds the doors depends on where the nll is high, and there both
signs occur: a plain sentence makes doors the uncertain steps, a sentence with many wordings hides them.
"""

import math
import random

import numpy as np
import pytest

from strop.core.credit.diagnose import Alignment, Diagnosis, Moments
from strop.core.credit.gaca import GacaOptions, gaca
from strop.core.credit.gigpo import GigpoOptions, StepBatch, anchor_labels, credit_parts

DOORS_UNSURE, WORDS_UNSURE = 0.05, math.log(16)
NO_STD = GigpoOptions(std=False, discount=1.0)


def simulate(words_nll, groups=60, attempts=8, seed=5):
    """Rollouts as dictionaries: two steps, with reward, anchor, nll and the optimal advantage of what was done."""
    draw = random.Random(seed)
    made = []
    for group in range(groups):
        for sample in range(attempts):
            room, is_good = draw.choice(["rich", "poor"]), draw.random() < 0.5
            reward = (6.0 if room == "rich" else 0.0) + (10.0 if is_good else 0.0)
            steps = [
                {"anchor": "hall", "reward": 0.0, "nll": words_nll, "optimal_advantage": 0.0},
                {"anchor": room, "reward": reward, "nll": math.log(2), "optimal_advantage": 5.0 if is_good else -5.0},
            ]
            made.append(
                {"kind": "rollout", "id": f"{group}/{sample}", "task": "t", "group": f"g{group}",
                 "group_size": attempts, "sample": sample, "reward": reward, "success": is_good, "steps": steps}
            )  # fmt: skip
    return made


def arrays(rollouts):
    steps = [step for rollout in rollouts for step in rollout["steps"]]
    names = sorted({rollout["group"] for rollout in rollouts})
    group_N = np.array([names.index(rollout["group"]) for rollout in rollouts])
    lengths = np.array([len(rollout["steps"]) for rollout in rollouts])
    batch = StepBatch(
        group_N, np.array([r["reward"] for r in rollouts]), lengths, np.array([s["reward"] for s in steps]),
        np.ones(len(steps), bool), anchor_labels(np.repeat(group_N, lengths), [s["anchor"] for s in steps]),
        np.array([s["nll"] for s in steps]),
    )  # fmt: skip
    return batch, np.array([s["optimal_advantage"] for s in steps])


def measure(words_nll, options, gigpo_options=NO_STD):
    batch, optimal = arrays(simulate(words_nll))
    parts = credit_parts(batch, gigpo_options)
    weights, advantages = gaca(batch, parts, options)
    alignment = Alignment()
    alignment.add(parts, weights, advantages, optimal, options)
    figures = {metric.name: metric.value for metric in alignment.metrics(options.modulation)}
    return figures, float(((advantages / options.scale - optimal) ** 2).mean())


def risk(words_nll, options):
    return measure(words_nll, options)[1]


@pytest.mark.parametrize("options", [GacaOptions(), GacaOptions(singleton="shrink"), GacaOptions(scale=2.0)])
def test_uncertainty_at_the_doors_helps_and_at_the_words_hurts(options):
    helps, hurts = measure(DOORS_UNSURE, options)[0], measure(WORDS_UNSURE, options)[0]
    assert helps["gamma"] > 0.5
    assert helps["modulation_improves"] == 1
    assert helps["risk_used_weight"] < helps["risk_fixed_weight"]
    assert hurts["gamma"] < -0.5
    assert hurts["modulation_improves"] == 0
    assert hurts["risk_used_weight"] > hurts["risk_fixed_weight"]
    assert hurts["best_modulation"] < 0


@pytest.mark.parametrize("words_nll", [DOORS_UNSURE, WORDS_UNSURE])
@pytest.mark.parametrize("form", ["linear", "additive"])
def test_the_risk_is_the_predicted_parabola(words_nll, form):
    """Risk(kappa) = Risk(0) - 2 kappa Gamma + kappa^2 E[s^2 d^2], measured at several kappa and both signs of Gamma."""
    options = GacaOptions(map=form, base_weight=0.5)
    figures, at_quarter = measure(words_nll, options)
    fixed = risk(words_nll, GacaOptions(map=form, base_weight=0.5, modulation=0.0))
    assert figures["risk_fixed_weight"] == pytest.approx(fixed)
    assert figures["risk_used_weight"] == pytest.approx(at_quarter)
    for kappa in (0.1, 0.25, 0.5):
        expected = fixed - 2 * kappa * figures["gamma"] + kappa**2 * figures["score_curvature"]
        assert risk(words_nll, GacaOptions(map=form, base_weight=0.5, modulation=kappa)) == pytest.approx(expected)


def test_the_best_modulation_is_best_and_gains_what_it_says():
    figures, _ = measure(DOORS_UNSURE, GacaOptions())
    best = figures["best_modulation"]
    assert 0 < best < 0.25  # no weight is cut at a bound up to twice this strength
    fixed = risk(DOORS_UNSURE, GacaOptions(modulation=0.0))
    lowest = risk(DOORS_UNSURE, GacaOptions(modulation=best))
    assert fixed - lowest == pytest.approx(figures["best_modulation_gain"])
    for other in (best - 0.05, best + 0.05):
        assert risk(DOORS_UNSURE, GacaOptions(modulation=other)) > lowest
    # Twice the best strength is where the improvement ends.
    assert risk(DOORS_UNSURE, GacaOptions(modulation=2 * best)) == pytest.approx(fixed)


def test_the_best_constant_weight_is_best():
    figures, _ = measure(DOORS_UNSURE, GacaOptions(singleton="shrink"))
    best = figures["best_constant_weight"]
    at = [
        risk(DOORS_UNSURE, GacaOptions(singleton="shrink", base_weight=w, modulation=0.0))
        for w in np.clip([best - 0.1, best, best + 0.1], 0, 1)
    ]
    assert at[1] <= min(at)


def test_inverting_the_signal_turns_the_sign():
    plain = measure(DOORS_UNSURE, GacaOptions())[0]["gamma"]
    inverted = measure(DOORS_UNSURE, GacaOptions(control="invert"))[0]["gamma"]
    assert inverted == pytest.approx(-plain)


def test_the_sigmoid_map_agrees_at_first_order():
    options = GacaOptions(map="sigmoid", base_weight=0.4, modulation=1e-4)
    figures, at_small = measure(DOORS_UNSURE, options)
    slope = (figures["risk_fixed_weight"] - at_small) / (2 * 1e-4)
    assert slope == pytest.approx(figures["gamma"], rel=1e-3)


def test_without_optimal_advantages_nothing_is_claimed():
    batch, optimal = arrays(simulate(DOORS_UNSURE, groups=2))
    parts = credit_parts(batch, NO_STD)
    weights, advantages = gaca(batch, parts)
    alignment = Alignment()
    alignment.add(parts, weights, advantages, np.full(len(optimal), np.nan), GacaOptions())
    assert alignment.metrics(0.25) == []


def test_steps_with_and_without_optimum_mix():
    batch, optimal = arrays(simulate(DOORS_UNSURE, groups=2))
    parts = credit_parts(batch, NO_STD)
    weights, advantages = gaca(batch, parts)
    optimal[::2] = np.nan
    alignment = Alignment()
    alignment.add(parts, weights, advantages, optimal, GacaOptions())
    assert alignment.n == len(optimal) // 2


def test_moments_in_blocks_are_moments_of_the_whole():
    rng = np.random.default_rng(0)
    x, y = 1e6 + rng.normal(size=500), rng.normal(size=500)
    y += 0.7 * (x - 1e6)
    x[3] = y[17] = np.nan
    blocks = Moments()
    for part in np.split(np.arange(500), [1, 1, 40, 333]):
        blocks.add(x[part], y[part])
    known = ~(np.isnan(x) | np.isnan(y))
    assert blocks.n == 498
    assert blocks.mean == pytest.approx(x[known].mean(), rel=1e-12)
    assert blocks.std == pytest.approx(x[known].std(), rel=1e-9)
    assert blocks.correlation == pytest.approx(np.corrcoef(x[known], y[known])[0, 1], rel=1e-9)


def test_moments_of_nothing_and_of_a_constant():
    assert Moments().mean is None
    assert Moments().std is None
    constant = Moments()
    constant.add(np.array([2.0, 2.0]), np.array([1.0, 5.0]))
    assert constant.correlation is None


def test_shares_and_bins():
    batch, optimal = arrays(simulate(DOORS_UNSURE, groups=1))
    parts = credit_parts(batch, NO_STD)
    weights, advantages = gaca(batch, parts)
    diagnosis = Diagnosis()
    tokens = np.where(np.arange(16) % 2, 3.0, 9.0)
    for _ in range(2):
        diagnosis.add_parts(batch, parts, tokens)
        diagnosis.add_weights(batch, parts, weights, advantages, optimal, GacaOptions())
    found = diagnosis.metrics(with_weights=True)
    named = {metric.name: metric.value for metric in found if metric.of is None}
    bins = {metric.of: metric.value for metric in found if metric.of is not None}
    assert sum(bins.values()) == pytest.approx(1)
    assert bins["anchors of 5-8"] >= 0.5  # the hall, seen by all eight
    assert named["singleton_share"] == bins.get("anchors of 1", 0)
    assert named["score_std"] == pytest.approx(weights.score_R.std())
    assert named["weight_mean"] == pytest.approx(weights.weight_R.mean())
    assert named["nll_std_within"] == pytest.approx((math.log(2) - DOORS_UNSURE) / 2)
    # Low nll goes with many tokens here.
    assert named["corr_nll_tokens"] == pytest.approx(-1)
    assert named["weight_clip_share"] == 0


def test_nothing_seen():
    assert all(metric.value is None for metric in Diagnosis().metrics(with_weights=True))
