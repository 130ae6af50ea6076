"""The verifier `choice`: the answer is one letter of a multiple-choice question.

The letter is looked for in this order, and the first form that is present decides:
1. the last <answer>B</answer> or \\boxed{B};
2. the last "answer is B", "answer: (B)", "Answer: **B**" and the like;
3. a first line that is the letter, alone or before a full stop, colon or bracket: "B", "(B)", "B) because ...";
4. a last line that is the letter alone.
A response in none of these forms has no answer: a letter somewhere in a sentence ("A good choice is ...") is not one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from strop.core.errors import DataError
from strop.core.tasks.verifiers.extract import extract
from strop.core.tasks.verifiers.verdict import Options, PlainVerifier, Verdict, options_of, shown

if TYPE_CHECKING:
    from strop.core.records import Record, Task

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
WRAPPED = r"[\s\"'`*_($\[]{0,8}(?:\\(?:text|mathrm|mathbf|textbf)\{)?"
LETTER = re.compile(WRAPPED + r"([A-Za-z])[\s\"'`*_)}\].,:;$!]{0,8}")
STATED = re.compile(
    r"\b(?:answer|choice|option)\b[\s*_]{0,4}(?:is|are|would be|[:=])[\s*_]{0,4}:?"
    rf"{WRAPPED}([A-Za-z])(?![A-Za-z'])",
    re.IGNORECASE,
)
LEADING = re.compile(r"\s*[*_`(\[]{0,4}([A-Z])(?:[*_`)\]]{1,4}|[.:,)](?=\s|$)|\s*$)")


class ChoiceOptions(Options):
    """`num_choices`: how many letters there are, from A on; letters beyond are no answers."""

    num_choices: int = 26


class ChoiceVerifier(PlainVerifier):
    """Compares letters; the reference is a letter, or an index from zero."""

    def check(self, task: Task) -> None:
        """Raises DataError where the options or the reference do not fit."""
        options = options_of(task, ChoiceOptions)
        if not 2 <= options.num_choices <= len(LETTERS):
            raise DataError(f"must be from 2 to {len(LETTERS)}", field="verifier.num_choices")
        _reference(task.reference, options.num_choices)

    def __call__(self, response: str, task: Task, record: Record) -> Verdict:
        """Success where the letters are equal."""
        options = options_of(task, ChoiceOptions)
        found = _find(response)
        if found is None or LETTERS.index(found) >= options.num_choices:
            return Verdict.of(False, found=found)
        return Verdict.of(found == _reference(task.reference, options.num_choices), found=found)

    def answer(self, response: str, task: Task) -> str | None:
        """The letter."""
        letters = LETTERS[: options_of(task, ChoiceOptions).num_choices]
        found = _find(response)
        return found if found is not None and found in letters else None


def _find(response: str) -> str | None:
    for answer in (extract(response, "tag"), extract(response, "boxed")):
        if answer is not None:
            match = LETTER.fullmatch(answer)
            return match.group(1).upper() if match else None
    stated = STATED.findall(response)
    if stated:
        return str(stated[-1]).upper()
    match = LEADING.match(response.lstrip().partition("\n")[0])
    match = match or LETTER.fullmatch(extract(response, "last-line") or "")
    return match.group(1).upper() if match else None


def _reference(reference: Any, num_choices: int) -> str:
    if isinstance(reference, int) and not isinstance(reference, bool) and 0 <= reference < num_choices:
        return LETTERS[reference]
    letter = reference.strip().upper() if isinstance(reference, str) else ""
    if len(letter) == 1 and letter in LETTERS[:num_choices]:
        return letter
    raise DataError(
        f"expected a letter from A to {LETTERS[num_choices - 1]}, or an index from 0, got {shown(repr(reference))}",
        field="reference",
    )
