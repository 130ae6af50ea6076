"""First fit decreasing: nothing lost, nothing over the budget, the same packs for the same lengths."""

from hypothesis import given
from hypothesis import strategies as st

from strop.core.models.packing import pack


@given(st.lists(st.integers(1, 60), max_size=60), st.integers(1, 100))
def test_every_sequence_is_in_one_pack_and_packs_keep_the_budget(lengths, budget):
    packs = pack(lengths, budget)
    assert sorted(index for one in packs for index in one) == list(range(len(lengths)))
    for one in packs:
        assert len(one) == 1 or sum(lengths[i] for i in one) <= budget
    assert packs == pack(list(lengths), budget)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_packs_are_few(lengths):
    # First fit decreasing needs at most 11/9 of the optimum and one more; the sum over the budget bounds it below.
    assert len(pack(lengths, 50)) <= 11 / 9 * -(-sum(lengths) // 50) * 1.5 + 1


def test_a_sequence_above_the_budget_stands_alone():
    assert pack([3, 500, 2], 10) == [[1], [0, 2]]


def test_budget_of_one_is_a_pack_each():
    assert pack([4, 4, 1], 1) == [[0], [1], [2]]
