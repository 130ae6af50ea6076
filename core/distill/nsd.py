"""Negative Self-Distillation (arXiv:2609.11699): which tokens a deliberately bad self-teacher likes better.

Two passes of one frozen model over the same response, under the plain and under the negative prompt, give two
log-probabilities (nats) of each sampled token; the gate opens where the negative one is higher. What `train --loss nsd`
makes of the gate is in kernels/token_losses.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from strop.core.distill.token_classes import STYLE, TASK

GATES = ("probability", "log", "none")


def gates(logp_ref: Sequence[float], logp_neg: Sequence[float], form: str = "probability") -> list[float]:
    """The gate G of each token, at least 0.

    "probability": max(0, p_neg - p_ref), at most 1 (NSD, Eq. 2). "log": max(0, log p_neg - log p_ref) [code].
    "none": 1 everywhere, the ablation without a gate.

    >>> [round(gate, 4) for gate in gates([math.log(0.2), math.log(0.95)], [math.log(0.5), math.log(0.94)])]
    [0.3, 0.0]
    """
    if form == "none":
        return [1.0] * len(logp_ref)
    if form == "log":
        return [max(0.0, neg - ref) for ref, neg in zip(logp_ref, logp_neg, strict=True)]
    # Rounding can put the log-probability of a certain token a little above 0.
    pairs = ((math.exp(min(ref, 0)), math.exp(min(neg, 0))) for ref, neg in zip(logp_ref, logp_neg, strict=True))
    return [max(0.0, p_neg - p_ref) for p_ref, p_neg in pairs]


@dataclass(slots=True)
class GateTally:
    """What the gates of a run were: `conditions` by form, those that failed, and sums over tokens by class."""

    rollouts: int = 0
    neutral: int = 0
    condition_characters: int = 0
    tokens: int = 0
    open: int = 0
    total: float = 0.0
    highest: float = 0.0
    by_class: dict[str, list[float]] = field(default_factory=dict)

    def add(self, gate: Sequence[float], classes: Sequence[str]) -> None:
        """Counts the tokens of a rollout, each with its class."""
        self.tokens += len(gate)
        self.open += sum(value > 0 for value in gate)
        self.total += math.fsum(gate)
        self.highest = max([self.highest, *gate])
        for value, name in zip(gate, classes, strict=True):
            sums = self.by_class.setdefault(name, [0.0, 0.0])
            sums[0] += value
            sums[1] += 1

    def mean_of(self, name: str) -> float | None:
        """The mean gate of the tokens of a class; None where there are none."""
        total, number = self.by_class.get(name, (0.0, 0.0))
        return total / number if number else None

    @property
    def style_task_ratio(self) -> float | None:
        """Mean gate on style tokens over that on task tokens (NSD, Appendix E; lower is better); None if undefined."""
        style, task = self.mean_of(STYLE), self.mean_of(TASK)
        return None if style is None or not task else style / task
