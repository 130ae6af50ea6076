"""GiGPO on arrays: the sheet's golden vector, reductions, penalties, anchors, properties."""

import difflib
import math
import random
from importlib.util import module_from_spec, spec_from_file_location
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.credit.gigpo import (
    GigpoOptions,
    StepBatch,
    anchor_labels,
    discounted_returns,
    gigpo,
    similar_labels,
)
from strop.core.credit.grpo import group_advantages


def batch_of(groups, penalised=()):
    """A batch of groups of attempts of (anchor, reward[, nll]) steps; `penalised` are rows that are invalid."""
    attempts = [(g, attempt) for g, group in enumerate(groups) for attempt in group]
    steps = [(g, *step) for g, attempt in attempts for step in attempt]
    valid = np.ones(len(steps), bool)
    valid[list(penalised)] = False
    return StepBatch(
        np.array([g for g, _ in attempts], np.int64),
        np.array([math.fsum(step[1] for step in attempt) for _, attempt in attempts]),
        np.array([len(attempt) for _, attempt in attempts], np.int64),
        np.array([step[2] for step in steps], float),
        valid,
        anchor_labels(np.array([step[0] for step in steps], np.int64), [step[1] for step in steps]),
        np.array([step[3] if len(step) > 3 else math.nan for step in steps], float),
    )


A = [("s0", 0.0, 0.2), ("s1", 0.0, 0.8), ("s2", 10.0, 0.2)]
B = [("s0", 0.0, 0.5), ("s1", 0.0, 0.5)]
C = [("s0", 0.0, 0.1), ("s3", 0.0, 0.3), ("s0", 0.0, 0.2)]
GOLDEN = [[A, B, C]]
NO_STD = GigpoOptions(std=False)


def test_golden_vector_of_the_sheet():
    """gaca.md 2.9, no std, statistics over rows, discount 0.95."""
    parts, advantages = gigpo(batch_of(GOLDEN), NO_STD)
    assert parts.return_R == pytest.approx([9.025, 9.5, 10, 0, 0, 0, 0, 0])
    assert parts.episode_R == pytest.approx([6.25] * 3 + [-3.75] * 5)
    expected = [6.7688, 4.75, 0, -2.2562, -4.75, -2.2562, 0, -2.2562]
    assert parts.step_R == pytest.approx(expected, abs=1e-4)
    assert parts.anchor_size_R.tolist() == [4, 2, 1, 4, 2, 4, 1, 4]
    expected = [13.0188, 11, 6.25, -6.0062, -8.5, -6.0062, -3.75, -6.0062]
    assert advantages == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("all_rows", "std", "expected"),
    [
        (True, False, [6.25, -3.75]),
        (False, False, [6.6667, -3.3333]),
        (True, True, [1.2076, -0.7246]),
        (False, True, [1.1547, -0.5774]),
    ],
)
def test_golden_episode_parts(all_rows, std, expected):
    parts, _ = gigpo(batch_of(GOLDEN), GigpoOptions(std=std, all_rows=all_rows))
    assert parts.episode_R == pytest.approx([expected[0]] * 3 + [expected[1]] * 5, abs=5e-5)
    assert parts.episode_N == pytest.approx([expected[0], expected[1], expected[1]], abs=5e-5)


def test_anchors_match_across_attempts_and_time_but_not_across_groups():
    batch = batch_of([[[("s", 0), ("s", 1)], [("s", 0)]], [[("s", 5)]]])
    parts, _ = gigpo(batch, NO_STD)
    assert parts.anchor_size_R.tolist() == [3, 3, 3, 1]
    assert batch.anchor_R.tolist() == [0, 0, 0, 3]


def test_singleton_anchors_and_equal_returns_have_no_step_part():
    parts, _ = gigpo(batch_of([[[("a", 0.3), ("b", 0.0)], [("a", 0.3), ("c", 0.0)]]]), GigpoOptions())
    assert parts.step_R.tolist() == [0.0, 0.0, 0.0, 0.0]
    assert parts.episode_R.tolist() == [0.0] * 4


def test_eight_equal_attempts_are_exactly_zero():
    _, advantages = gigpo(batch_of([[[("a", 0.1), ("b", 0.2)]] * 8]), GigpoOptions())
    assert advantages.tolist() == [0.0] * 16


def test_zero_step_weight_is_grpo():
    options = GigpoOptions(step_weight=0.0, all_rows=False)
    _, advantages = gigpo(batch_of(GOLDEN), options)
    expected = group_advantages([10, 0, 0])
    assert advantages == pytest.approx(np.repeat(expected, [3, 2, 3]), rel=1e-12)


def test_penalty_stays_with_its_own_step():
    """Step 1 of A is invalid: its own return and score fall by 0.1, its predecessor's return does not."""
    clean, _ = gigpo(batch_of(GOLDEN), NO_STD)
    parts, _ = gigpo(batch_of(GOLDEN, penalised=[1]), NO_STD)
    assert parts.return_R - clean.return_R == pytest.approx([0, -0.1, 0, 0, 0, 0, 0, 0])
    # The score of that row alone is lower, and the group's mean over rows by an eighth of it.
    assert parts.episode_R - clean.episode_R == pytest.approx(
        [0.0125, -0.0875, 0.0125, 0.0125, 0.0125, 0.0125, 0.0125, 0.0125]
    )
    # Attempts themselves are compared without step penalties.
    assert parts.episode_N == pytest.approx(clean.episode_N + 0.0125)


def test_penalty_with_statistics_over_attempts():
    clean, _ = gigpo(batch_of(GOLDEN), GigpoOptions(std=False, all_rows=False))
    parts, _ = gigpo(batch_of(GOLDEN, penalised=[1]), GigpoOptions(std=False, all_rows=False))
    assert parts.episode_R - clean.episode_R == pytest.approx([0, -0.1, 0, 0, 0, 0, 0, 0])
    # verl reads the value of an attempt off its first step, so a penalty there moves everybody.
    verl, _ = gigpo(batch_of(GOLDEN, penalised=[0]), GigpoOptions(std=False, all_rows=False, compat_verl=True))
    assert verl.episode_R - clean.episode_R == pytest.approx(np.array([-0.2, *[0.1] * 7]) / 3)


def test_tied_attempts_with_a_penalty_do_not_blow_up():
    """Equal rewards leave a deviation of 0; the penalty counts in reward units, not over epsilon."""
    batch = batch_of([[[("a", 1.0)], [("a", 1.0)]]], penalised=[0])
    parts, _ = gigpo(batch, GigpoOptions(all_rows=False))
    assert parts.episode_R == pytest.approx([-0.1, 0.0])
    assert parts.episode_N.tolist() == [0.0, 0.0]


def test_a_group_of_one():
    """Our 0 and verl's raw score (sheet 2.2 item 2, 2.3)."""
    for all_rows in (True, False):
        one = batch_of([[[("a", 4.0)]]])
        assert gigpo(one, GigpoOptions(std=False, all_rows=all_rows))[0].episode_R.tolist() == [0.0]
        verl = gigpo(one, GigpoOptions(std=False, all_rows=all_rows, compat_verl=True))[0]
        assert verl.episode_R.tolist() == [4.0]
        assert verl.episode_N.tolist() == [4.0]
    # One attempt of two steps, one of them penalised, is still alone.
    two = batch_of([[[("a", 4.0), ("b", 0.0)]]], penalised=[0])
    assert gigpo(two, GigpoOptions())[0].episode_R.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("all_rows", [True, False])
def test_attempts_without_steps_count_as_attempts(all_rows):
    batch = StepBatch(
        np.array([0, 0, 1]), np.array([1.0, 0.0, 3.0]), np.array([2, 0, 0]), np.array([0.0, 1.0]), np.ones(2, bool),
        np.array([0, 1]), np.full(2, np.nan),
    )  # fmt: skip
    parts, advantages = gigpo(batch, GigpoOptions(std=False, all_rows=all_rows))
    assert np.isfinite(advantages).all()
    assert len(advantages) == 2
    assert parts.episode_N.tolist() == ([0.0, 0.0, 0.0] if all_rows else [0.5, -0.5, 0.0])


def test_an_empty_batch():
    floats, ints = np.empty(0), np.empty(0, np.int64)
    batch = StepBatch(ints, floats, ints, floats, np.empty(0, bool), ints, floats)
    parts, advantages = gigpo(batch)
    assert len(advantages) == len(parts.episode_N) == 0


@given(
    st.lists(st.lists(st.floats(-10, 10), min_size=0, max_size=70), min_size=1, max_size=8), st.floats(0, 1)
)
def test_returns_are_those_of_the_recursion(rewards, discount):
    trajectory_R = np.repeat(np.arange(len(rewards)), [len(r) for r in rewards])
    flat = np.array([r for attempt in rewards for r in attempt], float)
    expected = []
    for attempt in rewards:
        later, returns = 0.0, []
        for reward in reversed(attempt):
            later = reward + discount * later
            returns.append(later)
        expected += reversed(returns)
    assert discounted_returns(flat, trajectory_R, discount) == pytest.approx(np.array(expected), abs=1e-9)


def test_equal_futures_give_equal_returns_to_the_last_bit():
    draw = random.Random(1)
    future = [draw.random() for _ in range(37)]
    attempts = [[*(draw.random() for _ in range(n)), *future] for n in (0, 1, 5, 30)]
    trajectory_R = np.repeat(np.arange(4), [len(a) for a in attempts])
    returns = discounted_returns(np.concatenate(attempts), trajectory_R, 0.95)
    ends = np.cumsum([len(a) for a in attempts])
    tails = [returns[end - 37 : end].tolist() for end in ends]
    assert tails[0] == tails[1] == tails[2] == tails[3]


attempt_lists = st.lists(
    st.lists(
        st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from([0.0, 0.3, 1.0, 10.0])), min_size=1, max_size=6),
        min_size=1, max_size=5,
    ),
    min_size=1, max_size=4,
)  # fmt: skip


@settings(deadline=None)
@given(attempt_lists, st.booleans())
def test_parts_sum_to_zero_where_they_are_centred(groups, std):
    """Over attempts with trajectory statistics, over rows with row statistics, over each anchor."""
    batch = batch_of(groups)
    for all_rows in (True, False):
        parts, _ = gigpo(batch, GigpoOptions(std=std, all_rows=all_rows))
        labels, values = (batch.group_N[batch.trajectory_R], parts.episode_R) if all_rows else (
            batch.group_N, parts.episode_N
        )  # fmt: skip
        assert np.bincount(labels, values) == pytest.approx(0, abs=1e-9)
        assert np.bincount(batch.anchor_R, parts.step_R) == pytest.approx(0, abs=1e-9)


@settings(deadline=None)
@given(attempt_lists, st.booleans(), st.booleans(), st.randoms())
def test_a_batch_of_groups_is_its_groups_one_by_one(groups, std, all_rows, draw):
    """No number depends on which groups share a batch, or on where a group stands in it."""
    options = GigpoOptions(std=std, all_rows=all_rows)
    whole = gigpo(batch_of(groups), options)[1].tolist()
    parts = [gigpo(batch_of([group]), options)[1].tolist() for group in groups]
    assert whole == list(chain(*parts))
    order = list(range(len(groups)))
    draw.shuffle(order)
    assert gigpo(batch_of([groups[i] for i in order]), options)[1].tolist() == list(chain(*(parts[i] for i in order)))


@settings(deadline=None)
@given(attempt_lists, st.randoms())
def test_the_order_of_attempts_in_a_group_does_not_matter(groups, draw):
    group = groups[0]
    order = list(range(len(group)))
    draw.shuffle(order)
    found = np.split(gigpo(batch_of([group]))[1], np.cumsum([len(a) for a in group])[:-1])
    shuffled = gigpo(batch_of([[group[i] for i in order]]))[1]
    assert shuffled == pytest.approx(np.concatenate([found[i] for i in order]), abs=1e-9)


def test_similar_observations_share_an_anchor():
    """Greedy against each cluster's first member; equal texts, another group, and the order of arrival."""
    base = "You are in the kitchen. There is a fridge, a sink and a table. The fridge is closed."
    near, far = base.replace("closed", "open"), "You see a locked door. Nothing else is here."
    assert difflib.SequenceMatcher(None, near, base).ratio() >= 0.9 > difflib.SequenceMatcher(None, far, base).ratio()
    texts = [base, far, near, base, near, base]
    labels = similar_labels(np.array([0, 0, 0, 0, 0, 1]), texts, 0.9)
    assert labels.tolist() == [0, 1, 0, 0, 0, 5]
    assert similar_labels(np.zeros(6, int), texts, 1.0).tolist() == anchor_labels(np.zeros(6, int), texts).tolist()


@given(st.lists(st.text("ab ", max_size=12), max_size=14), st.sampled_from([0.5, 0.8, 0.95]))
def test_similarity_shortcuts_change_no_outcome(texts, threshold):
    labels = similar_labels(np.zeros(len(texts), int), texts, threshold)
    clusters, expected = [], []
    for i, text in enumerate(texts):
        for founder, label in clusters:
            if difflib.SequenceMatcher(None, text, founder).ratio() >= threshold:
                expected.append(label)
                break
        else:
            clusters.append((text, i))
            expected.append(i)
    assert labels.tolist() == expected


def test_the_benchmark_s_references_agree():
    """The plain-Python readings that the benchmark measures against give the same numbers."""
    path = Path(__file__).parents[2] / "bench" / "bench_advantage.py"
    spec = spec_from_file_location("bench_advantage", path)
    bench = module_from_spec(spec)
    spec.loader.exec_module(bench)
    rows = bench.make_steps(groups=4, attempts=5, steps=6, seed=3)
    plain, naive = bench.plain_gigpo(rows), bench.naive_gigpo(rows, 30)
    groups = [[[(r[2], r[3]) for r in rows if r[:2] == (g, g * 5 + a)] for a in range(5)] for g in range(4)]
    _, ours = gigpo(batch_of(groups), GigpoOptions())
    assert ours == pytest.approx(np.array(plain), abs=1e-9)
    assert ours == pytest.approx(np.array(naive), abs=1e-9)
