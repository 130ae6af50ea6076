"""Negative Self-Distillation (arXiv:2609.11699): which tokens a deliberately bad self-teacher likes better.

Two passes of one frozen model over the same response, under the plain and under the negative prompt, give two
log-probabilities (nats) of each sampled token; the gate opens where the negative one is higher. What `train --loss nsd`
makes of the gate is in kernels/token_losses.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from strop.core.distill.token_classes import STYLE, TASK, count_reflections

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
    """What the gates of some rollouts were; `neutral` of them had no condition to speak of."""

    rollouts: int = 0
    neutral: int = 0
    condition_characters: int = 0
    reflections: int = 0
    tokens: int = 0
    open: int = 0
    total: float = 0.0
    highest: float = 0.0
    by_class: dict[str, list[float]] = field(default_factory=dict)

    def add(
        self, gate: Sequence[float], classes: Sequence[str], *, condition: str, is_neutral: bool, text: str
    ) -> None:
        """Counts a rollout: the gate and the class of each token, its condition, and the response's text."""
        self.rollouts += 1
        self.neutral += is_neutral
        self.condition_characters += len(condition)
        self.reflections += count_reflections(text)
        self.tokens += len(gate)
        self.open += sum(value > 0 for value in gate)
        self.total += math.fsum(gate)
        self.highest = max([self.highest, *gate])
        for value, name in zip(gate, classes, strict=True):
            sums = self.by_class.setdefault(name, [0.0, 0.0])
            sums[0] += value
            sums[1] += 1

    @property
    def mean(self) -> float | None:
        """The mean gate; None without tokens."""
        return self.total / self.tokens if self.tokens else None

    @property
    def style_task_ratio(self) -> float | None:
        """Mean gate on style tokens over that on task tokens (NSD, Appendix E; lower is better); None if undefined."""
        means = {name: total / number for name, (total, number) in self.by_class.items()}
        return means[STYLE] / means[TASK] if STYLE in means and means.get(TASK) else None

    def metrics(self) -> dict[str, float | int | None]:
        """The figures by name; shares and means of nothing are None."""

        def per_rollout(number: int) -> float | None:
            return number / self.rollouts if self.rollouts else None

        return {
            "distilled_rollouts": self.rollouts, "distilled_tokens": self.tokens, "gate_mean": self.mean,
            "gate_open_share": self.open / self.tokens if self.tokens else None, "gate_max": self.highest,
            "condition_ok_share": per_rollout(self.rollouts - self.neutral),
            "condition_characters": per_rollout(self.condition_characters),
            "style_task_ratio": self.style_task_ratio, "reflections": per_rollout(self.reflections),
        }  # fmt: skip
