"""GACA: the sheet's golden vector, reductions to its neighbours, every map, control and edge."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.credit.gaca import GacaOptions, gaca, relative_scores
from strop.core.credit.gigpo import GigpoOptions, StepBatch, anchor_labels, credit_parts, gigpo_advantages
from strop.core.credit.grpo import group_advantages

OBSERVATIONS = ["s0", "s1", "s2", "s0", "s1", "s0", "s3", "s0"]
NLL = [0.2, 0.8, 0.2, 0.5, 0.5, 0.1, 0.3, 0.2]
LITERAL = GacaOptions(singleton="shrink")
NO_STD = GigpoOptions(std=False)


def golden_batch(nll=NLL, valid=None):
    """The worked example of gaca.md 2.9: attempts of 3, 2 and 3 steps, the first one succeeds."""
    return StepBatch(
        np.zeros(3, np.int64), np.array([10.0, 0, 0]), np.array([3, 2, 3]), np.array([0.0, 0, 10, 0, 0, 0, 0, 0]),
        np.ones(8, bool) if valid is None else np.array(valid), anchor_labels(np.zeros(8, np.int64), OBSERVATIONS),
        np.array(nll, float),
    )  # fmt: skip


def run(options, gigpo_options=NO_STD, **batch):
    made = golden_batch(**batch)
    parts = credit_parts(made, gigpo_options)
    weights, advantages = gaca(made, parts, options)
    return parts, weights, advantages


def test_golden_vector_of_the_sheet():
    _, weights, advantages = run(LITERAL)
    assert weights.score_R == pytest.approx([-0.7071, 1.4142, -0.7071, 0, 0, -1.2247, 1.2247, 0], abs=5e-5)
    assert weights.weight_R == pytest.approx([0.3232, 0.8536, 0.3232, 0.5, 0.5, 0.1938, 0.8062, 0.5], abs=5e-5)
    expected = [6.4177, 4.9697, 4.2299, -3.0031, -4.25, -3.4605, -0.7268, -3.0031]
    assert advantages == pytest.approx(expected, abs=5e-5)
    assert not weights.is_clipped_R.any()


def test_singletons_take_the_whole_episode_part_by_default():
    parts, weights, advantages = run(GacaOptions())
    singles = parts.anchor_size_R == 1
    assert singles.tolist() == [False, False, True, False, False, False, True, False]
    assert advantages[singles] == pytest.approx(parts.episode_R[singles])
    assert weights.weight_R[singles].tolist() == weights.base_R[singles].tolist() == [0.0, 0.0]
    assert advantages[~singles] == pytest.approx(run(LITERAL)[2][~singles])


@pytest.mark.parametrize("gigpo_options", [NO_STD, GigpoOptions(), GigpoOptions(all_rows=False)])
def test_no_modulation_at_scale_two_is_gigpo(gigpo_options):
    """Sheet 2.3: half and half, doubled, is GiGPO with omega 1, to the last bit."""
    parts, _, advantages = run(GacaOptions(modulation=0.0, scale=2.0, singleton="shrink"), gigpo_options)
    assert advantages.tolist() == gigpo_advantages(parts, gigpo_options).tolist()


def test_additive_without_modulation_is_gigpo():
    for omega in (1.0, 0.3):
        parts, _, advantages = run(GacaOptions(map="additive", base_weight=omega, modulation=0.0))
        assert advantages == pytest.approx(gigpo_advantages(parts, replace(NO_STD, step_weight=omega)))


@pytest.mark.parametrize("std", [True, False])
def test_one_step_attempts_from_one_state_are_grpo(std):
    """The env `answer`: the prompt is the one anchor, so both parts are the group's and any mix of them is GRPO."""
    rewards = [1.0, 0.0, 0.0, 0.3]
    batch = StepBatch(
        np.zeros(4, np.int64), np.array(rewards), np.ones(4, np.int64), np.array(rewards), np.ones(4, bool),
        np.zeros(4, np.int64), np.array([0.1, 0.9, 2.0, 0.4]),
    )  # fmt: skip
    _, advantages = gaca(batch, credit_parts(batch, GigpoOptions(std=std)))
    assert advantages == pytest.approx(group_advantages(rewards, std=std))


def test_additive_map():
    parts, weights, advantages = run(GacaOptions(map="additive", base_weight=1.0, modulation=1.0))
    omega = np.maximum(0, 1 + weights.score_R)
    assert weights.weight_R == pytest.approx(omega)
    assert advantages == pytest.approx(parts.episode_R + omega * parts.step_R)
    # 1 - 1.2247 is cut at 0, and said to be.
    assert weights.is_clipped_R.tolist() == [False] * 5 + [True, False, False]


def test_sigmoid_map():
    _, weights, _ = run(replace(LITERAL, map="sigmoid", base_weight=0.3, modulation=0.7))
    expected = 1 / (1 + np.exp(-(math.log(0.3 / 0.7) + 0.7 * weights.score_R)))
    assert weights.weight_R == pytest.approx(expected)
    for end in (0.0, 1.0):
        _, weights, _ = run(replace(LITERAL, map="sigmoid", base_weight=end))
        assert weights.weight_R.tolist() == [end] * 8


def test_ratio_score():
    _, weights, _ = run(replace(LITERAL, score="ratio"))
    assert weights.score_R == pytest.approx([-0.5, 1.0, -0.5, 0, 0, -0.5, 0.5, 0])
    zero_mean = relative_scores(np.array([0.0, 0.0]), np.array([0, 0]), 1, score="ratio")
    assert zero_mean.tolist() == [0.0, 0.0]


def test_scores_and_weights_are_clipped():
    nll = [0.0] * 20 + [10.0]
    batch = StepBatch(
        np.zeros(1, np.int64), np.ones(1), np.array([21]), np.zeros(21), np.ones(21, bool), np.zeros(21, np.int64),
        np.array(nll),
    )  # fmt: skip
    weights, _ = gaca(batch, credit_parts(batch, NO_STD), replace(LITERAL, modulation=0.25))
    assert weights.score_R[-1] == 2.0
    assert weights.weight_R[-1] == 1.0
    assert not weights.is_clipped_R[-1]  # 0.5 + 0.25 * 2 is just 1
    weights, _ = gaca(batch, credit_parts(batch, NO_STD), replace(LITERAL, modulation=0.3))
    assert weights.is_clipped_R.tolist() == [False] * 20 + [True]


def test_first_order_effect_is_linear_in_the_modulation():
    """What the paper demands of w: fixed mixing at 0, linear nearby."""
    base = run(replace(LITERAL, modulation=0.0))[2]
    one, two = (run(replace(LITERAL, modulation=k))[2] - base for k in (0.1, 0.2))
    assert two == pytest.approx(2 * one)


class TestControls:
    def test_fixed_is_no_modulation(self):
        assert run(replace(LITERAL, control="fixed"))[2].tolist() == run(replace(LITERAL, modulation=0.0))[2].tolist()

    def test_ends(self):
        parts, weights, advantages = run(replace(LITERAL, control="episode_only"))
        assert advantages.tolist() == parts.episode_R.tolist()
        assert weights.weight_R.tolist() == [0.0] * 8
        # Literal even under the singleton rule: nothing of the episode part is left.
        parts, _, advantages = run(GacaOptions(control="step_only", scale=3.0))
        assert advantages == pytest.approx(3 * parts.step_R)

    def test_ends_of_the_additive_map(self):
        options = GacaOptions(map="additive", base_weight=0.7)
        parts, _, advantages = run(replace(options, control="step_only"))
        assert advantages == pytest.approx(0.7 * parts.step_R)
        parts, _, advantages = run(replace(options, control="episode_only"))
        assert advantages.tolist() == parts.episode_R.tolist()

    def test_invert_mirrors_the_weights(self):
        plain, inverted = run(LITERAL)[1], run(replace(LITERAL, control="invert"))[1]
        assert inverted.weight_R == pytest.approx(1 - plain.weight_R)

    @pytest.mark.parametrize("singleton", ["episode", "shrink"])
    def test_mean_matched_keeps_the_mean_and_loses_the_signal(self, singleton):
        options = GacaOptions(singleton=singleton)
        plain, matched = run(options)[1], run(replace(options, control="mean_matched"))[1]
        assert matched.weight_R.mean() == pytest.approx(plain.weight_R.mean())
        acting = matched.weight_R[matched.base_R > 0]
        assert len(acting) == (8 if singleton == "shrink" else 6)
        assert np.ptp(acting) == 0

    def test_shuffle_within_attempts(self):
        plain, shuffled = run(LITERAL)[1], run(replace(LITERAL, control="shuffle_traj"))[1]
        for rows in (slice(0, 3), slice(3, 5), slice(5, 8)):
            assert sorted(plain.score_R[rows]) == pytest.approx(sorted(shuffled.score_R[rows]))
        many = [run(replace(LITERAL, control="shuffle_traj", seed=seed))[1].score_R.tolist() for seed in range(8)]
        assert len({tuple(scores) for scores in many}) > 1

    def test_shuffle_over_the_batch(self):
        plain = run(LITERAL)[1]
        found = [run(replace(LITERAL, control="shuffle_batch", seed=seed))[1] for seed in range(8)]
        assert all(sorted(plain.score_R) == pytest.approx(sorted(one.score_R)) for one in found)
        crossed = [set(np.round(one.score_R[:3], 4)) - {-0.7071, 1.4142} for one in found]
        assert any(crossed)

    def test_shuffles_depend_on_names_and_not_on_places(self):
        """The same attempt shuffles alike whatever else is in the batch."""
        batch = golden_batch()
        options = replace(LITERAL, control="shuffle_traj", seed=3)
        whole, _ = gaca(batch, credit_parts(batch, NO_STD), options, ["a", "b", "c"])
        alone = StepBatch(
            np.zeros(1, np.int64), np.zeros(1), np.array([3]), np.zeros(3), np.ones(3, bool), np.arange(3),
            batch.nll_R[5:],
        )  # fmt: skip
        part, _ = gaca(alone, credit_parts(alone, NO_STD), options, ["c"])
        assert part.score_R.tolist() == whole.score_R[5:].tolist()

    def test_shuffles_leave_steps_without_nll_where_they_are(self):
        nll = [0.2, math.nan, 0.9, 0.5, 0.4, 0.1, math.nan, 0.2]
        for seed in range(5):
            scores = run(replace(LITERAL, control="shuffle_batch", seed=seed), nll=nll)[1].score_R
            assert scores[[1, 6]].tolist() == [0.0, 0.0]


class TestEdges:
    def test_a_step_without_nll_takes_the_base_weight_and_moves_nobody(self):
        nll = [0.2, 0.8, math.nan, 0.5, 0.5, 0.1, 0.3, 0.2]
        _, weights, _ = run(LITERAL, nll=nll)
        assert weights.weight_R[2] == 0.5
        assert weights.score_R[:2] == pytest.approx([-1.0, 1.0])

    def test_no_nll_at_all_is_fixed_mixing(self):
        assert run(LITERAL, nll=[math.nan] * 8)[2].tolist() == run(replace(LITERAL, modulation=0))[2].tolist()

    def test_equal_nll_and_a_single_step(self):
        trajectory_R = np.array([0, 0, 0, 1])
        scores = relative_scores(np.array([0.3, 0.3, 0.1 + 0.2, 7.0]), trajectory_R, 2)
        assert scores.tolist() == [0.0, 0.0, 0.0, 0.0]

    def test_invalid_actions_can_be_left_out_of_the_mean(self):
        valid = [True, True, True, True, True, True, False, True]
        nll = [0.2, 0.8, 0.2, 0.5, 0.5, 0.1, 9.0, 0.3]
        kept, _ = run(LITERAL, nll=nll, valid=valid)[1:]
        left_out, _ = run(replace(LITERAL, invalid_nll="exclude"), nll=nll, valid=valid)[1:]
        # Against its neighbours alone the malformed step stands out, and they are compared with each other.
        assert left_out.score_R[[5, 7]] == pytest.approx([-1.0, 1.0])
        assert left_out.score_R[6] == 2.0
        assert kept.score_R[5] == pytest.approx(kept.score_R[7], abs=0.06)

    def test_all_invalid_and_left_out(self):
        scores = run(replace(LITERAL, invalid_nll="exclude"), valid=[False] * 8)[1].score_R
        assert scores.tolist() == [0.0] * 8

    def test_unknown_choices(self):
        for name in ("score", "map", "singleton", "control", "invalid_nll"):
            with pytest.raises(ValueError, match=f"{name} is 'other', expected one of"):
                GacaOptions(**{name: "other"})

    def test_nothing(self):
        empty = StepBatch(
            np.empty(0, np.int64), np.empty(0), np.empty(0, np.int64), np.empty(0), np.empty(0, bool),
            np.empty(0, np.int64), np.empty(0),
        )  # fmt: skip
        for control in ("none", "mean_matched", "shuffle_batch", "shuffle_traj", "step_only"):
            weights, advantages = gaca(empty, credit_parts(empty, NO_STD), GacaOptions(control=control))
            assert len(advantages) == len(weights.weight_R) == 0


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 20), min_size=8, max_size=8),
    st.sampled_from(["linear", "sigmoid"]),
    st.sampled_from(["zscore", "ratio"]),
    st.floats(0, 1), st.floats(0, 3),
)  # fmt: skip
def test_convex_weights_stay_in_the_unit_interval_and_advantages_between_the_parts(nll, form, score, base, kappa):
    options = GacaOptions(map=form, score=score, base_weight=base, modulation=kappa, singleton="shrink")
    parts, weights, advantages = run(options, nll=nll)
    assert ((weights.weight_R >= 0) & (weights.weight_R <= 1)).all()
    low, high = np.minimum(parts.episode_R, parts.step_R), np.maximum(parts.episode_R, parts.step_R)
    assert ((advantages >= low - 1e-9) & (advantages <= high + 1e-9)).all()


@given(st.lists(st.floats(0, 20), min_size=1, max_size=30))
def test_scores_of_an_attempt_have_mean_zero(nll):
    """So the mean weight is the base weight wherever nothing is cut."""
    scores = relative_scores(np.array(nll), np.zeros(len(nll), int), 1)
    assert abs(scores.mean()) < 1e-6
    assert abs(scores.std() - 1) < 1e-6 or not scores.any()
