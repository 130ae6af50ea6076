"""Step-level credit over a stream: GiGPO and GACA on the attempts of whole groups, written back step by step."""

# ruff: noqa: N815 (axis suffixes, as in arguments and variables)

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from msgspec import Raw

from strop.core.credit.diagnose import Diagnosis
from strop.core.credit.gaca import BATCH_CONTROLS, GacaOptions, Weights, gaca
from strop.core.credit.gigpo import GigpoOptions, credit_parts, gigpo_advantages
from strop.core.credit.groups import build_batch, write_steps
from strop.core.credit.stream import Member, Tally, member_of, scored
from strop.core.credit.views import Head, Needs, SteppedHead, Trajectory, missing_reward, read_trajectory
from strop.core.groups import Group, Held
from strop.core.records import Metric, Record

if TYPE_CHECKING:
    from strop.core.credit.gigpo import CreditParts, Floats, StepBatch

# Episode and step rewards count as telling the same if they agree this well; sums of decimals do not agree exactly.
REWARD_TOLERANCE = 1e-6


@dataclass(slots=True)
class _Result:
    """Credit of one batch."""

    batch: StepBatch
    parts: CreditParts
    advantage_R: Floats
    weights: Weights | None


class StepEstimator:
    """GiGPO, and GACA where `gaca_options` are given; needs `steps` with anchors or observations."""

    def __init__(
        self, gigpo_options: GigpoOptions, gaca_options: GacaOptions | None = None, *,
        similarity: float | None = None, nll_span: str = "step", drops_equal: bool = False, diagnose: bool = False,
    ) -> None:  # fmt: skip
        self.name = "gigpo" if gaca_options is None else "gaca"
        self.needs_all = gaca_options is not None and gaca_options.control in BATCH_CONTROLS
        self.drops_equal = drops_equal
        self._gigpo = gigpo_options
        self._gaca = gaca_options
        self._similarity = similarity
        self._needs = Needs(
            nll=gaca_options is not None or diagnose, texts=similarity is not None, num_tokens=diagnose,
            nll_span=nll_span,
        )  # fmt: skip
        self._diagnosis = Diagnosis() if diagnose else None

    def read(self, record: Record, tally: Tally) -> tuple[Head, Member]:
        """Reads the steps of a scored rollout. Those of a failed one do not matter."""
        head = record.view(SteppedHead if "error" not in record.fields else Head)
        if head.error is not None:
            return head, Member(head.id, None)
        if not isinstance(head, SteppedHead):
            # `error` is there, but null.
            head = record.view(SteppedHead)
        if head.reward is None:
            raise missing_reward(record)
        trajectory = read_trajectory(record, head, self._needs)
        total = math.fsum(trajectory.rewards)
        tally.reward_mismatches += bool(trajectory.rewards) and not math.isclose(
            total, head.reward, rel_tol=REWARD_TOLERANCE, abs_tol=REWARD_TOLERANCE
        )
        return head, Member(head.id, head.reward, head.success, len(trajectory.rewards), trajectory)

    def credit(self, groups: Sequence[Group[Member]], stamp: Raw, tally: Tally) -> None:
        """One pass of arrays over all the groups, then each step gets its numbers."""
        held = [one for group in groups for one in scored(group)]
        attempts = [_trajectory(one) for one in held]
        result = self._compute([[_trajectory(one) for one in scored(group)] for group in groups], held)
        tally.steps += len(result.advantage_R)
        tally.steps_without_nll += sum(map(math.isnan, chain.from_iterable(a.nll for a in attempts)))
        tally.steps_with_optimum += sum(not math.isnan(v) for v in chain.from_iterable(a.optimal for a in attempts))
        columns = self._columns(result)
        episode = result.parts.episode_N.tolist()
        start = 0
        for one, attempt, value in zip(held, attempts, episode, strict=True):
            stop = start + len(attempt.rewards)
            mine = {name: column[start:stop] for name, column in columns.items()}
            write_steps(one.record, {**self._computed(attempt), **mine}, replace=attempt.holds_outputs)
            one.record.set(advantage=value, credit=stamp)
            start = stop

    def _compute(self, groups: list[list[Trajectory]], held: list[Held[Member]]) -> _Result:
        import numpy as np

        batch = build_batch(groups, self._similarity)
        parts = credit_parts(batch, self._gigpo)
        weights = None
        if self._gaca is None:
            advantage_R = gigpo_advantages(parts, self._gigpo)
        else:
            weights, advantage_R = gaca(batch, parts, self._gaca, [member_of(one).id for one in held])
        if self._diagnosis is not None:
            attempts = [attempt for group in groups for attempt in group]
            tokens_R = np.fromiter(chain.from_iterable(attempt.num_tokens for attempt in attempts), float)
            self._diagnosis.add_parts(batch, parts, tokens_R)
            if self._gaca is not None and weights is not None:
                optimal_R = np.fromiter(chain.from_iterable(attempt.optimal for attempt in attempts), float)
                self._diagnosis.add_weights(batch, parts, weights, advantage_R, optimal_R, self._gaca)
        return _Result(batch, parts, advantage_R, weights)

    def _columns(self, result: _Result) -> dict[str, list[Any]]:
        parts = result.parts
        columns: dict[str, list[Any]] = {
            "return": (parts.return_R + 0.0).tolist(),
            "episode_advantage": parts.episode_R.tolist(),
            "step_advantage": parts.step_R.tolist(),
            "anchor_size": parts.anchor_size_R.tolist(),
        }
        if result.weights is not None:
            columns["nll_score"] = result.weights.score_R.tolist()
            columns["weight"] = result.weights.weight_R.tolist()
        columns["advantage"] = result.advantage_R.tolist()
        return columns

    def _computed(self, attempt: Trajectory) -> dict[str, list[Any]]:
        """Values that a step's record lacks and that were made here: its anchor, its nll."""
        made: dict[str, list[Any]] = {}
        if any(attempt.lacks_anchor):
            made["anchor"] = [
                anchor if lacks else None for anchor, lacks in zip(attempt.anchors, attempt.lacks_anchor, strict=True)
            ]
        if self._gaca is not None and any(attempt.lacks_nll):
            name = "action_nll" if self._needs.nll_span == "action" else "nll"
            made[name] = [
                None if math.isnan(nll) or not lacks else nll
                for nll, lacks in zip(attempt.nll, attempt.lacks_nll, strict=True)
            ]
        return made

    def metrics(self, tally: Tally) -> list[Metric]:
        """What --diagnose asks for."""
        if self._diagnosis is None:
            return []
        found = self._diagnosis.metrics(with_weights=self._gaca is not None)
        if self._gaca is not None:
            kappa = 0.0 if self._gaca.control == "fixed" else self._gaca.modulation
            found += self._diagnosis.alignment.metrics(kappa)
        return found


def _trajectory(held: Held[Member]) -> Trajectory:
    trajectory = member_of(held).trajectory
    assert trajectory is not None
    return trajectory
