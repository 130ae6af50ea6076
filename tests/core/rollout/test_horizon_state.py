"""The shared state of a horizon: what several runs make of it, what a kill leaves, and files that are none."""

import json
import multiprocessing
import os
import signal
import time

import pytest

from strop.core.errors import DataError, OutputFailed, UsageError
from strop.core.records import Record
from strop.core.rollout.horizon import Elastic, Planned, Rule
from strop.core.rollout.horizon_state import HorizonPlan, SharedHorizon, parse_plan

QUICK = Rule(min_successes=2)


def rollout(i, turns=12, success=True, **more):
    fields = {"id": f"r{i}", "task": "t", "turns": turns, "success": success, "reward": float(success), "horizon": 15}
    return Record.make("rollout", fields | more)


def test_a_step_of_every_n_rollouts(tmp_path):
    """15 with a 90th percentile of 12: elastic-horizon sheet, 3.5."""
    shared = SharedHorizon(tmp_path / "h", HorizonPlan(rule=Rule(), every=20))
    assert shared.applied == 15
    moved = [shared.count(rollout(i)) for i in range(20)]
    assert moved[:-1] == [None] * 19
    assert moved[-1]["before"] == 15
    assert moved[-1]["after"] == pytest.approx(15.7, abs=1e-12)
    assert shared.applied == 16
    assert shared.end() is None


def test_a_run_is_a_step(tmp_path):
    for run in range(3):
        shared = SharedHorizon(tmp_path / "h", HorizonPlan(rule=QUICK))
        before = shared.applied
        assert [shared.count(rollout(10 * run + i)) for i in range(4)] == [None] * 4
        # Nothing moves within the run.
        assert shared.applied == before
        assert shared.end()["step"] == run + 1
        assert shared.end() is None
    assert shared.applied == 17


def test_it_is_the_schedule_that_the_filter_follows(tmp_path):
    """Read and written at each rollout, it gives what Elastic gives in one go."""
    plan = HorizonPlan(rule=Rule(window=30, min_successes=5), every=7)
    plain, caps = Elastic(plan.rule), []
    for step in range(9):
        plain.step([5 + (3 * step + i) % 20 for i in range(7)])
        caps.append(plain.cap)
    found = []
    for step in range(9):
        for i in range(7):
            moved = SharedHorizon(tmp_path / "h", plan).count(rollout(7 * step + i, 5 + (3 * step + i) % 20))
            found += [] if moved is None else [moved["after"]]
    assert found == caps


def test_planned_schedules_keep_their_place(tmp_path):
    plan = parse_plan("tti", "steps=8,stages=2/4", 1)
    caps = []
    for i in range(8):
        shared = SharedHorizon(tmp_path / "h", plan)
        caps.append(shared.applied)
        shared.count(rollout(i))
    assert caps == [2, 2, 2, 2, 4, 4, 4, 4]
    assert isinstance(plan.schedule(), Planned)


def test_a_rollout_counts_once(tmp_path):
    shared = SharedHorizon(tmp_path / "h", HorizonPlan(rule=QUICK, every=3))
    for i in (0, 0, 1, 1, 0):
        assert shared.count(rollout(i)) is None
    assert shared.count(rollout(2))["rollouts"] == 3
    # Those of the step before are known, too: a run that is resumed makes them again.
    assert [shared.count(rollout(i)) for i in (0, 1, 2)] == [None] * 3
    assert json.loads((tmp_path / "h").read_text())["batch"]["rollouts"] == 0


def test_what_does_not_count(tmp_path):
    shared = SharedHorizon(tmp_path / "h", HorizonPlan(rule=QUICK))
    shared.count(Record.make("rollout", {"id": "one turn", "task": "t", "success": True, "turns": 1}))
    shared.count(rollout("lost", error="sandbox lost"))
    shared.count(rollout("failed", success=False))
    # A graded reward of 1 is no success unless all assertions passed.
    shared.count(rollout("part", success=False, reward=1.5))
    assert (shared.end()["errors"], shared.applied) == (1, 15)
    assert json.loads((tmp_path / "h").read_text())["lengths"] == []


def _count_many(path, plan, first, number):
    shared = SharedHorizon(path, plan)
    for i in range(number):
        shared.count(rollout(first + i))


def test_runs_side_by_side_lose_nothing(tmp_path):
    plan = HorizonPlan(rule=Rule(min_successes=1), every=10)
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=_count_many, args=(tmp_path / "h", plan, 1000 * w, 50)) for w in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    stored = json.loads((tmp_path / "h").read_text())
    assert (stored["num_steps"], stored["batch"]["rollouts"], len(stored["lengths"])) == (20, 0, 100)


def _count_forever(path, plan, first):
    shared = SharedHorizon(path, plan)
    for i in range(1_000_000):
        shared.count(rollout(f"{first}-{i}"))


def test_a_killed_run_leaves_a_whole_state(tmp_path):
    plan = HorizonPlan(rule=QUICK, every=3)
    fork = multiprocessing.get_context("fork")
    counted = 0
    for i in range(8):
        worker = fork.Process(target=_count_forever, args=(tmp_path / "h", plan, i))
        worker.start()
        time.sleep(0.1 + 0.013 * i)
        os.kill(worker.pid, signal.SIGKILL)
        worker.join(10)
        stored = json.loads((tmp_path / "h").read_text())
        now = 3 * stored["num_steps"] + stored["batch"]["rollouts"]
        assert now >= counted
        assert len(stored["ids"]) == stored["batch"]["rollouts"]
        counted = now
    assert counted > 0
    # The lock went with its holder.
    SharedHorizon(tmp_path / "h", plan).count(rollout("after"))
    assert json.loads((tmp_path / "h").read_text())["num_steps"] * 3 + len(stored["ids"]) >= counted


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', "\xff", '{"cap": 1e999}'])
def test_a_file_that_is_no_state(tmp_path, text):
    (tmp_path / "h").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"h:1: .*no state of a horizon"):
        SharedHorizon(tmp_path / "h", HorizonPlan())
    assert (tmp_path / "h").read_bytes() == text.encode("latin-1")


def test_the_state_of_another_run(tmp_path):
    SharedHorizon(tmp_path / "h", HorizonPlan())
    with pytest.raises(DataError, match=r"another run: rate 0\.1, not 0\.2, every 0, not 16"):
        SharedHorizon(tmp_path / "h", parse_plan("elastic", "rate=0.2", 16))


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputFailed):
        SharedHorizon(tmp_path / "file" / "h", HorizonPlan())


def test_plans_from_text():
    plan = parse_plan("elastic", "preset=code-bfcl,low=7", 4)
    assert (plan.rule.start, plan.rule.low, plan.rule.order, plan.every) == (50, 7, "average-first", 4)
    for text in ("rate", "rate=x", "speed=1", "preset=mine", "stages=1/x", "order=both", "stages=0/3"):
        with pytest.raises(UsageError, match="--horizon-set"):
            parse_plan("elastic", text, 0)
    with pytest.raises(UsageError, match="rate"):
        parse_plan("elastic", "rate=2", 0)
