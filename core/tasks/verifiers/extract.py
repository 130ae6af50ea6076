"""Where in a response the answer stands. Pure functions on text, linear in its length.

| how       | the answer is                                                            |
|-----------|--------------------------------------------------------------------------|
| response  | the whole response                                                       |
| line      | the response up to its first line feed                                   |
| last-line | its last line that is not blank                                          |
| tag       | what stands between the last <answer> and the </answer> after it         |
| boxed     | the content of the last complete \\boxed{...}                            |

Blanks around the answer are not part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

How = Literal["response", "line", "last-line", "tag", "boxed"]

OPENING, CLOSING = "<answer>", "</answer>"
BOXES = ("\\boxed{", "\\fbox{")


def extract(response: str, how: How) -> str | None:
    """The answer in `response`, or None where the form that `how` asks for is missing.

    >>> extract("7\\nQ: 2+2=4", "line"), extract("so \\\\boxed{\\\\frac{1}{2}}.", "boxed")
    ('7', '\\\\frac{1}{2}')
    """
    found = _FORMS[how](response)
    return None if found is None else found.strip()


def _line(response: str) -> str:
    return response.partition("\n")[0]


def _last_line(response: str) -> str:
    return response.rstrip().rpartition("\n")[2]


def _tag(response: str) -> str | None:
    end = response.rfind(CLOSING)
    start = response.rfind(OPENING, 0, end) if end >= 0 else -1
    return response[start + len(OPENING) : end] if start >= 0 else None


def _boxed(response: str) -> str | None:
    end = len(response)
    while True:
        start, box = max((response.rfind(box, 0, end), box) for box in BOXES)
        if start < 0:
            return None
        content = _braced(response, start + len(box), end)
        if content is not None:
            return content
        # A box that holds this unclosed one is unclosed too, so an earlier one is looked at up to here only.
        end = start


def _braced(text: str, start: int, end: int) -> str | None:
    """From `start`, just behind an opening brace, to the brace before `end` that closes it; \\{, \\} do not count."""
    depth, i = 1, start
    while i < end:
        if text[i] == "\\":
            i += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start:i]
        i += 1
    return None


_FORMS: dict[str, Callable[[str], str | None]] = {
    "response": str, "line": _line, "last-line": _last_line, "tag": _tag, "boxed": _boxed,
}  # fmt: skip
