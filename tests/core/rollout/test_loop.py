"""The episode loop: order, back-pressure, errors, resume; driven by an engine whose timing the test controls."""

from __future__ import annotations

import json
import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.engines.protocol import Completion, ModelInfo
from strop.core.envs.answer import AnswerEpisode
from strop.core.errors import DataError, Where
from strop.core.records import Record, Sampling, Task
from strop.core.rollout.attempts import AttemptMaker, SamplingChoice
from strop.core.rollout.loop import RolloutLoop, Work
from strop.core.tasks.verifiers import Verdict


class ScriptedEngine:
    """Answers each request with tokens that depend on its seed alone, in an order and in portions of its own."""

    name = "scripted"
    info = ModelInfo("scripted", "r0")
    context_length = 100
    concurrency = 8

    def __init__(self, order: random.Random, failing=()):
        self.queue = []
        self.order = order
        self.failing = set(failing)
        self.most_pending = 0
        self.late = []

    def submit(self, request):
        self.queue.append(request)
        self.most_pending = max(self.most_pending, len(self.queue))

    def collect(self, patience_s=None):
        if self.late:
            late, self.late = self.late, []
            return late
        self.order.shuffle(self.queue)
        portion = [self.queue.pop() for _ in range(min(len(self.queue), self.order.randint(1, 3)))]
        return [self.answer(request) for request in portion]

    def answer(self, request):
        if request.row in self.failing:
            return Completion(request.key, error="engine lost")
        draw = random.Random(request.seed)
        return Completion(
            request.key, [draw.randrange(50) for _ in range(3)], [-draw.random() for _ in range(3)], "eos"
        )

    def cancel(self, key):
        self.cancelled = [*getattr(self, "cancelled", []), key]
        for request in [one for one in self.queue if one.key == key]:
            self.queue.remove(request)
            self.late.append(Completion(key, [1], [-0.5], "cancelled"))

    @property
    def pending(self):
        return len(self.queue)

    def logprobs_mode(self, sampling: Sampling) -> str:
        return "scaled"


class Letters:
    """A tokenizer of code points."""

    def encode_prompt(self, prompt):
        return [ord(c) for c in prompt]

    def decode(self, ids):
        return " ".join(map(str, ids))


def task(i, **fields):
    line = json.dumps({"kind": "task", "id": f"t{i}", "prompt": f"p{i}", "verifier": {"name": "exact"}, **fields})
    return Record.parse(line, Where("tasks", i + 1))


def work(records, n, done=()):
    for record in records:
        if record.kind != "task":
            yield Work(record)
        else:
            missing = tuple(i for i in range(n) if (record.get("id"), i) not in done)
            yield Work(record, record.view(Task), missing, n)


def judge(response, record, task_):
    return Verdict(reward=float(len(response)), success=True)


def run(items, *, order=0, concurrency=4, ordered=True, first=0, verify=judge, on_bad=None, engine=None):
    engine = engine or ScriptedEngine(random.Random(order))
    maker = AttemptMaker(engine, Letters(), seed=1, choice=SamplingChoice())

    def raising(error, record):
        raise error

    loop = RolloutLoop(
        engine, maker, verify, concurrency=concurrency, ordered=ordered, first=first, on_bad=on_bad or raising
    )
    return [given.record for given in loop.run(items)], maker.tally


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 9), st.integers(1, 20), st.integers(1, 5), st.integers(0, 6))
def test_bytes_depend_on_neither_timing_nor_concurrency(order, concurrency, n, tasks):
    stream = [r for i in range(tasks) for r in (task(i), Record.make("note", {"after": i}))]
    got, tally = run(work(stream, n), order=order, concurrency=concurrency)
    plain, _ = run(work(stream, n), order=0, concurrency=1)
    assert [r.encode() for r in got] == [r.encode() for r in plain]
    kinds = [r.kind for r in got]
    assert kinds == (["task"] + ["rollout"] * n + ["note"]) * tasks
    assert tally.rollouts == n * tasks
    ids = [r.get("id") for r in got if r.kind == "rollout"]
    assert len(set(ids)) == len(ids)


def test_unordered_gives_the_same_records():
    stream = [task(i) for i in range(6)]
    ordered, _ = run(work(stream, 3))
    unordered, _ = run(work(stream, 3), order=5, ordered=False)
    assert sorted(r.encode() for r in unordered) == sorted(r.encode() for r in ordered)


def test_samples_in_flight_and_waiting_are_bounded():
    engine = ScriptedEngine(random.Random(3))
    run(work([task(i) for i in range(50)], 2), engine=engine, concurrency=6)
    # A group is submitted whole, so at most one group more than asked.
    assert engine.most_pending <= 6 + 2


def test_missing_samples_of_a_resumed_run_are_the_same_records():
    whole, _ = run(work([task(0), task(1)], 4))
    rest, _ = run(work([task(0), task(1)], 4, done={("t0", 0), ("t0", 1), ("t1", 2)}))
    by_id = {r.get("id"): r.encode() for r in whole if r.kind == "rollout"}
    left = [r for r in rest if r.kind == "rollout"]
    assert len(left) == 5
    assert all(by_id[r.get("id")] == r.encode() for r in left)


def test_a_failed_engine_gives_an_error_and_no_reward():
    records, tally = run(work([task(0)], 3), engine=ScriptedEngine(random.Random(0), failing={1}))
    failed = [json.loads(r.encode()) for r in records if r.get("error")]
    assert [f["sample"] for f in failed] == [1]
    assert failed[0]["error"] == "engine lost"
    assert not {"reward", "success", "chunks"} & set(failed[0])
    assert (tally.errors, tally.scored) == (1, 2)


def test_a_failed_verifier_keeps_the_tokens_and_gives_no_reward():
    def lost(response, record, task_):
        return Verdict(reward=0.0, success=False, error="sandbox lost")

    records, _ = run(work([task(0)], 1), verify=lost)
    rollout = json.loads(records[1].encode())
    assert rollout["error"] == "sandbox lost"
    assert "reward" not in rollout
    assert "success" not in rollout
    assert rollout["chunks"][0]["sampled"] == [[2, 5]]


def test_a_log_probability_that_is_not_finite_is_an_error():
    class Broken(ScriptedEngine):
        def answer(self, request):
            return Completion(request.key, [1, 2], [-1.0, float("nan")], "eos")

    records, tally = run(work([task(0)], 1), engine=Broken(random.Random(0)))
    assert "not finite" in records[1].get("error")
    assert b"NaN" not in records[1].encode()
    assert tally.errors == 1


def test_an_input_error_comes_after_everything_before_it_is_finished():
    def broken():
        yield from work([task(0)], 2)
        raise DataError("broken line")

    engine = ScriptedEngine(random.Random(1))
    maker = AttemptMaker(engine, Letters(), seed=1, choice=SamplingChoice())
    loop = RolloutLoop(engine, maker, judge, concurrency=8, on_bad=lambda e, r: None)
    got = []
    with pytest.raises(DataError, match="broken line"):
        for given_ in loop.run(broken()):
            got.append(given_.record.kind)
    assert got == ["task", "rollout", "rollout"]


def test_so_does_that_of_a_task_which_cannot_be_attempted():
    def refuse(error, record):
        raise error

    engine = ScriptedEngine(random.Random(1))
    maker = AttemptMaker(engine, Letters(), seed=1, choice=SamplingChoice())
    loop = RolloutLoop(engine, maker, judge, concurrency=8, on_bad=refuse)
    got = []
    with pytest.raises(DataError, match="unknown env"):
        for given_ in loop.run(work([task(0), task(1, env="submarine"), task(2)], 2)):
            got.append(given_.record.kind)
    assert got == ["task", "rollout", "rollout"]


def test_a_task_that_cannot_be_attempted_is_named():
    with pytest.raises(DataError, match=r"tasks:1: env: unknown env 'submarine'"):
        run(work([task(0, env="submarine")], 1))
    with pytest.raises(DataError, match=r"tasks:1: prompt: missing"):
        run(work([task(0, prompt=None)], 1))
    bad = []
    records, _ = run(work([task(0, prompt=None), task(1)], 1), on_bad=lambda error, record: bad.append(record))
    assert len(bad) == 1
    assert [r.kind for r in records] == ["task", "rollout"]


def test_hints_of_a_task_hold_unless_the_user_says_otherwise():
    hinted = task(0, sampling={"stop": ["\n"], "max_tokens": 4, "temperature": 0.5}).view(Task)
    assert SamplingChoice().for_task(hinted) == Sampling(stop=["\n"], max_tokens=4, temperature=0.5)
    said = SamplingChoice(temperature=0.0, max_tokens=9, stop=())
    assert said.for_task(hinted) == Sampling(stop=[], max_tokens=9, temperature=0.0)


def test_a_slow_writer_upstream_does_not_hold_back_what_is_ready():
    gate = threading.Event()

    def slow():
        yield from work([task(0)], 1)
        gate.wait(10)
        yield from work([task(1)], 1)

    engine = ScriptedEngine(random.Random(0))
    maker = AttemptMaker(engine, Letters(), seed=1, choice=SamplingChoice())
    loop = RolloutLoop(engine, maker, judge, concurrency=8, on_bad=lambda e, r: None).run(slow())
    first = [next(loop).record.kind, next(loop).record.kind]
    gate.set()
    assert first == ["task", "rollout"]
    assert [g.record.kind for g in loop] == ["task", "rollout"]


def test_stopping_does_not_wait_for_a_verifier_that_hangs():
    """Ctrl-C in the loop's consumer: the verifier's own `close` comes after, so waiting here would never end."""
    begun, release = threading.Event(), threading.Event()

    def hang_from_the_second_on(response, record, task_):
        if begun.is_set():
            release.wait(30)
        begun.set()
        return Verdict(0.0, False)

    engine = ScriptedEngine(random.Random(0))
    maker = AttemptMaker(engine, Letters(), seed=1, choice=SamplingChoice())
    loop = RolloutLoop(
        engine, maker, hang_from_the_second_on, concurrency=4, ordered=False, on_bad=lambda error, record: None
    )
    started = time.monotonic()

    def consume():
        for given_ in loop.run(work([task(0)], 4)):
            if given_.made:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    assert time.monotonic() - started < 10
    release.set()


@pytest.mark.parametrize("order", range(5))
def test_the_rest_of_a_group_is_cancelled_once_enough_have_finished(order):
    class Slow(ScriptedEngine):
        def collect(self, patience_s=None):
            # Verdicts are there before the engine has all done.
            time.sleep(0.01)
            return super().collect()

    engine = Slow(random.Random(order), failing=[2])
    records, tally = run(work([task(i) for i in range(3)], 8), concurrency=8, first=3, order=order, engine=engine)
    groups = {}
    for record in records:
        if record.kind == "rollout":
            groups.setdefault(record.get("group"), []).append(record)
    assert [len(members) for members in groups.values()] == [8] * 3
    num_cancelled = 0
    for members in groups.values():
        cancelled = [one for one in members if one.get("stop") == "cancelled"]
        num_cancelled += len(cancelled)
        scored = [one for one in members if one.get("reward") is not None]
        # A failure of the machine is none of the three; one that finished meanwhile stays.
        assert len(scored) >= 3
        assert all("cancelled" in one.get("error") and one.get("reward") is None for one in cancelled)
    assert num_cancelled == tally.cancelled.number > 0
    assert tally.finished.number == tally.scored
    assert tally.cancelled.tokens == num_cancelled
    assert "1.0 turns and 1 tokens" in tally.cancelled.mean()
    # They are no failures of the machine.
    assert tally.errors <= 3


class Echo(AnswerEpisode):
    """Two turns, with something to do between them."""

    asked = 0

    def advance(self, completion):
        super().advance(completion)
        self.asked += 1
        return None if self.asked > 1 else "work"

    def act(self, work):
        return work

    def resume(self, results):
        return [*self.prompt_ids, 7]


def test_an_episode_goes_on_while_another_is_still_being_sampled():
    class OneAtATime(ScriptedEngine):
        """The long request ends only after the second turn of the other one was asked for."""

        turns, waited = 0, 0

        def submit(self, request):
            super().submit(request)
            if request.key.startswith("t0"):
                self.turns += 1
                seeds.append(request.seed)

        def collect(self, patience_s=None):
            ready = [one for one in self.queue if one.key.startswith("t0") or self.turns > 1]
            if not ready:
                assert patience_s is not None
                self.waited += 1
                assert self.waited < 200
                time.sleep(patience_s)
                return []
            self.queue.remove(ready[0])
            return [self.answer(ready[0])]

    class Rooms:
        def episode(self, record, task, seed, tokenizer, context):
            seeds.append(seed)
            return Echo(tokenizer.encode_prompt(task.prompt))

    seeds = []
    engine = OneAtATime(random.Random(0))
    maker = AttemptMaker(engine, Letters(), seed=1, choice=SamplingChoice(), rooms=Rooms())
    loop = RolloutLoop(engine, maker, judge, concurrency=4, on_bad=None)
    records = [given.record for given in loop.run(work([task(0, env="echo"), task(1)], 1))]
    assert [r.kind for r in records] == ["task", "rollout"] * 2
    assert engine.turns == 2
    # A turn that drew the numbers of the turn before would be no sample of its own.
    assert seeds[0] == seeds[1] != seeds[2]


class TwoTurns(Echo):
    """As Echo, and may be cancelled in between."""

    was_cancelled = False

    @property
    def stop(self):
        return "cancelled" if self.was_cancelled else super().stop

    def cancel(self):
        self.was_cancelled = True


def test_a_turn_that_ended_before_it_could_be_cancelled_is_the_last():
    """An engine that has answered has nothing to cancel; the next turn must not begin all the same."""

    class Late(ScriptedEngine):
        """Answers the first sample, and the other one once that is to be cancelled."""

        unwanted = ()

        def cancel(self, key):
            self.unwanted = (*self.unwanted, key)

        def collect(self, patience_s=None):
            ready = [one for one in self.queue if one.row == 0 or one.key in self.unwanted]
            if not ready:
                time.sleep(0.005)
                return []
            self.queue.remove(ready[0])
            return [self.answer(ready[0])]

    class Rooms:
        def __init__(self):
            self.made = []

        def episode(self, record, task, seed, tokenizer, context):
            kind = TwoTurns if self.made else AnswerEpisode
            self.made.append(kind(tokenizer.encode_prompt(task.prompt)))
            return self.made[-1]

    rooms = Rooms()
    engine = Late(random.Random(0))
    maker = AttemptMaker(engine, Letters(), seed=1, choice=SamplingChoice(), rooms=rooms)
    loop = RolloutLoop(engine, maker, judge, concurrency=4, first=1, on_bad=None)
    _, first, second = (given.record for given in loop.run(work([task(0, env="echo")], 2)))
    assert first.get("reward") is not None
    assert (second.get("stop"), second.get("reward")) == ("cancelled", None)
    assert rooms.made[1].asked == 1
