"""strop synth-tasks: makes tasks out of a seed, or out of a file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from strop.cli.session import Session, tool
from strop.core.errors import DataError, OutputFailed, UsageError
from strop.core.records import Record, Task
from strop.core.tasks.families import FAMILIES, BadRow, Family, FamilyOptions, open_family

DEFAULT_NUMBER = 100
# A family that takes seconds a task must not keep its first tasks in a buffer.
FLUSH_EVERY_S = 0.25

FamilyName = Annotated[
    str | None,
    typer.Argument(
        metavar="FAMILY",
        help="arithmetic, countdown, reasoning-gym:NAME, file:PATH, with a slice file:PATH[10:20], harbor:DIR, "
        "bfcl:CATEGORY, textworld:GAME, or records:PATH.",
        show_default=False,
    ),
]
Number = Annotated[
    int | None,
    typer.Option(
        "-n", "--number", min=0, help="How many tasks. Unset: all rows of a file, else 100.", show_default=False
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Task i depends on this, the family with its options, and i alone.")]
Skip = Annotated[int, typer.Option("--skip", min=0, help="Begin with this task; to continue an earlier call.")]
List = Annotated[bool, typer.Option("--list", help="List the families, with what stands behind their colon, and exit.")]
Terms = Annotated[
    str | None,
    typer.Option(
        "--terms",
        metavar="LO:HI",
        help="How many numbers. arithmetic: unset is 2:2; countdown: unset is 3:4.",
        show_default=False,
    ),
]
Range = Annotated[
    str | None,
    typer.Option(
        "--range",
        metavar="LO:HI",
        help="The numbers, both bounds included. arithmetic: unset is 1:49; countdown: unset is 1:50.",
        show_default=False,
    ),
]
Operators = Annotated[
    str | None,
    typer.Option(
        "--operators",
        metavar="LIST",
        help="Between commas. arithmetic: some of +,-,* (unset: +); countdown: some of +,-,*,/ (unset: all).",
        show_default=False,
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="The prompt. arithmetic: few-shot (unset) or chat; countdown: chat (unset) or few-shot; reasoning-gym: "
        "chat (unset) or text; file: text (unset) or chat.",
        show_default=False,
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target", metavar="LO:HI", help="countdown: bounds of the target. Unset: 1:100.", show_default=False
    ),
]
UseAll = Annotated[
    bool | None,
    typer.Option("--use-all", help="countdown: each number must be used. Unset: at most once.", show_default=False),
]
Division = Annotated[
    str | None,
    typer.Option(
        "--division",
        help="countdown: exact (unset; every quotient is whole) or rational (fractions on the way).",
        show_default=False,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="reasoning-gym, textworld: a setting of the data set or the game (several times).",
        show_default=False,
    ),
]
Fields = Annotated[
    list[str] | None,
    typer.Option(
        "--field",
        metavar="NAME=COLUMN",
        help="file: which column or key is the prompt, reference or id (several times).",
        show_default=False,
    ),
]
Template = Annotated[
    str | None,
    typer.Option(
        "--template", metavar="TEXT", help="file: the prompt, with {prompt} for the question.", show_default=False
    ),
]
VerifierName = Annotated[
    str | None,
    typer.Option(
        "--verifier", metavar="NAME", help="file: what judges the responses. Unset: exact.", show_default=False
    ),
]
VerifierOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--verifier-option",
        metavar="KEY=VALUE",
        help="file, arithmetic: an option of the verifier, e.g. where=last (several times).",
        show_default=False,
    ),
]
Split = Annotated[
    str,
    typer.Option(
        "--split",
        help="all, or a part of all questions: train or heldout. The parts never share a question, whatever the seed.",
    ),
]
HeldoutShare = Annotated[
    float | None,
    typer.Option(
        "--heldout-share",
        help="The size of the held-out part, the same in both calls. Unset: 0.1.",
        show_default=False,
    ),
]
Folders = Annotated[
    Path | None,
    typer.Option(
        "--folders", metavar="DIR", help="Write each task as a folder in Harbor's layout, too.", show_default=False
    ),
]


@tool(writes=("task",))
def command(
    io: Session,
    family: FamilyName = None,
    number: Number = None,
    seed: Seed = 0,
    skip: Skip = 0,
    terms: Terms = None,
    range_: Range = None,
    operators: Operators = None,
    format_: Format = None,
    target: Target = None,
    use_all: UseAll = None,
    division: Division = None,
    settings: Settings = None,
    fields: Fields = None,
    template: Template = None,
    verifier: VerifierName = None,
    verifier_option: VerifierOptions = None,
    split: Split = "all",
    heldout_share: HeldoutShare = None,
    folders: Folders = None,
    list_: List = False,
) -> None:
    """Make tasks with known answers, the same for the same seed.

    A task holds a prompt, a reference (never shown to the policy), the verifier that judges responses, and hints for
    sampling. Nothing is read from stdin. Task i is the same whatever -n and --skip, so -n 100 and then --skip 100
    never repeat or leave out a task. An option that does not apply to the family is an error.

    --split parts all questions by a hash of the question alone. So a test set made with --split heldout, under any
    seed, range or format, has no question in common with tasks made with --split train at the same --heldout-share.

    The verifiers: number, exact, choice, regex, math, countdown, reasoning-gym and command. A task with the verifier
    command runs a program of your own: {"task", "response"} on its stdin, {"reward", "success", "details"} on its
    stdout. Tasks for agents name the verifier tests (harbor) or env (bfcl, textworld): what the agent did is judged,
    and a response alone cannot be.

    bfcl makes conversations with a user out of the package bfcl-eval, for the env functions: multi_turn_base,
    multi_turn_miss_func, multi_turn_miss_param, multi_turn_long_context, 200 cases each. textworld makes text
    adventures, as many as you like: tw-simple, tw-coin_collector, tw-treasure_hunter, tw-cooking, custom.

    \b
    Examples:
      strop synth-tasks arithmetic -n 200 --seed 1 --range 1:49
      strop synth-tasks arithmetic -n 200 --split heldout > test.jsonl
      strop synth-tasks countdown -n 50 --terms 4 --use-all
      strop synth-tasks reasoning-gym:chain_sum -n 50 --set min_terms=2 --set max_terms=3
      strop synth-tasks 'file:gsm8k.jsonl[0:100]' --field prompt=question --field reference=answer \\
        --format chat --verifier number --verifier-option where=last
      strop synth-tasks bfcl:multi_turn_base --split heldout
      strop synth-tasks textworld:tw-cooking -n 50 --set recipe=2 --set take=2 --set cook=true --set go=6
      strop synth-tasks harbor:terminal-bench > tasks.jsonl
      strop synth-tasks records:tasks.jsonl --folders edited -q > /dev/null
      strop synth-tasks --list

    \b
    Input fields:
      none; file:PATH reads JSONL (one object a line), or CSV with a header (.csv, .tsv)

    \b
    Output fields:
      task: id, prompt, env, verifier, reference, sandbox or world, sampling, provenance

    \b
    Memory:
      one task; for a file with --field id=NAME 100 bytes a task.
    """
    if list_:
        if family is not None:
            raise UsageError("--list takes no FAMILY")
        _list(io)
        return
    if family is None:
        raise UsageError("which FAMILY? (strop synth-tasks --list names them)")
    options = FamilyOptions(
        terms=_pair("--terms", terms), range=_pair("--range", range_), target=_pair("--target", target),
        operators=None if operators is None else tuple(operators.split(",")),
        use_all=use_all or None, division=division, format=format_, template=template,
        fields=tuple(_key_value("--field", text) for text in fields or ()),
        verifier=verifier, verifier_options=_values("--verifier-option", verifier_option),
        settings=_values("--set", settings), split=split, heldout_share=heldout_share,
    )  # fmt: skip
    opened = open_family(family, options)
    try:
        _make(io, opened, options, number=number, seed=seed, skip=skip, folders=folders)
    finally:
        opened.close()


def _make(
    io: Session, family: Family, options: FamilyOptions, *, number: int | None, seed: int, skip: int,
    folders: Path | None,
) -> None:  # fmt: skip
    provenance = {"family": family.spec, "seed": seed, **options.given()}
    if number is None and not family.is_finite:
        number = DEFAULT_NUMBER
    flushed = time.monotonic()
    made = 0
    tasks = family.tasks(seed, skip)
    while number is None or made < number:
        task = next(tasks, None)
        if task is None:
            break
        made += 1
        if isinstance(task, BadRow):
            io.reject(task, Record("row", {}, task.where, task.text))
            continue
        if folders is not None and not _write_folder(io, task, folders):
            continue
        if isinstance(task, Record):
            io.write(task)
        else:
            io.emit(Record.make("task", task), provenance)
        while family.notices:
            io.warn(family.notices.pop(0))
        now = time.monotonic()
        if now - flushed > FLUSH_EVERY_S:
            io.flush()
            flushed = now
    if number is not None and made < number:
        io.warn(f"{made} tasks instead of {number}: the file has no more rows")
    # Said at the end, so that `| head` stays without a word.
    if family.num_distinct is not None and family.num_distinct < skip + made:
        io.warn(f"there are only {family.num_distinct} different questions with these options: later tasks repeat them")


def _write_folder(io: Session, task: Task | Record, folders: Path) -> bool:
    """Writes the task as a folder; whether that could be done."""
    from strop.core.tasks.harbor_folders import write_folder

    record = task if isinstance(task, Record) else Record.make("task", task)
    try:
        write_folder(record.view(Task), folders)
    except DataError as error:
        io.reject(record.bad(error.message, error.field), record)
        return False
    except OSError as error:
        raise OutputFailed(f"{folders}: {error.strerror}") from None
    return True


def _list(io: Session) -> None:
    """Plain families first, so that they are there even where reasoning-gym is not."""
    from strop.core.tasks.bfcl import CATEGORIES
    from strop.core.tasks.textworld import GAMES

    kinds = {"bfcl": CATEGORIES, "textworld": tuple(GAMES)}
    for name, entry in FAMILIES.items():
        spellings = [f"{name}:{kind}" for kind in kinds[name]] if name in kinds else [entry.spelling]
        for spelling in spellings if name != "reasoning-gym" else ():
            io.write(Record.make("family", {"name": spelling, "about": entry.about}))
    io.flush()
    from strop.core.tasks.gym import gym_names

    for name in gym_names():
        io.write(Record.make("family", {"name": f"reasoning-gym:{name}", "about": FAMILIES["reasoning-gym"].about}))


def _pair(flag: str, text: str | None) -> tuple[int, int] | None:
    """LO:HI, or one number for both."""
    if text is None:
        return None
    low, colon, high = text.partition(":")
    try:
        return int(low), int(high if colon else low)
    except ValueError:
        raise UsageError(f"{flag} {text!r}: expected LO:HI, two whole numbers") from None


def _key_value(flag: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals or not value:
        raise UsageError(f"{flag} {text!r}: expected NAME=VALUE")
    return key, value


def _values(flag: str, texts: list[str] | None) -> tuple[tuple[str, Any], ...]:
    """Values are JSON where they can be read so, else texts."""
    pairs = []
    for key, value in (_key_value(flag, text) for text in texts or ()):
        try:
            pairs.append((key, msgspec.json.decode(value)))
        except msgspec.DecodeError:
            pairs.append((key, value))
    return tuple(pairs)
