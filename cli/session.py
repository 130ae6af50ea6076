"""What every command shares: the common options, and the session that reads, writes, warns and counts for it.

A command is a function `command(io: Session, ...its own options...)` under the decorator `tool`, which adds the options
of shared_options.py to its signature. So each common option is declared, documented and obeyed in one place.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import typer

from strop import __version__
from strop.cli.main import Messages, Stopped, command_name
from strop.cli.progress import Progress
from strop.cli.shared_options import COMMON, SLOW, Files
from strop.core.errors import DataError, OutputFailed, UsageError
from strop.core.records import VIEWS, Record
from strop.core.streams import Output, Resumed, read_records

EXIT_SET_ASIDE = 1


class Session:
    """One run of one tool: its input, its output, its messages.

    `records()` yields the input; `write` and `emit` put records out; `reject` sets a bad one aside or ends the run;
    `warn` and `note` speak on stderr. `set_aside` counts what makes the exit status 1, and so does a `say_no`.
    """

    def __init__(
        self, tool: str, *, slow: bool, reads_input: bool, files: list[str], values: dict[str, Any],
        kind_if_none: str | None = None,
    ) -> None:  # fmt: skip
        self.tool = tool
        self.files = files or ["-"]
        self.reads_input = reads_input
        self._kind_if_none = kind_if_none
        self.slow = slow
        self.set_aside = 0
        self.said_no = False
        self.keep_going: bool = values["keep_going"]
        self.dry_run: bool = values.get("dry_run", False)
        self.quiet: bool = values["quiet"]
        self.verbose: bool = values["verbose"]
        self._log_json = Messages.as_json = values["log_json"]
        self._tags = dict(map(_parse_tag, values["tag"]))
        self._only = None if values["only"] is None else set(values["only"].split(","))
        self._rejects_path: Path | None = values["rejects"]
        if self._rejects_path is not None and not self.keep_going:
            raise UsageError("--rejects goes with --keep-going")
        self._rejects: Output | None = None
        self._resume_path: Path | None = values.get("resume")
        self._output_name: str = values["output"]
        self._flush_each: bool = slow if values["line_buffered"] is None else values["line_buffered"]
        self._progress_wish: bool | None = values["progress"]
        self.resumed: Resumed | None = None
        self._output: Output | None = None
        self._stack = contextlib.ExitStack()
        # Records get the real stdout; whatever a library or a child prints lands on stderr.
        self._record_fd = os.dup(1)
        self._stdout_is_terminal = os.isatty(1)
        os.dup2(2, 1)

    def __enter__(self) -> Session:
        """Opens the output, so that an output that cannot be written is known before any work."""
        if self._resume_path is not None:
            if self._output_name != "-":
                raise UsageError("--resume FILE names the output itself; leave --output out")
            self.resumed = Resumed(self._resume_path, self._kind_if_none)
            if self.resumed.num_torn_bytes:
                self.warn(f"cut a torn last line of {self.resumed.num_torn_bytes} bytes off {self._resume_path}")
            self._output = Output(path=self._resume_path, append=True, flush_each=self._flush_each)
        elif self._output_name == "-":
            self._output = Output(fd=self._record_fd, flush_each=self._flush_each or self._stdout_is_terminal)
        else:
            self._output = Output(path=Path(self._output_name), flush_each=self._flush_each)
        self._stack.enter_context(self._output)
        if self.slow:
            self._stack.enter_context(self._logs_heard())
        return self

    @contextlib.contextmanager
    def _logs_heard(self) -> Iterator[None]:
        """What core logs leaves as our own messages: warnings as such, the rest with --verbose."""
        import logging

        class Heard(logging.Handler):
            def emit(handler, record: logging.LogRecord) -> None:  # noqa: N805 (`self` is the session)
                (self.warn if record.levelno >= logging.WARNING else self.detail)(record.getMessage())

        logger, handler = logging.getLogger("strop"), Heard()
        logger.addHandler(handler)
        before, logger.propagate = (logger.level, logger.propagate), False
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.level, logger.propagate = before

    def __exit__(self, *failure: Any) -> None:
        """Completes or abandons the output; a signal leaves what a slow tool finished beside an atomic file."""
        if isinstance(failure[1], Stopped):
            failure[1].kept = self._keep_finished()
        self._stack.__exit__(*failure)
        if self._rejects is not None:
            self._rejects.close(complete=True)

    def _keep_finished(self) -> str:
        """After a signal: what became of the output, in words."""
        if self._output is None or not self._output.is_atomic:
            return "finished records are kept"
        partial = self._output.keep_partial() if self.slow else None
        return f"finished records are in {partial}" if partial else f"{self._output.path} was not touched"

    def records(self, on_lost: Callable[[bytes], None] | None = None) -> Iterator[Record]:
        """The input, with bad lines raised or set aside. Foreign kinds come too: pass them to `write`.

        `on_lost` hears of each line that was set aside because it could not be read.
        """
        if "-" in self.files and sys.stdin.isatty():
            raise UsageError("stdin is a terminal: pipe records in or name a FILE (see --help)")

        def set_aside(error: DataError, line: bytes) -> None:
            self._on_bad(error, line)
            if on_lost is not None:
                on_lost(line)

        yield from read_records(
            self.files, sys.stdin.buffer, set_aside if self.keep_going else None, self._kind_if_none
        )

    def wants(self, kind: str) -> bool:
        """Whether records of this kind leave at all: what --only drops need not be held."""
        return self._only is None or kind in self._only

    def write(self, record: Record) -> None:
        """Puts out a record that came in (unless --only says no, or a resumed file has it)."""
        if not self.wants(record.kind):
            return
        if self.resumed is not None and self.resumed.take_line(record):
            return
        assert self._output is not None
        self._output.write(record)

    def print(self, text: str) -> None:
        """Puts out lines for people where records would go; for a tool whose output is a table."""
        assert self._output is not None
        self._output.write_text(text)

    def emit(self, record: Record, options: dict[str, Any] | None = None, **more: Any) -> None:
        """Puts out a record this tool makes, with its provenance: tool, version, options that matter, `more`."""
        self.write(self.stamped(record, options, **more))

    def stamped(self, record: Record, options: dict[str, Any] | None = None, **more: Any) -> Record:
        """The record with its provenance, and a metric with the fields of --tag; for records that go elsewhere."""
        if record.kind == "metric" and self._tags:
            record.set(**self._tags)
        record.set(
            provenance={"tool": self.tool, "version": __version__, **({"options": options} if options else {}), **more}
        )
        return record

    def flush(self) -> None:
        """Hands over what is buffered."""
        assert self._output is not None
        self._output.flush()

    def reject(self, error: DataError, record: Record) -> None:
        """A record turned out bad after it was read: raises, or sets it aside under --keep-going."""
        if not self.keep_going:
            raise error
        self._on_bad(error, record.encode())

    def _on_bad(self, error: DataError, line: bytes) -> None:
        self.set_aside += 1
        self._message(str(error), "error")
        if self._rejects_path is not None:
            if self._rejects is None:
                self._rejects = Output(path=self._rejects_path, append=True, flush_each=True)
            where = error.where
            self._rejects.write(
                Record.make(
                    "reject",
                    {
                        "file": where.file if where else None,
                        "line": where.line if where else None,
                        "field": error.field,
                        "reason": error.message,
                        "text": line.rstrip(b"\r\n").decode("utf-8", "replace"),
                    },
                )
            )

    def warn(self, message: str) -> None:
        """Something the user should know; silent under --quiet."""
        self._message(message, "warning")

    def note(self, message: str) -> None:
        """A summary line; silent under --quiet."""
        self._message(message, "note")

    def say_no(self, message: str) -> None:
        """A check that the user asked for failed: the output stays whole, the exit status is 1."""
        self.said_no = True
        self._message(message, "error")

    def detail(self, message: str) -> None:
        """Only with --verbose."""
        if self.verbose:
            self._message(message, "detail")

    def _message(self, message: str, level: str) -> None:
        if self.quiet and level != "error":
            return
        if self._log_json:
            line = msgspec.json.encode({"tool": command_name(), "level": level, "message": message})
        else:
            line = f"{command_name()}: {message}".encode("utf-8", "backslashreplace")
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
            sys.stderr.buffer.write(line + b"\n")
            sys.stderr.flush()

    def progress(self, what: str, total: int | None = None) -> Progress:
        """A progress bar on stderr, shown when asked for or when a person is watching and no pipe follows."""
        wish = self._progress_wish
        shown = (sys.stderr.isatty() and self._stdout_is_terminal and not self.quiet) if wish is None else wish
        return Progress(what, total, shown=shown)


def _parse_tag(text: str) -> tuple[str, int | float | str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UsageError(f"--tag {text!r}: expected KEY=VALUE")
    for number in (int, float):
        with contextlib.suppress(ValueError):
            if math.isfinite(parsed := number(value)):
                return key, parsed
    return key, value


def tool(
    *, reads: tuple[str, ...] = (), writes: tuple[str, ...] = (), slow: bool = False, kind_if_none: str | None = None,
    views: Mapping[str, type[msgspec.Struct]] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a Typer command of `function(io, ...)`: adds FILEs (if it `reads`) and the common options.

    `slow` tools (models, sandboxes) also get --resume and --dry-run and hand over each record at once. An option of
    the tool's own takes the place of the common one with its name. Records without `kind` are bad, or `kind_if_none`.
    `views` are for --schema, where a kind means something else to this tool than in VIEWS.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        hints = get_type_hints(function, include_extras=True)
        own = list(inspect.signature(function).parameters.values())[1:]
        all_common = {**COMMON, **(SLOW if slow else {})}
        common = {key: option for key, option in all_common.items() if key not in {one.name for one in own}}
        name = function.__module__.rpartition(".")[2].replace("_", "-")

        @functools.wraps(function)
        def run(ctx: typer.Context, **values: Any) -> int:
            shared = {key: values.pop(key) for key in common}
            files = values.pop("files", [])
            if shared["schema"]:
                _print_schema(reads, writes, {**VIEWS, **(views or {})})
                return 0
            if shared["show_config"]:
                _print_config(ctx)
                return 0
            session = Session(
                name, slow=slow, reads_input=bool(reads), files=files, values=shared, kind_if_none=kind_if_none
            )
            with session:
                function(session, **values)
            return EXIT_SET_ASIDE if session.set_aside or session.said_no else 0

        parameters = [inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
        if reads and not any(parameter.name == "files" for parameter in own):
            parameters.append(inspect.Parameter("files", inspect.Parameter.KEYWORD_ONLY, annotation=Files, default=[]))
        parameters += [p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[p.name]) for p in own]
        parameters += [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
            for key, (annotation, default) in common.items()
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return wrap


def _print_schema(
    reads: tuple[str, ...], writes: tuple[str, ...], views: Mapping[str, type[msgspec.Struct]]
) -> None:
    roles = {"reads": [k for k in reads if k in views], "writes": [k for k in writes if k in views]}
    kinds = list(dict.fromkeys(kind for some in roles.values() for kind in some))
    # One set of definitions for all, since a reference is looked up from the root of the document.
    references, definitions = msgspec.json.schema_components([views[kind] for kind in kinds])
    schema = dict(zip(kinds, references, strict=True))
    document = {role: {kind: schema[kind] for kind in some} for role, some in roles.items()}
    _print(msgspec.json.format(msgspec.json.encode({**document, "$defs": definitions}), indent=2).decode())


def _print_config(ctx: typer.Context) -> None:
    """Three columns between tabs: the option, its value as JSON, and where it comes from."""
    from strop.cli.config import NOT_IN_FILES, long_name, origin, shown

    for parameter in ctx.command.params:
        name = parameter.name or ""
        if name not in NOT_IN_FILES:
            _print(f"{long_name(parameter)}\t{shown(name, ctx.params.get(name))}\t{origin(ctx, parameter)}")


def _print(text: str) -> None:
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputFailed(f"<stdout>: {error.strerror}") from None
