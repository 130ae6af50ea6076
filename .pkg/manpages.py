"""Writes man/*.1 and man/*.5 from the commands themselves: `python .pkg/manpages.py [FOLDER]`.

A page holds what the command's Click definition and docstring say (cli/helptext.py splits it) and a written part,
`.pkg/man/NAME.txt`: sections under `# TITLE`, paragraphs between blank lines, indented lines kept as they are. The
order of sections is fixed below; a test regenerates the pages and compares.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec

from strop import __version__
from strop.cli import helptext
from strop.cli.app import load_command
from strop.cli.main import COMMANDS
from strop.cli.shared_options import SHARED
from strop.core import records
from strop.core.audit.pairs import PairFields

ROOT = Path(__file__).resolve().parent.parent
PARTS = Path(__file__).resolve().parent / "man"
ORDER = (
    "NAME", "SYNOPSIS", "DESCRIPTION", "COMMANDS", "KINDS", "OPTIONS", "INPUT", "OUTPUT", "MEMORY", "EXIT STATUS",
    "ENVIRONMENT", "FILES", "EXAMPLES", "NOTES", "SEE ALSO", "EVIDENCE",  # a method's page ends with its evidence
)  # fmt: skip
TITLES = {"Input fields": "INPUT", "Output fields": "OUTPUT", "Memory": "MEMORY", "Examples": "EXAMPLES"}
STATUSES = (
    ("0", "Done, also for empty input."),
    ("1", "Done, but records were set aside (\\-\\-keep\\-going), or what was asked is not so."),
    ("2", "Usage: an option, a value or their combination; stdin is a terminal."),
    ("65", "Bad data: the message names file, line and field. Records before it were written."),
    ("66", "An input file cannot be opened or read."),
    ("69", "A part or a service is missing: a package, a model, a GPU, a server. The message says what brings it."),
    ("70", "A bug of strop: a traceback and how to report it."),
    ("74", "The output cannot be written: disk full, no permission."),
    ("130, 141, 143", "As the shell shows an end by SIGINT, SIGPIPE or SIGTERM, after finished records were kept."),
)  # fmt: skip
Sections = dict[str, list[str]]


def dashed(name: str) -> str:
    """Hyphens that stay hyphens when they are copied from a terminal."""
    return name.replace("-", "\\-")


def ascii_only(text: str) -> str:
    """Characters beyond ASCII as roff names them."""
    return "".join(char if ord(char) < 128 else f"\\[u{ord(char):04X}]" for char in text)


def escaped(text: str) -> str:
    """Prose for roff: backslashes, the hyphens of options, `names` in italics."""
    text = text.replace("\\", "\\e")
    text = re.sub(r"(?<![\w-])-{1,2}(?=\w)[\w-]*", lambda match: dashed(match.group()), text)
    return ascii_only(re.sub(r"`([^`\n]+)`", r"\\fI\1\\fR", text))


def filled(text: str) -> list[str]:
    """A paragraph as source lines of at most 79 columns, none of which looks like a macro."""
    lines = textwrap.wrap(text, 79, break_on_hyphens=False, break_long_words=False)
    return [f"\\&{line}" if line[:1] in ".'" else line for line in lines]


def verbatim(lines: list[str]) -> list[str]:
    """Lines kept as they are: commands, tables. Quotes and hyphens stay what a shell takes."""
    kept = []
    for line in textwrap.dedent("\n".join(lines)).split("\n"):
        text = dashed(line.replace("\\", "\\e")).replace("`", "\\(ga").replace("'", "\\(aq")
        kept.append(ascii_only(f"\\&{text}" if text[:1] == "." else text))
    return [".PP", ".RS 4", ".EX", *kept, ".EE", ".RE"]


def entry(term: str, text: list[str]) -> list[str]:
    """A tagged paragraph."""
    return [".TP", term, *text]


def written(name: str) -> Sections:
    """The written part of a page, {} if there is none."""
    path = PARTS / f"{name}.txt"
    sections: Sections = {}
    if not path.exists():
        return sections
    for chunk in re.split(r"^# ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, _, body = chunk.partition("\n")
        lines: list[str] = []
        for block in re.split(r"\n\s*\n", body.strip("\n")):
            if block.startswith("  "):
                lines += verbatim(block.split("\n"))
            elif block.startswith("- "):
                term, _, text = block[2:].partition(": ")
                lines += entry(f"\\fB{escaped(term)}\\fR", filled(escaped(" ".join(text.split()))))
            elif block.strip():
                lines += [".PP", *filled(escaped(" ".join(block.split())))]
        sections[title.strip()] = lines
    return sections


def option_lines(command: Any) -> list[str]:
    """The options, those that every tool has last, under their own heading."""
    context = command.context_class(command, info_name=command.name, **command.context_settings)
    panels: dict[str, list[str]] = {"": [], SHARED: []}
    for parameter in command.get_params(context):
        if parameter.param_type_name != "option":
            continue
        spellings, text = parameter.get_help_record(context)
        names, _, metavar = (spellings, "", "") if parameter.is_flag else spellings.rpartition(" ")
        term = re.sub(r"--?[\w-]+", lambda match: f"\\fB{dashed(match.group())}\\fR", names)
        term += f" \\fI{dashed(metavar)}\\fR" if metavar else ""
        panels[SHARED if parameter.rich_help_panel == SHARED else ""] += entry(term, filled(escaped(text)))
    shared = [f'.SS "{SHARED}"', *panels[SHARED]] if panels[SHARED] else []
    return panels[""] + shared


def docstring_sections(text: helptext.HelpText) -> Sections:
    """DESCRIPTION and the titled blocks of a docstring."""
    sections: Sections = {"DESCRIPTION": []}
    for paragraph in text.paragraphs:
        kept = "\n" in paragraph
        sections["DESCRIPTION"] += verbatim(paragraph.split("\n")) if kept else [".PP", *filled(escaped(paragraph))]
    for title, lines in text.sections.items():
        if title == helptext.EXAMPLES:
            commands = [line for command in helptext.commands(lines) for line in helptext.broken(command, 72)]
            sections["EXAMPLES"] = verbatim(commands)
            continue
        body = []
        for item in helptext.entries(lines):
            name, _, fields = item.partition(": ")
            is_entry = helptext.ENTRY.match(item) and title != helptext.MEMORY
            body += entry(f"\\fB{escaped(name)}\\fR", filled(escaped(fields))) if is_entry else [
                ".PP", *filled(escaped(item))
            ]  # fmt: skip
        if title in TITLES:
            sections[TITLES[title]] = body
        else:
            sections["DESCRIPTION"] += [f'.SS "{escaped(title)}"', *body]
    return sections


def page(name: str, section: int, sections: Sections, extra: Sections) -> str:
    """A whole page, its sections in the fixed order; written parts follow what is generated."""
    for title, lines in extra.items():
        if title not in ORDER:
            raise SystemExit(f"{name}.txt: section {title!r} is none of {', '.join(ORDER)}")
        sections[title] = sections.get(title, []) + lines
    head = [
        '.\\" Written by .pkg/manpages.py; edit the command or .pkg/man instead.',
        f'.TH "{name.upper()}" "{section}" "{release_date()}" "strop {__version__}" "strop"',
    ]
    body: list[str] = []
    for title in ORDER:
        if sections.get(title):
            lines = sections[title]
            # A paragraph macro right after a heading is superfluous.
            body += [f'.SH "{title}"', *(lines[1:] if lines[0] == ".PP" else lines)]
    return "\n".join([*head, *body]) + "\n"


def release_date() -> str:
    """The date of the newest release in the changelog, so that pages do not change by themselves."""
    found = re.search(r"^## .*(\d{4}-\d{2}-\d{2})$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    return found.group(1) if found else ""


def see_also(name: str) -> list[str]:
    """The other pages."""
    pages = [("strop", 1), *((f"strop-{command}", 1) for command in COMMANDS), ("strop-records", 5)]
    lines = [f".BR {dashed(page)} ({section})," for page, section in pages if page != name]
    return [*lines[:-1], lines[-1].rstrip(",")]


def exit_statuses() -> list[str]:
    """The statuses of every tool."""
    return [line for status, text in STATUSES for line in entry(f"\\fB{status}\\fR", filled(text))]


def command_page(name: str) -> str:
    """The page of one command."""
    command = load_command(name)
    text = helptext.parse(command.help)
    prefix = f"STROP_{name.upper().replace('-', '_')}"
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    usage = [f"\\fBstrop {dashed(name)}\\fR", "[\\fIOPTIONS\\fR]"]
    usage += ["[\\fIFILE\\fR]..." if a.name == "files" else f"\\fI{a.metavar or a.name.upper()}\\fR" for a in arguments]
    sections = docstring_sections(text)
    sections |= {
        "NAME": [f"strop\\-{dashed(name)} \\- {escaped(text.summary.rstrip('.'))}"],
        "SYNOPSIS": [" ".join(usage)],
        "OPTIONS": option_lines(command),
        "EXIT STATUS": exit_statuses(),
        "ENVIRONMENT": [
            *entry(f"\\fB{prefix}_\\fIOPTION\\fR", filled(
                f"A value for any option, its name in capitals with _ for each hyphen; the command line wins. "
                f"Several values are separated by spaces. For example {prefix}_KEEP_GOING=1.")),
            *entry("\\fBSTROP_CONFIG\\fR", ["A file of defaults, below both; see", ".BR strop (1)."]),
        ],
        "SEE ALSO": see_also(f"strop-{name}"),
    }  # fmt: skip
    return page(f"strop-{name}", 1, sections, written(f"strop-{name}"))


def main_page() -> str:
    """The overview, strop(1)."""
    table: list[str] = []
    for name, (_, text) in COMMANDS.items():
        table += [".TP", f".BR strop\\-{dashed(name)} (1)", *filled(escaped(text))]
    sections: Sections = {
        "NAME": ["strop \\- Unix tools for loops in which a language model improves on its own work"],
        "SYNOPSIS": ["\\fBstrop\\fR \\fICOMMAND\\fR [\\fIOPTIONS\\fR] [\\fIFILE\\fR]..."],
        "COMMANDS": table,
        "EXIT STATUS": exit_statuses(),
        "SEE ALSO": see_also("strop"),
    }
    return page("strop", 1, sections, written("strop"))


def field_texts() -> dict[str, str]:
    """What each field means, from the section FIELDS of the written part: `- kind.field: text`."""
    body = (PARTS / "strop-records.txt").read_text(encoding="utf-8").partition("\n# FIELDS\n")[2]
    body = re.split(r"^# ", body, flags=re.MULTILINE)[0]
    pairs = (item.partition(": ") for item in re.split(r"^- ", body, flags=re.MULTILINE)[1:])
    return {name: " ".join(text.split()) for name, _, text in pairs}


def type_words(annotation: str) -> str:
    """A Python annotation in the words of JSON."""
    text = annotation.replace(" | UnsetType", "").replace("dict[str, Any]", "object").replace("Any", "any value")
    text = re.sub(r"list\[(\w+)\]", r"list of \1", text).replace(" | ", " or ")
    words = {"str": "text", "int": "integer", "float": "number", "bool": "boolean", "None": "null"}
    return re.sub(r"\w+", lambda match: words.get(match.group(), match.group()), text)


def records_page() -> str:
    """The records, strop-records(5): each kind's fields from the structs that read them."""
    texts, undescribed = field_texts(), []
    lines: list[str] = []
    inner = {struct.__name__.lower(): struct for struct in (records.Chunk, records.Step, records.Sampling)}
    titles = {name: f"{name} (part of a rollout)" for name in inner} | {"pairs": "example (as audit-prune reads it)"}
    for name, view in {**records.VIEWS, **inner, "pairs": PairFields}.items():
        lines.append(f'.SS "{titles.get(name, name)}"')
        for i, paragraph in enumerate(re.split(r"\n\s*\n", (view.__doc__ or "").strip())):
            lines += [*([".PP"] if i else []), *filled(escaped(" ".join(paragraph.split())))]
        for field in msgspec.structs.fields(view):
            kind = type_words(str(view.__annotations__[field.name]))
            text = texts.pop(f"{name}.{field.encode_name}", None)
            undescribed += [] if text else [f"{name}.{field.encode_name}"]
            lines += entry(f"\\fB{field.encode_name}\\fR ({kind})", filled(escaped(text or "")))
    if texts or undescribed:
        raise SystemExit(f"strop-records.txt: FIELDS lacks {undescribed} and has too many: {list(texts)}")
    extra = written("strop-records")
    del extra["FIELDS"]
    sections: Sections = {
        "NAME": ["strop\\-records \\- the records that the tools of strop read and write"],
        "DESCRIPTION": extra.pop("DESCRIPTION"),
        "KINDS": lines,
        "SEE ALSO": see_also("strop-records"),
    }
    return page("strop-records", 5, sections, extra)


def pages() -> dict[str, str]:
    """Every page by its file name."""
    return {
        "strop.1": main_page(),
        **{f"strop-{name}.1": command_page(name) for name in COMMANDS},
        "strop-records.5": records_page(),
    }


def main() -> None:
    """Writes the pages into the folder named, man/ by default."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "man"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
