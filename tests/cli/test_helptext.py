"""Docstrings as help: sections, wrapping, examples broken where a shell allows it."""

import shlex

from hypothesis import given
from hypothesis import strategies as st

from strop.cli.helptext import broken, commands, entries, parse, rendered

DOCSTRING = """Do a thing.

It does it well,
and twice.

\b
Examples:
  strop do --this one | strop do --that two \\
    | head -n 1
  strop do

\b
Input fields:
  task: id,
  prompt
  rollout (with --x): reward

\b
Memory:
  one record.
"""


def test_a_docstring_falls_into_its_sections():
    text = parse(DOCSTRING)
    assert text.summary == "Do a thing."
    assert text.paragraphs == ["It does it well, and twice."]
    assert list(text.sections) == ["Examples", "Input fields", "Memory"]
    assert entries(text.sections["Input fields"]) == ["task: id, prompt", "rollout (with --x): reward"]
    assert commands(text.sections["Examples"]) == ["strop do --this one | strop do --that two | head -n 1", "strop do"]


def test_rendered_help_keeps_to_the_width():
    for width in (40, 60, 78):
        assert max(map(len, rendered(parse(DOCSTRING), width).splitlines())) <= width


def test_a_pipe_between_quotes_is_no_place_to_break():
    command = "strop do --this-is-long value | jq 'select(.a | .b) | --not-an-option' | strop done --that other"
    lines = broken(command, 60)
    assert any("'select(.a | .b) | --not-an-option'" in line for line in lines)
    assert lines[:-1] == [line for line in lines if line.endswith(" \\")]


words = st.lists(st.sampled_from(["--alpha x", "--beta", "file.jsonl", "'a | b'", "-n 8", "value"]), max_size=8)


@given(st.lists(words, min_size=1, max_size=5), st.integers(30, 80))
def test_a_broken_command_is_the_same_command(stages, width):
    command = " | ".join(" ".join(["strop", *stage]) for stage in stages)
    joined = "\n".join(broken(command, width)).replace("\\\n", "")
    assert shlex.split(joined) == shlex.split(command)
