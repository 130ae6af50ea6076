"""Prompts as text files, which a user can copy, edit and name with --prompts.

A template is text with fields in braces, {query}; a brace itself is written twice. Each field is replaced once by what
it names, and braces that come in with what it names stay as they are.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from pathlib import Path

from strop.core.errors import DataError, InputMissing, OutputFailed, Where


class Templates:
    """Templates by name, `fields` saying which fields each may name: those of `folder`, else those of `ours`."""

    def __init__(self, ours: Path, fields: Mapping[str, frozenset[str]], folder: Path | None = None) -> None:
        """Reads and checks them. Raises InputMissing for a folder that is not there, DataError for a bad template."""
        found = {name: ours / f"{name}.txt" for name in fields}
        if folder is not None:
            if not folder.is_dir():
                raise InputMissing(f"{folder}: no such folder")
            for path in sorted(folder.glob("*.txt")):
                if path.stem not in fields:
                    message = f"no template has this name; they are {', '.join(fields)}"
                    raise DataError(message, where=Where(str(path), 1))
                found[path.stem] = path
        self._templates = {name: _read(path, fields[name]) for name, path in found.items()}

    def fill(self, name: str, values: Mapping[str, str]) -> str:
        """The prompt of template `name`, without the space around it."""
        return "".join(
            literal + ("" if field is None else values[field]) for literal, field in self._templates[name]
        ).strip()


def copy_templates(ours: Path, names: Iterable[str], folder: Path) -> list[Path]:
    """Writes our templates into a folder, to be edited; what is there already is kept. Raises OutputFailed."""
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            path = folder / f"{name}.txt"
            if not path.exists():
                path.write_bytes((ours / path.name).read_bytes())
                written.append(path)
    except OSError as error:
        raise OutputFailed(f"{folder}: {error.strerror}") from None
    return written


def _read(path: Path, known: frozenset[str]) -> list[tuple[str, str | None]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputMissing(f"{path}: {error.strerror}") from None
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise DataError("not UTF-8", where=Where(str(path), data.count(b"\n", 0, error.start) + 1)) from None
    parts: list[tuple[str, str | None]] = []
    line = 1
    try:
        for literal, field, form, conversion in string.Formatter().parse(text):
            line += literal.count("\n")
            if field is not None and (field not in known or form or conversion):
                message = f"unknown field; known: {', '.join(sorted(known))} (a brace itself is written twice)"
                raise DataError(message, where=Where(str(path), line), field=f"{{{field}}}")
            parts.append((literal, field))
    except ValueError as error:
        raise DataError(f"{error} (a brace itself is written twice)", where=Where(str(path), _bad_line(text))) from None
    return parts


def _bad_line(text: str) -> int:
    """The first line at whose end the text up to there cannot be parsed, though it could be a line before."""
    lines = text.split("\n")
    for number in range(len(lines), 0, -1):
        try:
            list(string.Formatter().parse("\n".join(lines[: number - 1])))
        except ValueError:
            continue
        return number
    return 1
