"""The console script: protects stdout, loads the one module of the command asked for, maps errors to exit statuses.

Start-up is part of the interface: `strop --help` is answered from the table below before Typer is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from strop import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

# Command -> (module below strop.cli, what it does in one line). A test keeps the lines equal to the docstrings.
COMMANDS: dict[str, tuple[str, str]] = {
    "synth-tasks": ("synth_tasks", "Make tasks with known answers, the same for the same seed."),
    "rollout": ("rollout", "Let a model attempt tasks and verify what it did."),
    "calibrate": ("calibrate", "Find the tasks at the edge of what a model can do."),
    "advantage": ("advantage", "Give credit: an advantage for each rollout or step of a group."),
    "horizon": ("horizon", "Follow the cap on turns that successes ask for."),
    "distill": ("distill", "Turn models' scores into a signal on each sampled token."),
    "train": ("train", "Update a model from rollouts with advantages, or from examples."),
    "audit-prune": ("audit_prune", "Audit right/wrong answer pairs for surface leaks; prune them."),
    "debate-label": ("debate_label", "Label by debate what an agent can do; learn skills from it."),
    "report": ("report", "Make a table and a curve of metric records."),
    "doctor": ("doctor", "Say what is here, what each tool would miss, and how to get it."),
}

EPILOG = "`strop COMMAND --help` tells more, `strop help COMMAND` shows the manual page."
CLEANUP_LIMIT_S = 10

EX_OK, EX_USAGE, EX_SOFTWARE, EX_IOERR = 0, 2, 70, 74


class Messages:
    """How messages leave; the session switches to JSON lines for --log-json."""

    as_json = False


class Stopped(BaseException):
    """A signal asked the tool to stop; a BaseException so that no `except Exception` swallows it.

    `kept` says what became of the output; the session fills it in.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum
        self.kept = ""


def overview() -> str:
    """What `strop --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {line}" for name, (_, line) in COMMANDS.items()]
    return "\n".join(
        [
            "Usage: strop COMMAND [OPTIONS] [FILE...]",
            "",
            "Unix tools for loops in which a language model improves on its own work.",
            "Each command reads JSONL records on stdin (or FILEs) and writes them on stdout.",
            "",
            "Commands:",
            *lines,
            "",
            "  --help, -h   this text          --version   the version",
            "",
            EPILOG,
            "",
        ]
    )


def main() -> NoReturn:
    """Entry point of `strop` and `python -m strop`; always ends the process."""
    args = sys.argv[1:]
    _open_closed_streams()
    if "_STROP_COMPLETE" not in os.environ:
        if args in ([], ["--help"], ["-h"]):
            _print_and_exit(overview(), EX_OK if args else EX_USAGE)
        if args == ["--version"]:
            _print_and_exit(f"strop {__version__}\n", EX_OK)
        if args and args[0] == "help":
            _help(args[1:])
    for signum in (signal.SIGINT, signal.SIGTERM):
        # A background job of a non-interactive shell is started with SIGINT ignored; that is the shell's wish.
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _on_signal)
    try:
        status = _run(args)
    except Stopped as stopped:
        signal.alarm(0)
        _say(f"stopped by {signal.Signals(stopped.signum).name}{stopped.kept and '; '}{stopped.kept}")
        _die(stopped.signum)
    except BrokenPipeError:
        _die(signal.SIGPIPE)
    _leave(status)


def _open_closed_streams() -> None:
    """Puts /dev/null where stdin, stdout or stderr was closed, opened the wrong way round so that using it is an error.

    Otherwise the first file we open would become "stdout", and records or messages would land in it.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if name == "stdout" else os.O_WRONLY)
            setattr(sys, name, open(fd, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115


def _print_and_exit(text: str, status: int) -> NoReturn:
    stream = sys.stdout if status == EX_OK else sys.stderr
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        _die(signal.SIGPIPE)
    except OSError:
        _leave(EX_IOERR)
    _leave(status)


def _help(names: list[str]) -> NoReturn:
    page = "strop" if not names else f"strop-{names[0]}"
    if names and names[0] not in (*COMMANDS, "records"):
        _print_and_exit(f"strop: no manual page for {names[0]!r}\n", EX_USAGE)
    from pathlib import Path

    section = "5" if names[:1] == ["records"] else "1"
    # An editable install has no share/man: the page then lies beside the source.
    beside = Path(__file__).resolve().parent.parent / "man"
    places = (beside / f"{page}.{section}", Path(sys.prefix) / f"share/man/man{section}/{page}.{section}")
    found = next((str(place) for place in places if place.exists()), None)
    try:
        os.execvp("man", ["man", found] if found else ["man", section, page])  # noqa: S606
    except OSError:
        _print_and_exit(f"strop: `man` is missing; `strop {' '.join(names)} --help` says the most of it\n", 69)


def _on_signal(signum: int, frame: FrameType | None) -> None:
    # A second signal skips the clean-up, and so does a clean-up that hangs.
    signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, lambda *_: _die(signum))
    signal.alarm(CLEANUP_LIMIT_S)
    streams = sys.modules.get("strop.core.streams")
    if streams is not None and streams.WriteGuard.num_writes:
        streams.WriteGuard.stop = Stopped(signum)
        return
    raise Stopped(signum)


def _run(args: list[str]) -> int:
    from strop.cli.app import UsageFailure, build_app
    from strop.core.errors import OutputFailed, StropError, UsageError

    if not sys.warnoptions:
        # Deprecations inside torch and transformers are their developers' business; `python -W` still shows them.
        import warnings

        warnings.simplefilter("ignore")
    app: Callable[..., Any] = build_app()
    try:
        result = app(args=args, standalone_mode=False, prog_name="strop")
    except SystemExit as leaving:
        # Typer turns a closed pipe into SystemExit(1) even outside its standalone mode.
        if isinstance(leaving.__context__, BrokenPipeError):
            raise BrokenPipeError from None
        return int(leaving.code or 0)
    except UsageFailure as failure:
        if os.environ.get("STROP_ERRORS") == "json":
            report_error(UsageError(failure.format_message()))
        else:
            failure.show(file=sys.stderr)
        return int(failure.exit_code)
    except StropError as error:
        report_error(error)
        return error.exit_status
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        from strop.core.streams import FULL_DISK

        if error.errno in FULL_DISK:
            report_error(OutputFailed(f"{error.filename or 'output'}: {error.strerror}"))
            return EX_IOERR
        return _our_bug()
    except MemoryError:
        _say("out of memory; a smaller batch, a smaller model or --dtype bfloat16 needs less")
        return EX_SOFTWARE
    except Exception:  # noqa: BLE001 (the last line of defence: a bug of ours, said as such)
        return _our_bug()
    return result if isinstance(result, int) else EX_OK


def _our_bug() -> int:
    import traceback

    traceback.print_exc()
    _say(f"this is a bug in strop {__version__}; please report the lines above with the command line")
    return EX_SOFTWARE


def command_name() -> str:
    """`strop advantage`, for messages."""
    named = [arg for arg in sys.argv[1:2] if arg in COMMANDS]
    return " ".join(["strop", *named])


def report_error(error: Exception) -> None:
    """One line on stderr, or one JSON object with --log-json or where STROP_ERRORS=json."""
    if Messages.as_json or os.environ.get("STROP_ERRORS") == "json":
        import json

        where = getattr(error, "where", None)
        _write_err(
            json.dumps(
                {
                    "tool": command_name(),
                    "level": "error",
                    "code": getattr(error, "exit_status", EX_SOFTWARE),
                    "file": where.file if where else None,
                    "line": where.line if where else None,
                    "field": getattr(error, "field", None),
                    "message": getattr(error, "message", str(error)),
                }
            )
        )
    else:
        _say(str(error))


def _say(message: str) -> None:
    if Messages.as_json:
        import json

        _write_err(json.dumps({"tool": command_name(), "level": "error", "message": message}))
    else:
        _write_err(f"{command_name()}: {message}")


def _write_err(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.buffer.write(line.encode("utf-8", "backslashreplace") + b"\n")
        sys.stderr.flush()


def _die(signum: int) -> NoReturn:
    """Ends the process by the signal itself, so that make, xargs and shell loops stop too."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    os._exit(128 + signum)


def _leave(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            _die(signal.SIGPIPE)
        except OSError:
            status = status or EX_IOERR
    # Interpreter shutdown with torch or vLLM loaded takes up to seconds and may hang; everything is flushed.
    os._exit(status)
