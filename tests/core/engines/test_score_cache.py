"""The cache of scores: nothing is scored twice, nothing of another model comes back, whatever kills the process."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.core.engines.open import EngineOptions
from strop.core.engines.protocol import ModelInfo
from strop.core.engines.score_cache import CachedScorer, ScoreCache, score_key
from strop.core.engines.scorers import BadSequence, ModelScorer, open_scorer
from strop.core.errors import DataError, OutputFailed
from strop.core.models.load import load_model, resolve_model
from strop.core.models.score import TokenSequence

# Puts rows until it is killed, one a transaction, and says how many: some are then in the log and some in the file.
WRITER = """
import sys
from pathlib import Path
from strop.core.engines.score_cache import ScoreCache
cache = ScoreCache(Path(sys.argv[1]))
number = 0
while True:
    cache.put([(number.to_bytes(16, "big"), [-float(number)] * 200)])
    number += 1
    print(number, flush=True)
"""


class Sums:
    """Scores that follow from the tokens, and a list of what was asked."""

    arithmetic = "sums"
    experts = None
    vocab_size = 100
    context_length = 50

    def __init__(self, revision="r", adapter=None, broken=None):
        self.info = ModelInfo("m", revision, adapter)
        self.calls, self.broken, self.closed = [], broken, False

    def score(self, sequences):
        self.calls.append([sequence.token_ids for sequence in sequences])
        for index, sequence in enumerate(sequences):
            if self.broken in sequence.token_ids:
                raise BadSequence(index, "the log-probability of the token at position 1 is nan")
        return [[-sum(one.token_ids[: p + 1]) / 7 for p in one.positions] for one in sequences]

    def close(self):
        self.closed = True


def whole(*ids):
    return TokenSequence(list(ids), [(1, len(ids))])


@pytest.fixture
def cache(tmp_path):
    with ScoreCache(tmp_path / "scores") as opened:
        yield opened


def test_what_is_known_is_not_asked_again(cache):
    inner = Sums()
    scorer = CachedScorer(inner, cache)
    first = scorer.score([whole(1, 2, 3), whole(4, 5)])
    assert first == [[-3 / 7, -6 / 7], [-9 / 7]]
    again = scorer.score([whole(4, 5), whole(6, 7), whole(1, 2, 3), TokenSequence([9], [])])
    assert again == [first[1], [-13 / 7], first[0], []]
    assert inner.calls == [[[1, 2, 3], [4, 5]], [[6, 7]]]
    assert (scorer.num_hits, scorer.num_misses) == (2, 3)
    scorer.close()
    assert inner.closed
    assert len(cache) == 3


def test_a_sequence_that_comes_twice_in_a_call_is_asked_once(cache):
    inner = Sums()
    scorer = CachedScorer(inner, cache)
    # What stands behind the last scored token is no part of the question.
    given = [whole(1, 2), whole(3, 4), whole(1, 2), TokenSequence([1, 2, 8, 8], [(1, 2)])]
    assert scorer.score(given) == [[-3 / 7], [-1.0], [-3 / 7], [-3 / 7]]
    assert inner.calls == [[[1, 2], [3, 4]]]
    assert (scorer.num_hits, scorer.num_misses) == (2, 2)


def test_whoever_changes_a_result_does_not_change_the_next(cache):
    scorer = CachedScorer(Sums(), cache)
    first, second = scorer.score([whole(1, 2), whole(1, 2)])
    first.append(1.0)
    assert second == scorer.score([whole(1, 2)])[0] == [-3 / 7]


def test_another_model_adapter_experts_precision_tokens_or_span_is_another_question(cache):
    def key(sequence=None, revision="r", adapter=None, experts=None, arithmetic="sums"):
        scorer = Sums(revision, adapter)
        scorer.experts, scorer.arithmetic = experts, arithmetic
        return score_key(scorer, sequence or whole(1, 2, 3))

    others = [
        key(), key(revision="s"), key(adapter="a@1"), key(adapter="a@2"), key(experts=1), key(experts=2),
        key(arithmetic="transformers bfloat16"), key(whole(1, 2, 4)), key(whole(1, 3, 2)),
        key(TokenSequence([1, 2, 3], [(1, 2)])), key(TokenSequence([1, 2, 3], [(2, 3)])),
    ]  # fmt: skip
    assert len(set(others)) == len(others)
    # The same adapter under another name, and the same positions in two spans, are the same.
    assert key(adapter="elsewhere/a@1") == key(adapter="a@1")
    assert key(TokenSequence([1, 2, 3, 9], [(1, 2), (2, 3), (3, 3)])) == key()


def test_the_model_is_asked_in_parts_and_each_is_kept(cache):
    inner = Sums(broken=99)
    scorer = CachedScorer(inner, cache, chunk_tokens=6)
    given = [whole(1, 2, 3), whole(4, 5, 6), whole(*range(10, 20)), whole(7, 8), whole(1, 99), whole(9, 9)]
    with pytest.raises(BadSequence, match="sequence 4: the log-probability") as caught:
        scorer.score(given)
    assert caught.value.index == 4
    assert [[len(ids) for ids in call] for call in inner.calls] == [[3, 3], [10], [2, 2, 2]]
    assert len(cache) == 3
    inner.broken = None
    assert len(scorer.score(given)) == 6
    assert inner.calls[3:] == [[[7, 8], [1, 99], [9, 9]]]


def test_bad_sequences_are_refused_before_anything_is_asked(cache):
    inner = Sums()
    with pytest.raises(BadSequence, match="sequence 1: token id 100"):
        CachedScorer(inner, cache).score([whole(1, 2), whole(1, 100)])
    assert (inner.calls, len(cache)) == ([], 0)


@given(st.lists(st.floats(max_value=0, allow_nan=False, allow_infinity=False)))
def test_numbers_come_back_bit_for_bit(tmp_path_factory, values):
    with ScoreCache(tmp_path_factory.mktemp("cache") / "scores") as cache:
        cache.put([(b"k", values)])
        assert repr(cache.get(b"k")) == repr(values)


def test_one_file_is_left_and_holds_what_was_put(tmp_path):
    file = tmp_path / "scores"
    for number in range(3):
        with ScoreCache(file) as cache:
            assert len(cache) == number
            cache.put([(bytes([number]), [-1.5])])
        assert list(tmp_path.iterdir()) == [file]


def killed_writer(file, rows):
    """A process that has said that it put at least `rows` rows, and is then killed; what it said last."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(file)], stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout:
            if int(line) >= rows:
                break
        os.kill(child.pid, signal.SIGKILL)
        return max(int(line), *(int(rest) for rest in child.stdout.read().splitlines() if rest), 0)


def test_a_kill_loses_nothing_that_was_kept(tmp_path):
    file = tmp_path / "scores"
    # More than SQLite's log of 1,000 pages, so that the kill may come while the log is taken into the file.
    for least in (3, 900, 2600):
        said = killed_writer(file, least)
        with ScoreCache(file) as cache:
            assert len(cache) >= said
            assert cache.get((said - 1).to_bytes(16, "big")) == [-float(said - 1)] * 200
        assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("cut", [1, 700, 5000])
def test_a_torn_tail_is_cut_and_the_run_goes_on(tmp_path, cut):
    file, log = tmp_path / "scores", tmp_path / "scores-wal"
    killed_writer(file, 40)
    before = log.stat().st_size
    os.truncate(log, before - cut)
    with ScoreCache(file) as cache:
        kept = len(cache)
        assert kept >= 30
        assert all(cache.get(i.to_bytes(16, "big")) == [-float(i)] * 200 for i in range(kept))
        cache.put([(b"next", [-1.0])])
    with ScoreCache(file) as cache:
        assert (len(cache), cache.get(b"next")) == (kept + 1, [-1.0])


def test_a_second_run_is_told(tmp_path):
    file = tmp_path / "scores"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(file)], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        started = time.monotonic()
        with pytest.raises(OutputFailed, match="scores: another run is using it"):
            ScoreCache(file)
        assert time.monotonic() - started < 5
        child.kill()
    with ScoreCache(file), pytest.raises(OutputFailed, match="another run is using it"):
        ScoreCache(file)
    with ScoreCache(file) as cache:
        assert len(cache) >= 1


def test_a_file_that_is_something_else_is_left_alone(tmp_path):
    text = tmp_path / "rollouts.jsonl"
    text.write_text('{"kind":"rollout"}\n' * 100)
    with pytest.raises(DataError, match=r"rollouts.jsonl: not a file of scores"):
        ScoreCache(text)
    assert text.read_text() == '{"kind":"rollout"}\n' * 100
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE scores (name TEXT)")
    database.close()
    content = other.read_bytes()
    with pytest.raises(DataError, match=r"other.db: a database, but none of scores"):
        ScoreCache(other)
    assert other.read_bytes() == content
    assert sorted(one.name for one in tmp_path.iterdir()) == ["other.db", "rollouts.jsonl"]
    with pytest.raises(OutputFailed, match="unable to open"):
        ScoreCache(tmp_path / "no such folder" / "scores")


def test_damage_is_named(tmp_path):
    file = tmp_path / "scores"
    scorer = Sums()
    rows = {"odd": (whole(1, 2), b"abc"), "no number": (whole(3, 4), b"\xff" * 8), "longer": (whole(5, 6), bytes(16))}
    with ScoreCache(file):
        pass
    database = sqlite3.connect(file)
    for sequence, data in rows.values():
        database.execute("INSERT INTO scores VALUES (?, ?)", (score_key(scorer, sequence), data))
    database.commit()
    database.close()
    with ScoreCache(file) as cache:
        for sequence, _ in rows.values():
            with pytest.raises(DataError, match=r"scores: damaged .*; move it away"):
                CachedScorer(scorer, cache).score([sequence])
    assert scorer.calls == []
    data = bytearray(file.read_bytes())
    data[4096:8192] = b"\x55" * 4096
    file.write_bytes(data)
    with ScoreCache(file) as cache, pytest.raises(DataError, match=r"scores: damaged .*; move it away"):
        cache.get(b"k")


def options_of(folder, **more):
    return EngineOptions(
        engine="transformers", model=str(folder), device="cpu", dtype="float32", offline=True, **more
    )


def test_a_resumed_run_loads_no_model_and_a_changed_one_is_asked_again(tiny_model, tmp_path, monkeypatch):
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    given = [whole(5, 9, 17, 3), whole(88, 41, 6)]
    with ScoreCache(tmp_path / "scores") as cache, CachedScorer(open_scorer(options_of(folder)), cache) as scorer:
        first = scorer.score(given)
        assert (scorer.num_hits, scorer.num_misses) == (0, 2)
    loads = []
    monkeypatch.setattr("strop.core.models.load.load_model", lambda *a, **k: loads.append(1) or load_model(*a, **k))
    with ScoreCache(tmp_path / "scores") as cache, CachedScorer(open_scorer(options_of(folder)), cache) as scorer:
        assert scorer.score(given) == first
        assert (scorer.num_hits, scorer.num_misses, loads) == (2, 0, [])
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + torch.ones(())
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with ScoreCache(tmp_path / "scores") as cache, CachedScorer(open_scorer(options_of(folder)), cache) as scorer:
        assert scorer.score(given) != first
        assert (scorer.num_hits, scorer.num_misses, loads) == (0, 2, [1])


def test_teacher_and_weaker_self_share_a_file(tiny_moe, cache):
    options = options_of(tiny_moe)
    given = [whole(5, 9, 17, 3), whole(88, 41, 6)]
    with open_scorer(options) as plain, open_scorer(options, experts=1, beside=plain) as weak:
        teacher, reference = CachedScorer(plain, cache), CachedScorer(weak, cache)
        scores = teacher.score(given), reference.score(given)
        assert scores[0] != scores[1]
        assert (teacher.score(given), reference.score(given)) == scores
    assert len(cache) == 4


def test_the_base_of_a_policy_in_memory_has_keys_of_its_own(tiny_model):
    model = load_model(resolve_model(str(tiny_model)), device="cpu", dtype="float32")
    scorer = ModelScorer(model, ModelInfo("m", "r", "a@1"), context_length=512)
    base = ModelScorer(model, replace(scorer.info, adapter=None), context_length=512)
    assert score_key(scorer, whole(1, 2)) != score_key(base, whole(1, 2))
