"""The verifier `math`: the answer is mathematically equal to the reference, as the package math-verify sees it.

`extract`: "boxed" (default) takes the last \\boxed{...} of the response and nothing else; "any" leaves it to
math-verify to find the last expression. A reference is LaTeX with or without dollar signs, or a number.

Parsing and comparing run in a child process under a limit of processor time. A response on which they hang or crash,
while the reference can be judged by itself, is a failed attempt (`verdict.timeout`, `verdict.crashed`); where the
reference cannot be judged either, the attempt is an error and has no reward.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from strop.core.errors import DataError, missing_extra
from strop.core.tasks.verifiers.child import Child, MachineFault, ResponseFault, ask
from strop.core.tasks.verifiers.extract import extract
from strop.core.tasks.verifiers.verdict import Options, Verdict, options_of, shown

if TYPE_CHECKING:
    from strop.core.records import Record, Task

CPU_LIMIT_S = 5.0
# Longer answers are not mathematics, and regular expressions over them take the whole time limit.
MOST_CHARS = 20_000
# An answer that is no trouble to anybody: a comparison that hangs on it hangs because of the reference.
SIMPLE = "$1234567$"


class MathOptions(Options):
    """Where the answer stands."""

    extract: Literal["boxed", "any"] = "boxed"


class MathVerifier:
    """Compares expressions in a child process."""

    def __init__(self) -> None:
        self._child = Child("strop.core.tasks.verifiers.math:worker", cpu_limit_s=CPU_LIMIT_S)

    def check(self, task: Task) -> None:
        """Raises DataError where the options or the reference do not fit."""
        options_of(task, MathOptions)
        _reference(task)

    def require(self) -> None:
        """Raises Unavailable without math-verify."""
        if find_spec("math_verify") is None:
            raise missing_extra("math-verify", "envs")

    def __call__(self, response: str, task: Task, record: Record) -> Verdict:
        """Success where the answer equals the reference."""
        options = options_of(task, MathOptions)
        reference = _reference(task)
        answer = response
        if options.extract == "boxed":
            boxed = extract(response, "boxed")
            if boxed is None:
                return Verdict.of(False, boxed=False)
            answer = f"${boxed}$"
        if len(answer) > MOST_CHARS:
            return Verdict.of(False, found=shown(answer))
        try:
            found = ask(self._child, [reference, [answer]], [reference, [reference, SIMPLE]])
        except ResponseFault as fault:
            return Verdict.of(False, found=shown(answer), **fault.details)
        except MachineFault as fault:
            return Verdict.failed(f"verifier math: {fault}")
        if found is None:
            return Verdict.failed(f"verifier math: the reference {shown(reference)!r} cannot be parsed")
        return Verdict.of(found[0], found=shown(answer) if options.extract == "boxed" else None)

    def answer(self, response: str, task: Task) -> str | None:
        """What stands in the last box, without blanks; forms of one value (1/2, 0.5) are different answers."""
        options_of(task, MathOptions)
        boxed = extract(response, "boxed")
        return None if boxed is None else "".join(boxed.split())

    def close(self) -> None:
        """Ends the child process."""
        self._child.close()


def _reference(task: Task) -> str:
    reference = task.reference
    if isinstance(reference, int | float) and not isinstance(reference, bool):
        return f"${reference}$"
    if not isinstance(reference, str) or not reference.strip():
        raise DataError(f"expected LaTeX or a number, got {shown(repr(reference))}", field="reference")
    boxed = extract(reference, "boxed")
    if boxed is not None:
        return f"${boxed}$"
    return reference if "$" in reference or "\\(" in reference or "\\[" in reference else f"${reference.strip()}$"


def worker() -> Callable[[Any], list[bool] | None]:
    """The child's handler: (reference, answers) -> which are equal to it. None where it cannot be parsed."""
    import logging

    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)

    def handle(request: Any) -> list[bool] | None:
        reference, answers = request
        # No limits of their own: they are alarms, which a long operation in C does not notice.
        gold = parse(reference, parsing_timeout=None)
        if not gold:
            return None
        return [bool(verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None)) for answer in answers]

    return handle
