"""Reports of test runs, assertion by assertion: CTRF (JSON), JUnit (XML), and what pytest prints with -rA or -v.

A report counts what its list of tests says, not its own summary, which may disagree. A test that was tried again or
listed twice counts once, with its last status; a skipped one has not passed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import Struct

Status = Literal["passed", "failed", "skipped", "pending", "other"]
# Names of statuses as the formats and tools write them.
STATUSES: dict[str, Status] = {
    "passed": "passed", "pass": "passed", "ok": "passed", "success": "passed", "xpassed": "passed", "xpass": "passed",
    "failed": "failed", "fail": "failed", "failure": "failed", "error": "failed",
    # What was expected to fail and did has not shown anything (our choice: the paper is silent).
    "skipped": "skipped", "skip": "skipped", "xfailed": "skipped", "xfail": "skipped", "pending": "pending",
}  # fmt: skip
# pytest's lines: "PASSED tests/x.py::test_y" of -rA, "tests/x.py::test_y PASSED  [ 50%]" of -v.
_SUMMARY_LINE = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (\S+::\S+)")
_VERBOSE_LINE = re.compile(r"(\S+::\S+) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
MAX_REPORT_BYTES = 16 << 20


class Assertion(Struct, frozen=True):
    """One test of a verifier and how it came out."""

    name: str
    status: str


class ReportError(Exception):
    """A report that cannot be used; the message is its cause, one of a few words, and what was found."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class _CtrfTest(Struct):
    name: str
    status: str


class _CtrfResults(Struct):
    tests: list[_CtrfTest]


class _Ctrf(Struct):
    results: _CtrfResults


@dataclass(frozen=True, slots=True)
class Counts:
    """P of T assertions passed."""

    passed: int
    total: int


def count(assertions: list[Assertion]) -> Counts:
    """P and T of the list; a name that occurs again replaces its earlier status."""
    last = {one.name: STATUSES.get(one.status.lower(), "other") for one in assertions}
    return Counts(sum(status == "passed" for status in last.values()), len(last))


def parse_report(data: bytes) -> list[Assertion]:
    """The assertions of a report, of whichever format it is. Raises ReportError ("unparsable", "empty")."""
    if len(data) > MAX_REPORT_BYTES:
        raise ReportError("unparsable", f"a report of {len(data)} bytes")
    start = data.lstrip()[:1]
    if start == b"{":
        found = parse_ctrf(data)
    elif start == b"<":
        found = parse_junit(data)
    else:
        found = parse_pytest(data.decode("utf-8", "replace"))
    if not found:
        raise ReportError("empty", "a report without tests")
    return found


def parse_ctrf(data: bytes) -> list[Assertion]:
    """The tests of a CTRF report (Harbor's /logs/verifier/ctrf.json)."""
    try:
        report = msgspec.json.decode(data, type=_Ctrf)
    except msgspec.DecodeError as error:
        raise ReportError("unparsable", f"not a CTRF report: {error}") from None
    return [Assertion(test.name, _status(test.status)) for test in report.results.tests]


def parse_junit(data: bytes) -> list[Assertion]:
    """The test cases of a JUnit report, by class and name. Entities are refused: a verifier has no use for them."""
    import xml.etree.ElementTree as Xml

    if b"<!ENTITY" in data or b"<!DOCTYPE" in data:
        raise ReportError("unparsable", "a JUnit report with entities of its own")
    try:
        root = Xml.fromstring(data)  # noqa: S314 (entities are refused above)
    except Xml.ParseError as error:
        raise ReportError("unparsable", f"not a JUnit report: {error}") from None
    found = []
    for case in root.iter("testcase"):
        name = "::".join(part for part in (case.get("classname"), case.get("name")) if part)
        status: Status = "passed"
        for child in case:
            if child.tag in ("failure", "error"):
                status = "failed"
            elif child.tag == "skipped" and status == "passed":
                status = "skipped"
        found.append(Assertion(name, status))
    return found


def parse_pytest(text: str) -> list[Assertion]:
    """The tests that pytest names in what it prints with -rA or -v."""
    found = []
    for line in text.splitlines():
        if match := _SUMMARY_LINE.match(line):
            found.append(Assertion(match[2], _status(match[1])))
        elif match := _VERBOSE_LINE.match(line):
            found.append(Assertion(match[1], _status(match[2])))
    return found


def _status(text: str) -> Status:
    return STATUSES.get(text.lower(), "other")
