"""The verifier `debate`: the reward R = R_cls + 0.1 R_sec + 0.1 R_skill of a router's trace (core/debate/reward.py).

It is in [0, 1.2], and an attempt succeeds if its verdict is right. The reference is the raw label 0, 1, 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from strop.core.debate.reward import COMPARISONS, trace_reward
from strop.core.debate.verdict import SECTIONS, VERDICTS, has_sections, read_citations, read_number
from strop.core.errors import DataError
from strop.core.tasks.verifiers.verdict import Options, PlainVerifier, Verdict, options_of

if TYPE_CHECKING:
    from strop.core.records import Record, Task


class DebateOptions(Options):
    """`retrieved`: ids of the skills that were shown; `valid`: all ids of the bank, where they are to be told apart."""

    retrieved: list[str] = msgspec.field(default_factory=list)
    valid: list[str] | None = None
    sections: list[str] = msgspec.field(default_factory=lambda: list(SECTIONS))
    compare: str = "binary"
    uncited: int = 0


class DebateVerifier(PlainVerifier):
    """Reads the response and computes the reward."""

    def check(self, task: Task) -> None:
        """Raises DataError where the options or the reference do not fit."""
        options = options_of(task, DebateOptions)
        if options.compare not in COMPARISONS:
            raise DataError(f"expected {' or '.join(COMPARISONS)}", field="verifier.compare")
        if options.uncited not in (0, 1):
            raise DataError("expected 0 or 1", field="verifier.uncited")
        unknown = [name for name in options.sections if name not in SECTIONS]
        if unknown:
            raise DataError(f"unknown section {unknown[0]!r}; known: {', '.join(SECTIONS)}", field="verifier.sections")
        if type(task.reference) is not int or task.reference not in VERDICTS:
            raise DataError(f"expected a raw label 0, 1 or 2, got {str(task.reference)[:40]!r}", field="reference")

    def __call__(self, response: str, task: Task, record: Record) -> Verdict:
        """Success where the verdict is right; the parts of the reward are details."""
        options = options_of(task, DebateOptions)
        reading = read_number(response)
        cited = read_citations(response)
        reward = trace_reward(
            reading.value, task.reference, has_sections=has_sections(response, tuple(options.sections)), cited=cited,
            retrieved=options.retrieved, valid=options.valid, compare=options.compare, uncited=options.uncited,
        )  # fmt: skip
        details: dict[str, Any] = {"verdict": reading.value, "cited": cited, "reward": reward.fields()}
        if reading.fault is not None:
            details["fault"] = reading.fault
        return Verdict(reward.total, bool(reward.cls), details)
