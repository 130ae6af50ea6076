"""Decides tasks under one rule, and counts what was decided for the run's summary."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

import msgspec

from strop.core.tasks.adaptive import Plan, check_prior
from strop.core.tasks.calibration import ACCEPT, VERDICTS, Rule, Tally, calibration_fields

# The prior is doubted below this p-value, and not judged at all from so few tasks that the test's tables do not hold.
DOUBTED_P_VALUE = 1e-3
LEAST_TASKS_CHECKED = 20


@dataclass(slots=True)
class Verdicts:
    """The verdicts of one run.

    `plan` is set for adaptive attempts; with `replay` the attempts were made without it, and the plan says which of
    them it would have made. `outcomes` holds all attempts that count, task by task.
    """

    rule: Rule
    plan: Plan | None = None
    replay: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    outcomes: list[bytes] = field(default_factory=list)
    policies: set[bytes] = field(default_factory=set)
    used: int = 0
    errors: int = 0
    stale: int = 0
    num_unsettled: int = 0
    num_changed: int = 0
    num_unreachable: int = 0
    caps: set[int] = field(default_factory=set)
    num_mixed_caps: int = 0

    def decide(self, tally: Tally, policies: Set[bytes] = frozenset()) -> dict[str, Any]:
        """The `calibration` field for a task with these attempts of these policies (JSON); the only one is named.

        Under a plan `confidence` says how probable it is, given the prior, that the verdict is right, and `settled`
        whether no more attempts were wanted. In a replay only the attempts count that the plan would have made, and
        `unused` says how many were left.
        """
        used, more = tally, {}
        if self.plan is not None:
            if self.replay:
                used = self.plan.replay(tally)
            settled = self.plan.settled(used.successes, used.attempts)
            confidence = self.plan.confidence(used.successes, used.attempts) if used.attempts else None
            more = {"confidence": confidence, "settled": settled, "prior": self.plan.prior.name}
            if self.replay:
                more["unused"] = tally.attempts - used.attempts
            self.num_unsettled += used.attempts > 0 and not settled
        fields = calibration_fields(used, self.rule) | more
        if len(policies) == 1:
            fields["policy"] = msgspec.Raw(next(iter(policies)))
        self._count(tally, used, fields, policies)
        return fields

    def _count(self, tally: Tally, used: Tally, fields: dict[str, Any], policies: Set[bytes]) -> None:
        verdict = fields["verdict"]
        self.counts[verdict] = self.counts.get(verdict, 0) + 1
        self.outcomes.append(bytes(tally.outcomes))
        self.policies |= policies
        self.used += used.attempts
        self.caps |= tally.caps
        self.num_mixed_caps += len(tally.caps) > 1
        self.errors += tally.errors
        self.stale += tally.stale
        self.num_changed += verdict != self.rule.verdict(tally.successes, tally.attempts)
        # A plan stops where it pleases, also after fewer attempts than an accepted rate takes.
        self.num_unreachable += self.plan is None and used.attempts > 0 and fields["admits"] is None

    @property
    def num_tasks(self) -> int:
        """Tasks decided."""
        return len(self.outcomes)

    @property
    def num_accepted(self) -> int:
        """Tasks accepted."""
        return self.counts.get(ACCEPT, 0)

    @property
    def num_attempts(self) -> int:
        """Attempts that count, those that a replay left unused among them."""
        return sum(map(len, self.outcomes))

    def summary(self) -> str:
        """What was decided, in a line."""
        verdicts = ", ".join(f"{self.counts.get(name, 0)} {name}" for name in VERDICTS)
        parts = [f"{self.num_tasks} tasks: {verdicts}; {self.num_attempts} attempts"]
        if self.errors:
            parts.append(f"{self.errors} failed by the machinery and not counted")
        if self.stale:
            parts.append(f"{self.stale} at another version of the statement and not counted")
        return ", ".join(parts)

    def policy_name(self) -> str | None:
        """The model that made the attempts, where it was one."""
        if len(self.policies) != 1:
            return None
        policy = msgspec.json.decode(next(iter(self.policies)))
        return policy.get("model") if isinstance(policy, dict) else None

    def warnings(self) -> list[str]:
        """What a reader of the verdicts should know."""
        found = []
        if len(self.policies) > 1:
            found.append(f"attempts of {len(self.policies)} policies are counted together")
        if len(self.caps) > 1:
            found.append(
                f"the attempts ran under caps from {min(self.caps)} to {max(self.caps)} turns ({self.num_mixed_caps} "
                "tasks hold several), and a pass rate is one of its cap"
            )
        if self.num_unreachable:
            found.append(
                f"no pass rate that {self.num_unreachable} tasks could show with their attempts is admitted by "
                f"{self.rule.name}; another number of attempts or a wider band is needed"
            )
        if self.plan is not None:
            found.extend(self._doubts(self.plan))
        return found

    def _doubts(self, plan: Plan) -> list[str]:
        # A plan that stops at some tasks after one attempt would choose which have a second.
        size = 1 if not self.replay and plan.round_size == 1 and any(plan.stops[1]) else 2
        check = check_prior(plan.prior, self.outcomes, size)
        if sum(check.seen) < LEAST_TASKS_CHECKED or check.p_value >= DOUBTED_P_VALUE:
            return []
        seen = "/".join(map(str, check.seen))
        expected = "/".join(f"{count:.0f}" for count in check.expected)
        first = "of two first attempts 0/1/2 succeeded" if size == 2 else "the first attempt failed/succeeded"
        return [
            f"{first} at {seen} tasks, where the prior {plan.prior.name} expects "
            f"{expected} (p = {check.p_value:.1g}): these tasks are of another kind, and what the plan promises does "
            "not hold; --prior FILE fits it to an earlier run"
        ]
