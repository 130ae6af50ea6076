"""Attempts made by a campaign: rounds, order, errors of the machine, bad tasks, resuming."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from strop.core.errors import DataError, Where
from strop.core.records import Record
from strop.core.seeds import derive_seed
from strop.core.tasks.adaptive import cheapest_plan, fixed_errors
from strop.core.tasks.calibration import band_rule
from strop.core.tasks.campaign import Campaign, Case, Earlier, FixedNumber, read_earlier
from strop.core.tasks.prior import TERMINAL

BAND = band_rule(0.2, 0.8)


class Coins:
    """Attempts that succeed with each task's own probability, drawn per task and sample; some fail by the machinery."""

    def __init__(self, error_share: float = 0.0, on_bad=None) -> None:
        self.error_share = error_share
        self.on_bad = on_bad
        self.num_made = 0
        self.rounds: list[list[tuple[str, range]]] = []

    def attempt(self, requests) -> Iterator[Record]:
        self.rounds.append([(task.id, samples) for _, task, samples in requests])
        for record, task, samples in requests:
            if task.prompt is None:
                self.on_bad(record.bad("missing", "prompt"), record)
                continue
            for sample in samples:
                self.num_made += 1
                yield self.rollout(task, sample)

    def rollout(self, task, sample) -> Record:
        draw = derive_seed(7, task.id, sample) / 2**53
        broken = derive_seed(8, task.id, sample) / 2**53 < self.error_share
        outcome = {"error": "lost"} if broken else {"success": draw < float(task.prompt)}
        fields = {"id": f"{task.id}/{sample}", "task": task.id, "statement_version": task.statement_version}
        return Record.make("rollout", {**fields, "sample": sample, "policy": {"model": "coin"}, **outcome})


def task(name: str, rate: float | None, **fields) -> Record:
    told = {} if rate is None else {"prompt": str(rate)}
    return Record.parse(json.dumps({"kind": "task", "id": name, **told, **fields}), Where("in.jsonl", 1))


def refuse(error: DataError, record: Record) -> None:
    raise error


def finish(maker, schedule, tasks, **options) -> list[Any]:
    options = {"window": 4, "on_bad": refuse, **options}
    return list(Campaign(maker, schedule, **options).run(tasks))


def samples_of(case: Case) -> list[int]:
    return [rollout.get("sample") for rollout in case.rollouts]


def adaptive(attempts: int = 8):
    return cheapest_plan(BAND, TERMINAL, errors=fixed_errors(BAND, TERMINAL, attempts), max_attempts=2 * attempts)


def test_a_fixed_number_is_one_round_and_errors_shrink_it():
    maker = Coins(error_share=0.3)
    cases = finish(maker, FixedNumber(6), [task(f"t{i}", 0.5) for i in range(9)])
    assert [case.task.id for case in cases] == [f"t{i}" for i in range(9)]
    assert all(samples_of(case) == list(range(6)) for case in cases)
    assert all(case.progress.tally.attempts + case.progress.tally.errors == 6 for case in cases)
    assert sum(case.progress.tally.errors for case in cases) > 0
    assert [len(requests) for requests in maker.rounds] == [4, 4, 1]


def test_a_plan_stops_each_task_by_itself_and_order_is_kept():
    plan = adaptive()
    maker = Coins()
    tasks = [task(f"t{i}", (0.0, 0.5, 1.0)[i % 3]) for i in range(12)]
    foreign = Record.parse('{"kind":"note"}', Where("in.jsonl", 1))
    out = finish(maker, plan, [*tasks[:6], foreign, *tasks[6:]])
    assert [item.task.id if isinstance(item, Case) else "note" for item in out] == [
        *(f"t{i}" for i in range(6)), "note", *(f"t{i}" for i in range(6, 12)),
    ]  # fmt: skip
    for case in (item for item in out if isinstance(item, Case)):
        tally = case.progress.tally
        assert samples_of(case) == list(range(case.progress.made))
        assert plan.stops[tally.attempts][tally.successes] or tally.attempts == plan.max_attempts
    hopeless = [case for case in out if isinstance(case, Case) and case.task.prompt == "0.0"]
    assert {case.progress.made for case in hopeless} == {3}


def test_what_is_made_does_not_depend_on_the_window():
    tasks = [(f"t{i}", i / 19) for i in range(20)]
    runs = [finish(Coins(0.1), adaptive(), [task(*item) for item in tasks], window=window) for window in (1, 3, 50)]
    texts = [[rollout.encode() for case in run for rollout in case.rollouts] for run in runs]
    assert texts[0] == texts[1] == texts[2]


def test_a_machine_that_always_fails_is_left_after_as_many_errors_as_attempts_allowed():
    (case,) = finish(Coins(error_share=1.1), adaptive(), [task("t", 0.5)])
    assert (case.progress.tally.attempts, case.progress.tally.errors) == (0, 16)


def test_bad_tasks_are_reported_and_do_not_hold_up_the_others():
    bad: list[str] = []

    def keep(error: DataError, record: Record) -> None:
        bad.append(error.message)

    maker = Coins(on_bad=keep)
    tasks = [task("a", 0.5), task("b", None), task("a", 0.5), task("c", 0.5), task("a", 0.5, statement_version=2)]
    out = finish(maker, FixedNumber(2), tasks, on_bad=keep)
    assert [(case.task.id, case.task.statement_version) for case in out] == [("a", 1), ("c", 1), ("a", 2)]
    assert bad == ["task 'a' came before in this input", "missing"]


def test_the_check_of_a_task_comes_before_its_attempts():
    def check(record: Record, task) -> None:
        if task.id == "b":
            raise record.bad("unknown verifier", "verifier.name")

    maker = Coins()
    with pytest.raises(DataError, match="unknown verifier"):
        finish(maker, FixedNumber(2), [task("a", 0.5), task("b", 0.5)], check=check)


def test_an_error_of_the_input_comes_after_all_that_was_begun():
    def source():
        yield task("a", 0.5)
        raise DataError("bad line")

    campaign = Campaign(Coins(), FixedNumber(3), window=4, on_bad=refuse)
    out = []
    with pytest.raises(DataError, match="bad line"):
        out.extend(iter_into(out, campaign.run(source())))
    assert [samples_of(case) for case in out] == [[0, 1, 2]]


def iter_into(out, items):
    for item in items:
        out.append(item)
    return ()


def test_an_interrupted_campaign_still_has_the_attempts_it_made():
    class Interrupted(Coins):
        def rollout(self, task, sample):
            if self.num_made > 10:
                raise KeyboardInterrupt
            return super().rollout(task, sample)

    campaign = Campaign(Interrupted(), adaptive(), window=4, on_bad=refuse)
    out = []
    with pytest.raises(KeyboardInterrupt):
        iter_into(out, campaign.run([task(f"t{i}", 0.5) for i in range(6)]))
    kept = [rollout.get("id") for case in [*out, *campaign.unfinished()] for rollout in case.rollouts]
    assert len(kept) == len(set(kept)) == 10


def test_a_resumed_campaign_makes_what_is_missing_and_nothing_twice(tmp_path):
    tasks = [task(f"t{i}", (0.0, 0.5, 0.9)[i % 3]) for i in range(7)]
    whole = finish(Coins(0.1), adaptive(), tasks)
    all_rollouts = [rollout.encode() for case in whole for rollout in case.rollouts]
    stamped = [json.dumps({**json.loads(line), "provenance": {"tool": "calibrate"}}) for line in all_rollouts]
    # Written: t0 whole, t1 without its last rollouts (killed between two lines), the first attempts of t2.
    lines: list[str] = []
    kept: set[bytes] = set()
    for index, case in enumerate(whole[:3]):
        rollouts = [rollout.encode() for rollout in case.rollouts]
        counts = {"attempts": case.progress.tally.attempts, "errors": case.progress.tally.errors}
        if index < 2:
            lines.append(json.dumps({"kind": "task", "id": case.task.id, "calibration": counts}))
        written = rollouts if index == 0 else rollouts[:-2] if index == 1 else rollouts[:1]
        kept.update(written)
        lines.extend(stamped[all_rollouts.index(line)] for line in written)
    # A rollout of another tool that only passed through is none of ours.
    lines.append(json.dumps({"kind": "rollout", "id": "x", "task": "t3", "sample": 0, "success": True}))
    path = tmp_path / "killed.jsonl"
    path.write_text("\n".join(lines) + "\n")

    resumed = finish(Coins(0.1), adaptive(), tasks, earlier=read_earlier(path))
    made = [rollout.encode() for case in resumed for rollout in case.rollouts]
    assert sorted([*made, *kept]) == sorted(all_rollouts)
    assert not set(made) & kept
    assert [case.was_written for case in resumed] == [True, True, False, False, False, False, False]
    for mine, theirs in zip(resumed, whole, strict=True):
        assert mine.progress.tally.successes == theirs.progress.tally.successes
        assert mine.progress.tally.attempts == theirs.progress.tally.attempts
    assert all(case.policies == {b'{"model":"coin"}'} for case in resumed)


def test_the_earlier_attempts_of_no_file_are_none(tmp_path):
    path = tmp_path / "new.jsonl"
    path.write_bytes(b"")
    assert read_earlier(path) == {}
    assert Earlier().num_made is None
