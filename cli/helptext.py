"""The text of a command's docstring: split into its sections once, for --help and for the manual page alike.

A docstring is paragraphs, then blocks under `\\b` with a title that ends in a colon: `Examples:`, `Input fields:`,
`Output fields:`, `Memory:`, or any other. Authors need not count columns: everything is wrapped here, and a long
example is broken at its pipes.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field

KEEP_LINES = "\b"
ENTRY = re.compile(r"[\w./-]+( \([^)]*\))?: ")
EXAMPLES, MEMORY = "Examples", "Memory"


@dataclass(frozen=True, slots=True)
class HelpText:
    """The summary line, the paragraphs below it, and the lines of each titled block, without common indentation."""

    summary: str
    paragraphs: list[str] = field(default_factory=list)
    sections: dict[str, list[str]] = field(default_factory=dict)


def parse(help_text: str) -> HelpText:
    """Splits a docstring (cleaned of its common indentation) at blank lines."""
    text = HelpText("")
    for block in re.split(r"\n\s*\n", help_text.strip()):
        lines = block.split("\n")
        keeps = lines[0].strip() == KEEP_LINES
        lines = lines[1:] if keeps else lines
        if keeps and lines[0].rstrip().endswith(":"):
            text.sections[lines[0].strip()[:-1]] = textwrap.dedent("\n".join(lines[1:])).split("\n")
        else:
            text.paragraphs.append("\n".join(lines) if keeps else " ".join(line.strip() for line in lines))
    summary = text.paragraphs.pop(0) if text.paragraphs else ""
    return HelpText(summary, text.paragraphs, text.sections)


def entries(lines: list[str]) -> list[str]:
    """The lines of a block of fields as whole entries: `kind: field, field` and what continues it."""
    joined: list[str] = []
    for line in lines:
        if joined and not ENTRY.match(line):
            joined[-1] = f"{joined[-1]} {line.strip()}"
        else:
            joined.append(line.strip())
    return joined


def commands(lines: list[str]) -> list[str]:
    """The lines of the examples as whole commands; a backslash at the end of a line continues it."""
    joined: list[str] = []
    continues = False
    for line in lines:
        text = line.strip()
        if continues:
            joined[-1] = f"{joined[-1]} {text}"
        else:
            joined.append(text)
        continues = joined[-1].endswith("\\")
        if continues:
            joined[-1] = joined[-1][:-1].rstrip()
    return joined


def broken(command: str, width: int) -> list[str]:
    """A command in lines of at most `width` columns where its pipes and options allow, joined by backslashes."""
    pieces: list[str] = []
    for piece in _split(command, " | "):
        text = f"  | {piece}" if pieces else piece
        parts = _split(text, " --") if len(text) > width - 2 else [text]
        line = parts[0]
        for part in parts[1:]:
            if len(line) + len(part) + 3 > width - 2:
                pieces.append(line)
                line = f"    --{part}"
            else:
                line = f"{line} --{part}"
        pieces.append(line)
    if len(command) <= width:
        return [command]
    lines = [pieces[0]]
    for piece in pieces[1:]:
        # Short stages of a pipe share a line.
        if piece.startswith("  | ") and len(lines[-1]) + len(piece) <= width - 3:
            lines[-1] = f"{lines[-1]} {piece.strip()}"
        else:
            lines.append(piece)
    return [f"{line} \\" for line in lines[:-1]] + [lines[-1]]


def _split(text: str, separator: str) -> list[str]:
    """Splits at the separator, but not between quotes."""
    parts = [""]
    for piece in text.split(separator):
        is_open = parts[-1].count("'") % 2 or parts[-1].count('"') % 2
        if parts == [""]:
            parts[0] = piece
        elif is_open:
            parts[-1] += separator + piece
        else:
            parts.append(piece)
    return parts


def rendered(text: HelpText, width: int) -> str:
    """The whole for a terminal of `width` columns, indented by two."""
    blocks = [_wrapped(text.summary, width, "  ", "  ")]
    for paragraph in text.paragraphs:
        kept = "\n" in paragraph
        blocks.append(textwrap.indent(paragraph, "  ") if kept else _wrapped(paragraph, width, "  ", "  "))
    for title, lines in text.sections.items():
        if title == EXAMPLES:
            body = "\n".join(f"    {line}" for command in commands(lines) for line in broken(command, width - 4))
        else:
            hanging = "    " if title == MEMORY else "      "
            body = "\n".join(_wrapped(entry, width, "    ", hanging) for entry in entries(lines))
        blocks.append(f"  {title}:\n{body}")
    return "\n\n".join(blocks) + "\n"


def _wrapped(text: str, width: int, first: str, rest: str) -> str:
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False
    )
