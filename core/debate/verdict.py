"""What is read out of replies: the verdict, votes, the gap, cited skills, sections. No reply is changed by it.

Raw verdicts [paper]: 2, the agent can do it; 1, on topic, but it lacks tools, authority, real-time access or scope (the
grey zone); 0, off topic. What is deployed is y = 1 if and only if the verdict is 2. Where no verdict can be read there
is none, which also makes the structure invalid [inferred]. The paper names neither sections nor forms; these are ours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

VERDICTS = (0, 1, 2)
SECTIONS = ("support", "objection", "judgement", "verdict")
GAPS = ("tools", "authority", "realtime", "scope", "topic", "none")

NUMBERS = r"(-?\d+(?:\.\d+)?(?:[^\S\n]*(?:/|\||,|-|or|and)[^\S\n]*-?\d+(?:\.\d+)?)*)"
STATED = {
    name: re.compile(rf"\b{name}\b(?:[^\S\n]+is)?[\s:=*_`#\[(\"]{{0,12}}{NUMBERS}", re.IGNORECASE)
    for name in ("verdict", "vote")
}
GAP = re.compile(r"\bgap\b[\s:=*_`\[(\"]{1,8}([a-z][a-z-]*)", re.IGNORECASE)
CITED = re.compile(r"\[skill:\s*([^\]\s]{1,64})\s*\]")
HEADING = re.compile(r"^##[^\S\n]*([A-Za-z]+)[^\n]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Reading:
    """A number that was read, or None and why not."""

    value: int | None
    fault: str | None = None


def read_number(text: str, name: str = "verdict") -> Reading:
    """The last "Verdict: N" of a text (or "Vote: N"), N in 0, 1, 2.

    Several numbers in one statement ("Verdict: 0/1/2") are a form that was not filled in.

    >>> read_number("Verdict: 1 at first.\\n## Verdict\\n2").value, read_number("Verdict: 3").fault
    (2, 'verdict 3 is out of range, expected 0, 1 or 2')
    """
    found = STATED[name].findall(text)
    if not found:
        return Reading(None, f"no {name}" if text.strip() else "an empty reply")
    said = found[-1].strip()
    if said in ("0", "1", "2"):
        return Reading(int(said))
    if re.fullmatch(r"-?\d+(?:\.\d+)?", said):
        return Reading(None, f"{name} {said} is out of range, expected 0, 1 or 2")
    return Reading(None, f"{name} {said!r} is more than one number")


def collapse(verdict: int | None) -> int | None:
    """1 if and only if the raw verdict is 2 [paper]; None stays."""
    return None if verdict is None else int(verdict == 2)


def read_vote(text: str) -> int | None:
    """The raw vote of a side: its last "Vote: N", else its last "Verdict: N"."""
    vote = read_number(text, "vote").value
    return read_number(text).value if vote is None else vote


def read_gap(text: str) -> str:
    """The last "Gap: KIND" of a text, one of GAPS, or "unknown"."""
    found = [kind.lower() for kind in GAP.findall(text)]
    return found[-1] if found and found[-1] in GAPS else "unknown"


def read_citations(text: str) -> list[str]:
    """The ids in "[skill:ID]", each once, in order."""
    return list(dict.fromkeys(CITED.findall(text)))


def read_sections(text: str) -> dict[str, str]:
    """The text below each "## NAME" heading by lower-case name; rounds of a name are joined."""
    matches = list(HEADING.finditer(text))
    found: dict[str, str] = {}
    ends = [match.start() for match in matches[1:]] + [len(text)]
    for match, end in zip(matches, ends if matches else [], strict=True):
        name = match.group(1).lower()
        body = text[match.end() : end].strip()
        found[name] = f"{found[name]}\n{body}".strip() if name in found else body
    return found


def has_sections(text: str, wanted: tuple[str, ...]) -> bool:
    """Whether every wanted section is there with something below its heading, and a verdict can be read."""
    found = read_sections(text)
    return all(found.get(name) for name in wanted) and read_number(text).value is not None
