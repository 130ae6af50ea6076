"""A run of labelling: batches of examples under one bank, then the bank changes, then the next batch.

Within a batch every example sees the same bank, so that labels do not depend on how many are debated at a time; what
disagreed goes into the buffer at the end of the batch, and the patterns that pass the gate change the bank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from strop.core.debate.buffer import Buffer
from strop.core.debate.intake import Humans
from strop.core.debate.labels import Grading, entry_of, failed_label, make_label
from strop.core.debate.rounds import Case, Debate
from strop.core.debate.skills import Bank
from strop.core.records import Example, Label, Record, Skill


@dataclass(slots=True)
class Tally:
    """What a run did."""

    labels: int = 0
    errors: int = 0
    resumed: int = 0
    unread: int = 0
    conflicts: int = 0
    added: int = 0
    refined: int = 0
    first_error: str | None = None
    verdicts: dict[int, int] = field(default_factory=lambda: {2: 0, 1: 0, 0: 0})


@dataclass(frozen=True, slots=True)
class Made:
    """A label with its example's record and the skills that were shown; `earlier` is the record of a killed run."""

    case: Case
    label: Label
    earlier: Record | None = None


class Labeller:
    """Labels batches; `bank` and `buffer` are changed on the way, the bank only if `is_dynamic`."""

    def __init__(
        self, debate: Debate, bank: Bank, buffer: Buffer, humans: Humans, grading: Grading, *, variant: str,
        is_dynamic: bool = True, earlier: dict[str, Record] | None = None,
    ) -> None:  # fmt: skip
        self.bank = bank
        self.buffer = buffer
        self.tally = Tally()
        self._debate = debate
        self._humans = humans
        self._grading = grading
        self._variant = variant
        self._is_dynamic = is_dynamic
        self._earlier = earlier or {}

    def label(self, examples: list[tuple[Record, Example]]) -> Iterator[Made | Case]:
        """One for each example, in order: a label, or the case where its data are bad."""
        cases = [self._debate.open(record, example) for record, example in examples]
        self._debate.hold([case for case in cases if case.example.id not in self._earlier])
        for case in cases:
            earlier = self._earlier.get(case.example.id)
            if earlier is not None:
                yield self._again(case, earlier)
            elif case.is_bad:
                yield case
            else:
                yield Made(case, self._finish(case))

    def update(self) -> Iterator[tuple[Skill, dict[str, Any]]]:
        """The skills that change because of what waits in the buffer, with what was done to each."""
        if not self._is_dynamic:
            return
        for gate in self.buffer.gates(self._grading.thresholds):
            if gate.opens:
                skill, told = self.bank.update(gate)
                self.tally.added += told["action"] == "add"
                self.tally.refined += told["action"] == "refine"
                yield skill, told

    def _finish(self, case: Case) -> Label:
        if case.error is not None:
            self.tally.errors += 1
            self.tally.first_error = self.tally.first_error or case.error
            self.tally.labels += 1
            return failed_label(case, self._variant)
        human = self._humans.labels.get(case.example.id)
        label, entry = make_label(
            case, self._variant, self._grading, human, lambda pattern: self.bank.covering(pattern) is not None
        )
        if entry is not None:
            self.buffer.add(entry)
        self._count(label)
        return label

    def _again(self, case: Case, record: Record) -> Made:
        label = record.view(Label)
        entry = entry_of(label, self._grading.thresholds)
        if entry is not None:
            self.buffer.add(entry)
        self.tally.resumed += 1
        self._count(label)
        return Made(case, label, record)

    def _count(self, label: Label) -> None:
        self.tally.labels += 1
        trace = label.trace
        sides = (trace.get("y_sem"), trace.get("y_crit"))
        self.tally.conflicts += None not in sides and sides[0] != sides[1]
        if label.verdict is None:
            self.tally.unread += label.error is None
        else:
            self.tally.verdicts[label.verdict] = self.tally.verdicts.get(label.verdict, 0) + 1
