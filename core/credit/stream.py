"""Credit over a stream of rollouts: groups are collected, each gets its advantages when complete, and leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec import Raw

from strop.core.credit.groups import clear_credit
from strop.core.credit.grpo import group_advantages, share_without_signal, zero_variance
from strop.core.credit.views import CountedHead, Head, Trajectory, missing_reward
from strop.core.errors import DataError
from strop.core.groups import Group, GroupBuffer, Held
from strop.core.records import Metric, Record

# A group this small seldom varies, and its statistics rest on next to nothing.
SMALL_GROUP = 2


@dataclass(slots=True)
class Member:
    """What was read of a rollout. `reward` is None where the machine failed; `trajectory` is for step-level credit."""

    id: str
    reward: float | None
    success: bool | None = None
    num_steps: int = 1
    trajectory: Trajectory | None = None


@dataclass(slots=True)
class Tally:
    """What a run saw. Groups are those with at least one scored member; `sizes` counts them by scored members."""

    rollouts: int = 0
    errors: int = 0
    ungrouped: int = 0
    groups: int = 0
    equal_groups: int = 0
    dropped_groups: int = 0
    dropped_rollouts: int = 0
    incomplete: int = 0
    first_incomplete: str = ""
    reward_mismatches: int = 0
    steps: int = 0
    steps_without_nll: int = 0
    steps_with_optimum: int = 0
    sizes: Counter[int] = field(default_factory=Counter)
    scored: int = 0
    successes: int = 0
    told_success: int = 0
    rewards: Counter[float] = field(default_factory=Counter)

    @property
    def pass_rate(self) -> float | None:
        """Share of scored rollouts that succeeded; told by `success`, else by two-valued rewards, else not known."""
        if self.scored and self.told_success == self.scored:
            return self.successes / self.scored
        if len(self.rewards) == 2:
            return self.rewards[max(self.rewards)] / self.scored
        return None

    def add_scored(self, member: Member) -> None:
        """Counts a rollout with a reward."""
        assert member.reward is not None
        self.scored += 1
        self.told_success += member.success is not None
        self.successes += member.success is True
        # Two values make a pass rate; of more than that only the fact matters, and memory stays flat.
        if len(self.rewards) < 3 or member.reward in self.rewards:
            self.rewards[member.reward] += 1

    def metrics(self) -> list[Metric]:
        """What --diagnose reports of any estimator. Every count is in the input, dropped groups included."""
        share = self.equal_groups / self.groups if self.groups else None
        return [
            Metric(name="zero_variance_group_share", value=share, n=self.groups),
            Metric(name="scored_rollouts", value=self.scored, n=self.rollouts),
            Metric(name="failed_rollouts", value=self.errors, n=self.rollouts),
        ]

    def small_group_warnings(self) -> list[str]:
        """A line for each group size of one or two, with the share of such groups that carry no signal."""
        lines = []
        for size in range(1, SMALL_GROUP + 1):
            if not self.sizes[size]:
                continue
            line = f"{self.sizes[size]} of {self.groups} groups have {size} scored member{'s' * (size > 1)}: "
            if size == 1:
                line += "100 % of such groups carry no signal, there is nothing to compare with"
            elif self.pass_rate is None:
                line += "few of such groups carry a signal"
            else:
                share = share_without_signal(self.pass_rate, size)
                line += f"at the observed pass rate {self.pass_rate:.2f}, {100 * share:.0f} % of such groups "
                line += "carry no signal"
            lines.append(line + "; draw more samples a task (rollout -n)")
        return lines


class Estimator(Protocol):
    """One way of giving credit. `needs_all`: its control needs the whole input before the first advantage."""

    name: str
    needs_all: bool
    drops_equal: bool

    def read(self, record: Record, tally: Tally) -> tuple[Head, Member]:
        """The head, and what this estimator wants to know. Raises DataError."""
        ...

    def credit(self, groups: Sequence[Group[Member]], stamp: Raw, tally: Tally) -> None:
        """Sets the advantages of the scored members of these groups."""
        ...

    def metrics(self, tally: Tally) -> list[Metric]:
        """What --diagnose reports besides the tally."""
        ...


class GrpoEstimator:
    """One advantage a rollout (core/credit/grpo.py); needs neither steps nor tokens nor numpy."""

    name = "grpo"
    needs_all = False

    def __init__(
        self, *, std: bool, baseline: str, all_rows: bool, raw_single: bool = False, drops_equal: bool = True
    ) -> None:
        self._how: dict[str, Any] = {"std": std, "baseline": baseline, "raw_single": raw_single}
        self._view: type[Head] = CountedHead if all_rows else Head
        self._all_rows = all_rows
        self.drops_equal = drops_equal

    def read(self, record: Record, tally: Tally) -> tuple[Head, Member]:
        """Reads the reward, and the number of steps for all-row statistics (no steps count as one)."""
        head = record.view(self._view)
        if head.reward is None and head.error is None:
            raise missing_reward(record)
        num_steps = max(len(head.steps), 1) if isinstance(head, CountedHead) else 1
        return head, Member(head.id, None if head.error is not None else head.reward, head.success, num_steps)

    def credit(self, groups: Sequence[Group[Member]], stamp: Raw, tally: Tally) -> None:
        """Sets `advantage` of each scored member."""
        for group in groups:
            held = scored(group)
            rewards = [reward_of(one) for one in held]
            weights = [float(member_of(one).num_steps) for one in held] if self._all_rows else None
            for one, value in zip(held, group_advantages(rewards, weights=weights, **self._how), strict=True):
                clear_credit(one.record)
                one.record.set(advantage=value, credit=stamp)

    def metrics(self, tally: Tally) -> list[Metric]:
        """Nothing besides the tally."""
        return []


def scored(group: Group[Member]) -> list[Held[Member]]:
    """The members of a group that have a reward."""
    return [held for held in group.members if held.item is not None and held.item.reward is not None]


def member_of(held: Held[Member]) -> Member:
    """What was read of a held rollout."""
    assert held.item is not None
    return held.item


def reward_of(held: Held[Member]) -> float:
    """The reward of a scored member."""
    reward = member_of(held).reward
    assert reward is not None
    return reward


class CreditStream:
    """Runs an estimator over records.

    `run` yields what may leave: all records, in input order or as they are decided, the scored rollouts with
    `advantage` and `credit`. Rollouts with `error` pass without an advantage and count as members. `on_bad` gets a bad
    rollout (and raises, or sets it aside).
    """

    def __init__(
        self, estimator: Estimator, *, stamp: dict[str, Any], ordered: bool = True,
        on_bad: Callable[[DataError, Record], None],
    ) -> None:  # fmt: skip
        self.tally = Tally()
        self._estimator = estimator
        self._stamp = Raw(msgspec.json.encode(stamp))
        self._buffer: GroupBuffer[Member] = GroupBuffer(ordered=ordered)
        self._on_bad = on_bad
        self._complete: list[Group[Member]] = []

    def run(self, records: Iterable[Record]) -> Iterator[Record]:
        """The records, credited."""
        for record in records:
            if record.kind == "rollout":
                self._take(record)
            else:
                self._buffer.pass_on(record)
            yield from self._buffer.ready()
        rest = self._buffer.rest()
        for group in rest:
            if group.size is not None:
                self.tally.incomplete += 1
                self.tally.first_incomplete = (
                    self.tally.first_incomplete or f"{group.key}: {group.num_seen} of {group.size}"
                )
        waiting, self._complete = self._complete, []
        self._credit([*waiting, *rest])
        yield from self._buffer.ready()

    def lost_line(self, line: bytes) -> None:
        """A line that could not be read was set aside: if it tells its group, it still counts as a member there."""
        import json

        try:
            # The standard reader takes NaN, Infinity and lone surrogates, on which ours had to give up.
            fields = json.loads(line)
        except (ValueError, RecursionError):
            return
        if isinstance(fields, dict) and fields.get("kind") == "rollout":
            self._lost(fields)

    def _take(self, record: Record) -> None:
        try:
            head, member = self._estimator.read(record, self.tally)
        except DataError as error:
            self._on_bad(error, record)
            self._lost({name: _peek(record, name) for name in ("task", "group", "group_size", "statement_version")})
            return
        try:
            group = self._buffer.add(
                record, member, head.group_key, size=head.group_size, id=head.id, sample=head.sample,
                about=(head.task, head.statement_version or 1),
            )  # fmt: skip
        except DataError as error:
            # A second copy of a member is no member: the group goes on waiting for the true ones.
            self._on_bad(error, record)
            return
        self.tally.rollouts += 1
        self.tally.ungrouped += head.group is None
        if member.reward is None:
            self.tally.errors += 1
            clear_credit(record)
        else:
            self.tally.add_scored(member)
        if group is not None:
            self._completed(group)

    def _lost(self, fields: dict[str, Any]) -> None:
        key, task, size = fields.get("group"), fields.get("task"), fields.get("group_size")
        if key is None and isinstance(task, str):
            key = Head(id="", task=task, statement_version=fields.get("statement_version")).group_key
        if isinstance(key, str):
            group = self._buffer.lost(key, size if isinstance(size, int) and size > 0 else None)
            if group is not None:
                self._completed(group)

    def _completed(self, group: Group[Member]) -> None:
        if self._estimator.needs_all:
            self._complete.append(group)
        else:
            self._credit([group])

    def _credit(self, groups: list[Group[Member]]) -> None:
        given = []
        for group in groups:
            held = scored(group)
            if not held:
                continue
            self.tally.groups += 1
            self.tally.sizes[len(held)] += 1
            is_equal = zero_variance([reward_of(one) for one in held])
            self.tally.equal_groups += is_equal
            if is_equal and self._estimator.drops_equal:
                self.tally.dropped_groups += 1
                self.tally.dropped_rollouts += len(held)
                for one in held:
                    one.leaves = False
            else:
                given.append(group)
        if given:
            self._estimator.credit(given, self._stamp, self.tally)
        for group in groups:
            self._buffer.finish(group)


def _peek(record: Record, name: str) -> Any:
    """A field of a record that is bad somewhere, or None."""
    try:
        return record.get(name)
    except DataError:
        return None
