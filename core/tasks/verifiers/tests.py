"""The verifier `tests`: hidden tests that judge what an agent has left in its sandbox.

They enter from outside when the agent has stopped, run there, and are compared with what was put in. The outcome is the
number in the reward file (1 is a success), or the exit status of the command where it wrote none; the assertions are
those of its report. Tests that were changed, or whose folder or results were there before them, prove nothing: no
success. Neither does a reward file that holds no number; `reward_error` tells. Tests that do not end in time are a
failure of the machinery, as the trials of T1's kind count them.
"""

from __future__ import annotations

import base64
import binascii
import math
from typing import TYPE_CHECKING, Any

from strop.core.errors import DataError
from strop.core.sandbox.hidden import HiddenRun, run_hidden
from strop.core.sandbox.protocol import Sandbox, SandboxRefused
from strop.core.tasks.reports import Assertion, ReportError, parse_report
from strop.core.tasks.verifiers.verdict import Options, PlainVerifier, Verdict, options_of, shown

if TYPE_CHECKING:
    from strop.core.records import Record, Task

FOLDER = "/tests"
LOGS = "/logs/verifier"


class TestsOptions(Options):
    """`files` by name below `folder`: text, or {"base64": ...}; `command` runs them with the shell, in `workdir`.

    `report` and `reward` are files that it may write. `keep_processes`: the agent's services go on while they run.
    """

    __test__ = False

    files: dict[str, str | dict[str, str]]
    command: str
    folder: str = FOLDER
    workdir: str | None = None
    report: str = f"{LOGS}/ctrf.json"
    reward: str = f"{LOGS}/reward.txt"
    timeout_s: float = 900.0
    keep_processes: bool = False


class TestsVerifier(PlainVerifier):
    """Checks the options here; `judge_sandbox` runs the tests."""

    __test__ = False

    def check(self, task: Task) -> None:
        """Raises DataError where the options do not fit."""
        contents(options_of(task, TestsOptions).files, "verifier.files")

    def __call__(self, response: str, task: Task, record: Record) -> Verdict:
        """An error: a response alone is nothing that tests could judge."""
        return Verdict.failed("the verifier `tests` judges a sandbox, and nothing of one is stored")


def contents(files: dict[str, str | dict[str, str]], field: str) -> dict[str, bytes]:
    """Files of a record as bytes. Raises DataError."""
    found = {}
    for name, content in files.items():
        if isinstance(content, str):
            found[name] = content.encode("utf-8", "surrogatepass")
            continue
        try:
            found[name] = base64.b64decode(content["base64"], validate=True)
        except (KeyError, binascii.Error):
            raise DataError('expected text, or {"base64": ...}', field=f"{field}.{name}") from None
    return found


def folders_of(task: Task) -> tuple[str, ...]:
    """Folders besides the working directory that the tests need to be there and writable."""
    options = options_of(task, TestsOptions)
    logs = {path.rpartition("/")[0] for path in (options.report, options.reward) if path.startswith("/")}
    return (options.folder, *sorted(logs))


def judge_sandbox(sandbox: Sandbox, task: Task) -> Verdict:
    """Runs the task's tests in the sandbox of an agent that has stopped. Raises SandboxLost."""
    options = options_of(task, TestsOptions)
    early = [path for path in (options.report, options.reward) if _exists(sandbox, path)]
    if early:
        return Verdict.of(False, planted=early)
    try:
        run = run_hidden(
            sandbox, contents(options.files, "verifier.files"), options.folder, options.command,
            env={"STROP_LOGS": LOGS}, workdir=options.workdir, timeout_s=options.timeout_s,
            keep_processes=options.keep_processes,
        )  # fmt: skip
    except SandboxRefused as error:
        return Verdict.of(False, refused=str(error))
    if run.result.timed_out:
        return Verdict.failed(f"the tests did not end within {options.timeout_s:g} s")
    if run.tampered or run.planted:
        return Verdict.of(False, tampered=list(run.tampered) or None, planted=list(run.planted) or None)
    assertions, cause = _assertions(sandbox, options, run)
    success, bad_reward = _outcome(sandbox, options, run)
    details: dict[str, Any] = {"exit_code": run.result.exit_code, "reward_error": bad_reward}
    if not success:
        details["output"] = shown(run.result.stdout.decode("utf-8", "replace")[-400:] or None)
    details["report_error"] = cause
    found = {name: value for name, value in details.items() if value is not None}
    return Verdict(float(success), success, found, assertions=assertions)


def _exists(sandbox: Sandbox, path: str) -> bool:
    try:
        sandbox.get(path)
    except FileNotFoundError:
        return False
    except SandboxRefused:
        return True
    return True


def _assertions(sandbox: Sandbox, options: TestsOptions, run: HiddenRun) -> tuple[list[Assertion] | None, str | None]:
    """The assertions of the report, or of what pytest printed; else why there are none."""
    try:
        data = sandbox.get(options.report)
    except (FileNotFoundError, SandboxRefused):
        data = None
    try:
        return parse_report(run.result.stdout if data is None else data), None
    except ReportError as error:
        return None, "missing" if data is None else error.cause


def _outcome(sandbox: Sandbox, options: TestsOptions, run: HiddenRun) -> tuple[bool, str | None]:
    """Whether it is a success, and what is wrong with the reward file where it holds no number."""
    try:
        said = sandbox.get(options.reward)[:64]
        reward = float(said)
    except (FileNotFoundError, SandboxRefused):
        return run.result.exit_code == 0, None
    except ValueError:
        return False, f"no number: {said.decode('utf-8', 'replace')!r}"
    return math.isfinite(reward) and reward >= 1, None if math.isfinite(reward) else f"no finite number: {reward}"
