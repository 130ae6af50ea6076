"""Generalised advantage estimation: the recursion, T1's identity, VAPO's lambdas, explained variance."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.core.credit.gae import GaeOptions, adaptive_lambda, advantages_and_targets, gae
from strop.core.credit.tokens import GaeCredit
from strop.core.errors import DataError, Where
from strop.core.records import Record

NUMBERS = st.floats(-10, 10)
BATCHES = st.lists(st.tuples(st.lists(NUMBERS, min_size=1, max_size=40), NUMBERS), min_size=1, max_size=8)


def by_recursion(values, reward, discount, lambda_):
    """A_j = delta_j + gamma lambda A_{j+1}, backward, one token at a time."""
    found, after, next_value = [], 0.0, 0.0
    for j in reversed(range(len(values))):
        delta = (reward if j == len(values) - 1 else 0.0) + discount * next_value - values[j]
        after = delta + discount * lambda_ * after
        next_value = values[j]
        found.append(after)
    return found[::-1]


def estimate(batch, options):
    value_T = np.array([value for values, _ in batch for value in values])
    lengths = np.array([len(values) for values, _ in batch])
    return advantages_and_targets(value_T, np.array([reward for _, reward in batch]), lengths, options)


@given(BATCHES, st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_a_batch_is_the_recursion_of_each_trajectory(batch, discount, policy, critic):
    advantages, targets = estimate(batch, GaeOptions(discount, policy, critic))
    expected = [x for values, reward in batch for x in by_recursion(values, reward, discount, policy)]
    np.testing.assert_allclose(advantages, expected, rtol=0, atol=1e-9)
    expected = [v + x for values, reward in batch
                for v, x in zip(values, by_recursion(values, reward, discount, critic), strict=True)]  # fmt: skip
    np.testing.assert_allclose(targets, expected, rtol=0, atol=1e-9)


@given(BATCHES)
def test_without_discount_the_advantage_is_what_the_critic_did_not_expect(batch):
    """T1, section 2.3: A_j = R - V(s_j), the return constant over the trajectory."""
    advantages, targets = estimate(batch, GaeOptions())
    rewards = np.repeat([reward for _, reward in batch], [len(values) for values, _ in batch])
    values = np.array([value for values, _ in batch for value in values])
    np.testing.assert_allclose(targets, rewards, atol=1e-12)
    np.testing.assert_allclose(advantages, rewards - values, atol=1e-12)


@given(BATCHES)
def test_length_adaptive_lambda_is_that_of_each_trajectory(batch):
    advantages, _ = estimate(batch, GaeOptions(discount=0.97, length_scale=0.05))
    expected = [
        x
        for values, reward in batch
        for x in by_recursion(values, reward, 0.97, max(1 - 1 / (0.05 * len(values)), 0.0))
    ]
    np.testing.assert_allclose(advantages, expected, rtol=0, atol=1e-9)


def test_vapos_lambda_by_hand():
    assert adaptive_lambda(np.array([10, 20, 40, 200]), 0.05).tolist() == pytest.approx([0, 0, 0.5, 0.9])


def test_by_hand():
    """Values .5 .25, reward 1, gamma .9, lambda .8: delta = -.275, .75; A_0 = -.275 + .72 * .75."""
    values, rewards = np.array([0.5, 0.25]), np.array([0.0, 1.0])
    assert gae(values, rewards, np.array([0, 0]), 0.9, 0.8).tolist() == pytest.approx([0.265, 0.75])


def rollout(**more):
    fields = {
        "kind": "rollout", "id": "a", "task": "t", "reward": 2.0,
        "chunks": [
            {"token_ids": [1, 2, 3, 4], "sampled": [[1, 2], [3, 4]], "values": [0.5, 0.25], "logprobs": [-1, -2]},
            {"token_ids": [7], "sampled": []},
            {"token_ids": [8, 9], "sampled": [[0, 2]], "values": [1, 3]},
        ],
    }  # fmt: skip
    return Record.parse(json.dumps(fields | more), Where("-", 1))


def test_every_chunk_earns_the_whole_reward_with_its_last_token():
    record = rollout()
    GaeCredit(GaeOptions(), {"tool": "advantage"}).credit(record)
    written = json.loads(record.encode())
    assert [chunk.get("advantages") for chunk in written["chunks"]] == [[1.5, 1.75], None, [1.0, -1.0]]
    assert [chunk.get("returns") for chunk in written["chunks"]] == [[2.0, 2.0], None, [2.0, 2.0]]
    assert written["chunks"][0]["logprobs"] == [-1, -2]
    assert "advantage" not in written


def test_an_earlier_runs_credit_is_replaced():
    record = rollout(advantage=0.7, credit={"estimator": "grpo"})
    for _ in range(2):
        GaeCredit(GaeOptions(), {"estimator": "gae"}).credit(record)
    written = json.loads(record.encode())
    assert "advantage" not in written
    assert written["credit"] == {"estimator": "gae"}
    assert record.encode().count(b'"advantages"') == 2


def test_explained_variance_is_over_all_tokens():
    """1 - Var[R - V] / Var[R] of the union, which is no mean of the rollouts' own."""
    credit, values, rewards = GaeCredit(GaeOptions(), {}), [], []
    for number in range(6):
        chance = np.random.default_rng(number)
        length, reward = int(chance.integers(1, 9)), float(number % 3)
        some = (reward + chance.normal(0, 0.5, length)).round(3).tolist()
        chunk = {"token_ids": [5] * length, "sampled": [[0, length]], "values": some}
        credit.credit(rollout(id=str(number), reward=reward, chunks=[chunk]))
        values += some
        rewards += [reward] * length
    expected = 1 - np.var(np.array(rewards) - values) / np.var(rewards)
    assert credit.explained_variance == pytest.approx(expected, abs=1e-12)
    assert 0.3 < credit.explained_variance < 1


def test_a_failed_rollout_and_one_without_tokens():
    credit = GaeCredit(GaeOptions(), {})
    credit.credit(rollout(error="sandbox lost", reward=None))
    empty = rollout(chunks=[])
    before = empty.encode()
    credit.credit(empty)
    assert empty.encode() == before
    assert (credit.num_rollouts, credit.num_errors, credit.num_empty, credit.explained_variance) == (2, 1, 1, None)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"reward": None}, "reward"),
        ({"chunks": [{"token_ids": [1], "sampled": [[0, 1]]}]}, "chunks[0].values"),
        ({"chunks": [{"token_ids": [1], "sampled": [[0, 1]], "values": [1, 2]}]}, "chunks[0].values"),
        ({"chunks": [{"token_ids": [1], "sampled": [[0, 1]], "values": ["x"]}]}, "chunks[0].values[0]"),
    ],
)
def test_bad_records_name_the_field(fields, field):
    with pytest.raises(DataError) as caught:
        GaeCredit(GaeOptions(), {}).credit(rollout(**fields))
    assert caught.value.field == field
