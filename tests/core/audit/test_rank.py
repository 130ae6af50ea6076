"""Rank agreement against scipy's, with ties; the bootstrap over items; the file of --compare."""

import math

import pytest

np = pytest.importorskip("numpy")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from strop.core.audit.rank import fidelity, kendall, read_correctness, spearman  # noqa: E402
from strop.core.errors import DataError, InputMissing  # noqa: E402

COLUMNS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=15)


@given(COLUMNS)
def test_both_correlations_are_scipys(columns):
    stats = pytest.importorskip("scipy.stats")
    first, second = np.array(columns, dtype=float).T
    if len(set(first)) == 1 or len(set(second)) == 1:
        assert math.isnan(spearman(first, second))
        assert math.isnan(kendall(first, second))
        return
    assert spearman(first, second) == pytest.approx(stats.spearmanr(first, second).statistic, abs=1e-12)
    assert kendall(first, second) == pytest.approx(stats.kendalltau(first, second).statistic, abs=1e-12)


def panel(num_models=6, num_items=200):
    """Models of rising ability at items that each one answers or not."""
    random = np.random.default_rng(0)
    return (random.random((num_models, num_items)) < np.linspace(0.3, 0.8, num_models)[:, None]).astype(float)


def test_everything_kept_agrees_wholly():
    found = fidelity(panel(), np.arange(200))
    assert (found.spearman, found.spearman_low, found.kendall, found.kendall_high) == (1, 1, 1, 1)
    assert found.num_models == 6


def test_a_part_is_compared_with_the_whole():
    correct, kept = panel(), np.arange(0, 200, 9)
    found = fidelity(correct, kept)
    whole, part = correct.mean(axis=1), correct[:, kept].mean(axis=1)
    assert found.spearman == spearman(whole, part)
    assert found.kendall == kendall(whole, part)
    assert -1 <= found.spearman_low < found.spearman <= found.spearman_high <= 1
    assert found.kendall_low < found.kendall_high
    assert fidelity(correct, kept) == found


@pytest.mark.filterwarnings("error")
def test_models_alike_have_no_ranks():
    found = fidelity(np.tile([1.0, 0.0], (3, 10)), np.arange(5))
    assert math.isnan(found.spearman)
    assert math.isnan(found.kendall_low)


def test_two_models_are_too_few():
    with pytest.raises(ValueError, match="2 models"):
        fidelity(panel(2), np.arange(5))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'{"model":"a","correct":[1,0,1]}\n' * 2, "2 models; ranks need at least three"),
        (b'{"model":"a","correct":[1,0]}\n', "f.jsonl:1: correct: 2 values for 3 pairs"),
        (b'{"model":"a","correct":[1,0,2]}\n', "f.jsonl:1: correct: a value outside of 0 to 1"),
        (b'\n{"model":"a"}\n', "f.jsonl:2: Object missing required field `correct`"),
        (b'{"model":"a\xff","correct":[1,0,1]}\n', "f.jsonl:1: "),
        (b"{\n", "f.jsonl:1: "),
    ],
)
def test_a_bad_file_of_correctness_names_the_place(tmp_path, text, says):
    path = tmp_path / "f.jsonl"
    path.write_bytes(text)
    with pytest.raises(DataError) as caught:
        read_correctness(path, 3)
    assert says in str(caught.value)


def test_a_missing_file_of_correctness(tmp_path):
    with pytest.raises(InputMissing):
        read_correctness(tmp_path / "nowhere", 3)
    path = tmp_path / "f.jsonl"
    path.write_bytes(b'{"model":"a","correct":[1,0,0.5]}\n\n' * 3)
    assert read_correctness(path, 3).tolist() == [[1, 0, 0.5]] * 3
