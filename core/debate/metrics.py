"""The measures of B6 [paper], with 95 % intervals.

    accuracy, binary_f1, macro_f1    on deployed labels (1 iff the raw label is 2)
    grey_f1                          raw 1 against the rest, before the collapse
    over_accept                      share of raw-1 examples that are predicted positive
    positive_miss                    share of raw-2 examples that are predicted negative
    structured_validity              share of traces with all sections and a verdict that can be read
    skill_grounding                  share of traces whose cited skills are valid and were retrieved
    conflict_resolution              of examples whose sides differ: share whose verdict agrees with the label

A trace without a verdict sends no request to the agent: it is wrong in accuracy, negative elsewhere [inferred].
Grounding counts traces that cite nothing as not grounded, like the reward. The paper measures conflict resolution
against "the capability evidence" on audited cases; here the label stands for it, a proxy. F1 of a class that neither
occurs nor is predicted is 0.

Intervals of shares are Wilson's; those of F1 are percentiles of a bootstrap over examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strop.core.debate.verdict import collapse
from strop.core.records import Label
from strop.core.seeds import derive_seed
from strop.core.tasks.calibration import wilson_interval

RESAMPLES = 2_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """One labelled example: its raw label, the raw verdict (None: none), and what the trace was worth."""

    gold: int
    verdict: int | None
    y_sem: float | None = None
    y_crit: float | None = None
    is_valid: bool = False
    is_grounded: bool = False


@dataclass(frozen=True, slots=True)
class Measure:
    """A measure over `n` examples; None where it has none to speak of."""

    name: str
    value: float | None
    low: float | None
    high: float | None
    n: int


def outcome_of(label: Label, gold: int, uncited: int = 0) -> Outcome:
    """The outcome in a label's trace."""
    trace = label.trace
    cited, retrieved = trace.get("cited") or [], {one["id"] for one in trace.get("retrieved", ())}
    grounded = set(cited) <= retrieved if cited else bool(uncited)
    return Outcome(
        gold, label.verdict, trace.get("y_sem"), trace.get("y_crit"), bool(trace.get("valid_sections")), grounded
    )


def f1(truth: Sequence[bool], found: Sequence[bool]) -> float:
    """2 TP / (2 TP + FP + FN); 0 where all three are 0.

    >>> round(f1([True, True, False], [True, False, True]), 12)
    0.5
    """
    both = sum(t and f for t, f in zip(truth, found, strict=True))
    either = sum(truth) + sum(found)
    return 2 * both / either if either else 0.0


def binary_f1(outcomes: Sequence[Outcome]) -> float:
    """F1 of the positive class after the collapse."""
    return f1([o.gold == 2 for o in outcomes], [o.verdict == 2 for o in outcomes])


def macro_f1(outcomes: Sequence[Outcome]) -> float:
    """The mean of the F1 of both classes after the collapse."""
    return (binary_f1(outcomes) + f1([o.gold != 2 for o in outcomes], [o.verdict != 2 for o in outcomes])) / 2


def grey_f1(outcomes: Sequence[Outcome]) -> float:
    """F1 of raw 1 against the rest, before the collapse."""
    return f1([o.gold == 1 for o in outcomes], [o.verdict == 1 for o in outcomes])


def measures(outcomes: Sequence[Outcome], seed: int = 0) -> list[Measure]:
    """All measures, in the order above."""
    grey = [o for o in outcomes if o.gold == 1]
    able = [o for o in outcomes if o.gold == 2]
    split = [o for o in outcomes if o.y_sem is not None and o.y_crit is not None and o.y_sem != o.y_crit]
    right = [o.verdict is not None and collapse(o.verdict) == collapse(o.gold) for o in outcomes]
    resolved = [o.verdict is not None and collapse(o.verdict) == collapse(o.gold) for o in split]
    return [
        _share("accuracy", right),
        _resampled("binary_f1", binary_f1, outcomes, seed),
        _resampled("macro_f1", macro_f1, outcomes, seed),
        _resampled("grey_f1", grey_f1, outcomes, seed),
        _share("over_accept", [o.verdict == 2 for o in grey]),
        _share("positive_miss", [o.verdict != 2 for o in able]),
        _share("structured_validity", [o.is_valid for o in outcomes]),
        _share("skill_grounding", [o.is_grounded for o in outcomes]),
        _share("conflict_resolution", resolved),
    ]


def _share(name: str, hits: Sequence[bool]) -> Measure:
    if not hits:
        return Measure(name, None, None, None, 0)
    low, high = wilson_interval(sum(hits), len(hits))
    return Measure(name, sum(hits) / len(hits), low, high, len(hits))


def _resampled(
    name: str, measure: Callable[[Sequence[Outcome]], float], outcomes: Sequence[Outcome], seed: int
) -> Measure:
    if not outcomes:
        return Measure(name, None, None, None, 0)
    value = measure(outcomes)
    if len(outcomes) < 2:
        return Measure(name, value, None, None, len(outcomes))
    import numpy as np

    generator = np.random.default_rng(derive_seed(seed, name))
    picks = generator.integers(0, len(outcomes), (RESAMPLES, len(outcomes)))
    drawn = [measure([outcomes[i] for i in row]) for row in picks.tolist()]
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Measure(name, value, float(low), float(high), len(outcomes))
