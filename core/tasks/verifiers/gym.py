"""The verifier `reasoning-gym`: the scorer of the data set that a task comes from.

The reward is the scorer's own score, in [0, 1]; many data sets give a part of it for an answer in the right form.
Success is a score of 1 (that of a complete answer in every data set). `extract` (see extract.py): "tag" takes what
stands in the last <answer></answer>, and a response without it scores what the data set gives for no answer.

Scoring runs in a child process under a limit of processor time, with what a scorer does not need taken away: several
scorers evaluate the answer as an expression. An answer on which the scorer hangs, crashes or raises is a failed attempt
(`verdict.timeout`, ...) if the scorer works on the data set's own answer, and an error otherwise.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec

from strop.core.errors import DataError, missing_extra
from strop.core.tasks.verifiers.child import Child, MachineFault, ResponseFault, ask
from strop.core.tasks.verifiers.extract import How, extract
from strop.core.tasks.verifiers.verdict import Options, Verdict, options_of, shown

if TYPE_CHECKING:
    from strop.core.records import Record, Task

CPU_LIMIT_S = 10.0


class GymOptions(Options):
    """`version` of the package that made the entry: kept for the record."""

    extract: How = "tag"
    version: str | None = None


class Entry(msgspec.Struct):
    """The reference: which data set, its settings, and the whole entry in the form of tasks/plain.py."""

    dataset: str
    entry: dict[str, Any]
    config: dict[str, Any] = {}


class GymVerifier:
    """Scores answers in a child process."""

    def __init__(self) -> None:
        self._child = Child("strop.core.tasks.gym_worker:worker", cpu_limit_s=CPU_LIMIT_S)

    def check(self, task: Task) -> None:
        """Raises DataError where the options or the reference do not fit."""
        options_of(task, GymOptions)
        _entry(task)

    def require(self) -> None:
        """Raises Unavailable without reasoning-gym."""
        if find_spec("reasoning_gym") is None:
            raise missing_extra("reasoning-gym", "envs")

    def __call__(self, response: str, task: Task, record: Record) -> Verdict:
        """The data set's score."""
        options, reference = options_of(task, GymOptions), _entry(task)
        answer = extract(response, options.extract)
        found = None if options.extract == "response" else shown(answer)
        request = {"do": "score", "dataset": reference.dataset, "config": reference.config, "entry": reference.entry}
        own_answer = reference.entry.get("answer")
        try:
            score = ask(self._child, {**request, "answer": answer}, {**request, "answer": own_answer})
        except ResponseFault as fault:
            return Verdict.of(False, found=found, **fault.details)
        except MachineFault as fault:
            return Verdict.failed(f"verifier reasoning-gym, data set {reference.dataset}: {fault}")
        if isinstance(score, dict):
            return Verdict.failed(f"verifier reasoning-gym: this version has no data set {reference.dataset!r}")
        if not math.isfinite(score):
            return Verdict.failed(f"verifier reasoning-gym, data set {reference.dataset}: the score is {score}")
        return Verdict(score, score >= 1, {} if found is None else {"found": found})

    def answer(self, response: str, task: Task) -> str | None:
        """The text of the answer."""
        return extract(response, options_of(task, GymOptions).extract)

    def close(self) -> None:
        """Ends the child process."""
        self._child.close()


def _entry(task: Task) -> Entry:
    try:
        entry = msgspec.convert(task.reference, Entry)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise DataError(message, field="reference" + path.rstrip("`")) from None
    if "question" not in entry.entry or "answer" not in entry.entry:
        raise DataError("holds no question and answer", field="reference.entry")
    return entry
