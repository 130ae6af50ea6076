"""The verifier `exact`: the answer is the reference, character for character (or one of several references)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strop.core.errors import DataError
from strop.core.tasks.verifiers.extract import How, extract
from strop.core.tasks.verifiers.verdict import Options, PlainVerifier, Verdict, options_of, shown

if TYPE_CHECKING:
    from strop.core.records import Record, Task


class ExactOptions(Options):
    """`extract`: where the answer stands (see extract.py). `ignore_case`, `ignore_space`: runs of blanks are one."""

    extract: How = "response"
    ignore_case: bool = False
    ignore_space: bool = False


class ExactVerifier(PlainVerifier):
    """Compares texts; blanks around them never count."""

    def check(self, task: Task) -> None:
        """Raises DataError where the options or the reference do not fit."""
        options_of(task, ExactOptions)
        _references(task.reference)

    def __call__(self, response: str, task: Task, record: Record) -> Verdict:
        """Success where the answer is one of the references."""
        options = options_of(task, ExactOptions)
        found = extract(response, options.extract)
        if found is None:
            return Verdict.of(False)
        accepted = {_normal(reference, options) for reference in _references(task.reference)}
        # The whole response stands in the rollout already.
        detail = None if options.extract == "response" else shown(found)
        return Verdict.of(_normal(found, options) in accepted, found=detail)

    def answer(self, response: str, task: Task) -> str | None:
        """The text, without the differences that the options ignore."""
        options = options_of(task, ExactOptions)
        found = extract(response, options.extract)
        return None if found is None else _normal(found, options)


def _references(reference: Any) -> list[str]:
    given = reference if isinstance(reference, list) else [reference]
    if not given or not all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in given):
        raise DataError(f"expected a text, or a list of texts, got {shown(repr(reference))}", field="reference")
    return [str(item) for item in given]


def _normal(text: str, options: ExactOptions) -> str:
    text = " ".join(text.split()) if options.ignore_space else text.strip()
    return text.casefold() if options.ignore_case else text
