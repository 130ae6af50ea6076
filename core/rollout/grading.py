"""Another reward for rollouts as they stand: by their assertions, or shaped by length, without verifying again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Raw, Struct

from strop.core.records import Record, Span
from strop.core.tasks.reports import Assertion
from strop.core.tasks.rewards import Reward, RewardRule, recommended_scale, reward_of


class _Spans(Struct):
    sampled: list[Span] = []


class _Graded(Struct, kw_only=True):
    """What grading reads. `report_error` says why there are no assertions where there should be some."""

    id: str
    task: str
    success: bool | None = None
    reward: float | None = None
    error: str | None = None
    stop: str | None = None
    assertions: list[Assertion] | None = None
    report_error: str | None = None
    chunks: list[_Spans] = []
    steps: list[dict[str, Raw]] = []


@dataclass(slots=True)
class GradingTally:
    """What a run graded, for its summary."""

    graded: int = 0
    errors: int = 0
    zero: int = 0
    above_one: int = 0
    partial: int = 0
    total: float = 0.0
    causes: Counter[str] = field(default_factory=Counter)
    assertions_of_task: dict[str, int] = field(default_factory=dict)

    def add(self, task: str, success: bool, reward: Reward) -> None:
        """Counts one reward."""
        self.graded += 1
        self.total += reward.value
        self.zero += reward.value == 0
        self.above_one += reward.value > 1
        self.partial += reward.value > 0 and not success
        if reward.cause is not None:
            self.causes[reward.cause] += 1
        if reward.total is not None:
            self.assertions_of_task[task] = max(reward.total, self.assertions_of_task.get(task, 0))

    @property
    def recommended_scale(self) -> float | None:
        """The 90th percentile of assertions a task, over the tasks seen."""
        return recommended_scale(self.assertions_of_task.values())

    def lines(self, rule: RewardRule) -> list[str]:
        """The summary for people."""
        if not self.graded:
            return []
        share = {name: 100 * getattr(self, name) / self.graded for name in ("zero", "partial", "above_one")}
        lines = [
            f"reward {rule.kind} of {self.graded} rollouts: mean {self.total / self.graded:.4g}, {share['zero']:.0f} % "
            f"zero, {share['partial']:.0f} % for a part, {share['above_one']:.0f} % above 1"
        ]
        if self.causes:
            told = ", ".join(f"{number} {cause}" for cause, number in sorted(self.causes.items()))
            lines.append(f"no usable report, so the outcome is the reward: {told}")
        if rule.kind == "assertions" and (scale := self.recommended_scale) is not None:
            tasks = len(self.assertions_of_task)
            lines.append(f"90 % of {tasks} tasks have at most {scale:g} assertions (T1 chooses its scale so)")
        return lines


class Grader:
    """Sets the reward of rollouts by a rule. A rollout with `error` stays as it is, without a reward."""

    def __init__(self, rule: RewardRule) -> None:
        self.rule = rule
        self.tally = GradingTally()

    def grade(self, record: Record) -> None:
        """Sets `reward` and `grading`; takes credit off that was given for an earlier reward. Raises DataError."""
        rollout = record.view(_Graded)
        if rollout.error is not None:
            self.tally.errors += 1
            return
        if rollout.success is None:
            raise record.bad("missing; a reward is made of the outcome and the assertions", "success")
        tokens = sum(span.end - span.start for chunk in rollout.chunks for span in chunk.sampled)
        reward = reward_of(
            self.rule, rollout.success, rollout.assertions, cause=rollout.report_error, tokens=tokens, stop=rollout.stop
        )
        self.tally.add(rollout.task, rollout.success, reward)
        told: dict[str, Any] = {"rule": self.rule.kind, "source": reward.source}
        told |= {name: value for name, value in (("cause", reward.cause), ("passed", reward.passed),
                                                 ("total", reward.total)) if value is not None}  # fmt: skip
        if self.rule.kind == "assertions":
            told["scale"] = self.rule.scale
        set_reward(record, reward.value, told, rollout.steps)


def set_reward(record: Record, reward: float, grading: dict[str, Any], steps: list[dict[str, Raw]]) -> None:
    """Sets `reward` and `grading` of a rollout with these steps; takes credit off that was for an earlier reward."""
    for name in ("advantage", "credit"):
        record.fields.pop(name, None)
    record.set(reward=reward, grading=grading)
    # In one turn the step's reward is the rollout's; over many turns rewards of steps are not a verifier's.
    if len(steps) == 1 and "reward" in steps[0]:
        record.set(steps=[{**steps[0], "reward": Raw(msgspec.json.encode(reward))}])
