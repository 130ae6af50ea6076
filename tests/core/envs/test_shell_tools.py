"""The tools of the env `shell`, in a real sandbox: what they do, and what they say when they cannot."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.envs.shell_tools import GLOB_FILES, OUTPUT_CHARS, PROFILES, READ_CHARS, _glob_matcher, run_call
from strop.core.envs.tool_calls import BadCall, Call
from strop.core.sandbox.open import open_sandboxes
from strop.core.sandbox.protocol import SandboxSpec


@pytest.fixture(scope="module")
def sandbox():
    with open_sandboxes("process") as driver, driver.start(SandboxSpec()) as started:
        yield started


@pytest.fixture
def run(sandbox):
    def call(name, **arguments):
        return run_call(Call(name, arguments), sandbox)

    return call


def test_write_read_edit(run):
    assert run("Write", path="a/b.txt", content="one\ntwo\nthree\n").valid
    assert run("Read", path="a/b.txt").text == "     1\tone\n     2\ttwo\n     3\tthree"
    assert run("Read", path="a/b.txt", offset=2, limit=1).text == "     2\ttwo"
    assert run("Edit", path="a/b.txt", old_string="two\n", new_string="2\n").valid
    assert run("Read", path="a/b.txt").text.split() == ["1", "one", "2", "2", "3", "three"]
    assert run("Read", path="a/b.txt", offset=9).text == "(no lines)"


def test_an_edit_needs_one_place_unless_told(run):
    run("Write", path="e.txt", content="x x x")
    several = run("Edit", path="e.txt", old_string="x", new_string="y")
    assert not several.valid
    assert "occurs 3 times" in several.text
    assert run("Edit", path="e.txt", old_string="x", new_string="y", replace_all=True).valid
    assert run("Read", path="e.txt").text.endswith("y y y")
    for old, words in (("z", "does not occur"), ("", "is empty")):
        refused = run("Edit", path="e.txt", old_string=old, new_string="y")
        assert not refused.valid
        assert words in refused.text


def test_bytes_that_are_no_text_survive_an_edit(run, sandbox):
    sandbox.put("latin.txt", b"caf\xe9 here\n")
    assert run("Edit", path="latin.txt", old_string="here", new_string="there").valid
    assert sandbox.get("latin.txt") == b"caf\xe9 there\n"


def test_what_cannot_be_read(run, sandbox):
    sandbox.put("binary", b"\x7fELF\0\0\0")
    assert "is not text" in run("Read", path="binary").text
    assert "no file nowhere" in run("Read", path="nowhere").text
    for path in ("../../etc/passwd", "/etc/../root/x"):
        assert not run("Read", path=path).valid


def test_a_long_file_is_cut(run, sandbox):
    sandbox.put("long.txt", b"0123456789\n" * 10_000)
    text = run("Read", path="long.txt").text
    assert READ_CHARS < len(text) < READ_CHARS + 100
    assert text.endswith("characters left out]")


def test_glob(run):
    for name in ("g/a.py", "g/b.txt", "g/in/c.py", "g/in/deep/d.py"):
        run("Write", path=name, content="")
    assert run("Glob", pattern="*.py", path="g").text == "g/a.py"
    assert run("Glob", pattern="**/*.py", path="g").text.split() == ["g/a.py", "g/in/c.py", "g/in/deep/d.py"]
    assert run("Glob", pattern="g/**/[c-d].py").text.split() == ["g/in/c.py", "g/in/deep/d.py"]
    assert run("Glob", pattern="g/?.???").text == "g/b.txt"
    assert run("Glob", pattern="*.none", path="g").text == "No files match."
    assert not run("Glob", pattern="*", path="nowhere").valid
    run("Bash", command=f"mkdir many; cd many; seq {GLOB_FILES + 5} | xargs touch")
    lines = run("Glob", pattern="*", path="many").text.split("\n")
    assert (len(lines), lines[-1]) == (GLOB_FILES + 1, "(5 more)")


@given(
    st.lists(st.sampled_from(["a", "b", "/", "*", "?", "**/", "**", "[ab]"])),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=5),
)
@settings(max_examples=2000)
def test_a_glob_matches_what_a_plain_expression_matches(tokens, names):
    slow = {"*": "[^/]*", "?": "[^/]", "**/": "(?:[^/]+/)*", "**": ".*"}
    text = "".join(tokens)
    words = re.findall(r"(?:^|(?<=/))\*\*(?:/|$)|\[ab\]|.", text)
    plain = re.compile("".join(slow.get(word, word) for word in words))
    path = "/".join(names)
    assert _glob_matcher(text)(path) == bool(plain.fullmatch(path))


def test_a_glob_of_many_stars_takes_no_time(run, sandbox):
    """It would hold up every other episode, and the signal that is to stop them."""
    sandbox.put("many-stars/" + "a" * 200, b"")
    sandbox.put("/".join(["a"] * 200), b"")
    begun = time.monotonic()
    for pattern in ("**/" + "*a" * 40 + "b", "**/*a" * 40 + "/b", "**a" * 40 + "b"):
        assert run("Glob", pattern=pattern).text == "No files match."
    assert "at most 1000" in run("Glob", pattern="*a" * 50_000).text
    assert time.monotonic() - begun < 10


def test_bash(run):
    assert run("Bash", command="echo out; echo err >&2; exit 3").text == "exit code: 3\nstdout:\nout\n\nstderr:\nerr\n"
    assert run("Bash", command="true").text == "exit code: 0"
    assert run("Bash", command="a=(x y); echo ${a[1]}").text == "exit code: 0\nstdout:\ny\n"
    assert "timed out after 0.2 s" in run("Bash", command="sleep 9", timeout=0.2).text
    assert "timed out after 1.2 s" in run("Bash", command="sleep 9", timeout=1200).text


def test_a_long_output_is_cut(run):
    text = run("Bash", command="yes | head -c 100000000").text
    assert len(text) < OUTPUT_CHARS + 100
    assert text.endswith("characters left out]")


def test_every_path_is_cut(run, sandbox):
    """A list of long names, words about a long path, and what a command said before its time was up.

    mini-swe-agent #639.
    """
    assert run("Bash", command=f"mkdir names; cd names; for i in $(seq {GLOB_FILES}); do : > {'n' * 240}$i; done").valid
    for name, arguments in (
        ("Glob", {"pattern": "**", "path": "names"}), ("Read", {"path": "a/../" * 50_000}),
        ("Glob", {"pattern": "*", "path": "\0" * 50_000}), ("Bash", {"command": "yes", "timeout": 1}),
        ("Edit", {"path": "\0" * 50_000, "old_string": "a", "new_string": "b"}),
    ):  # fmt: skip
        text = run(name, **arguments).text
        assert len(text) < OUTPUT_CHARS + 100
        assert text.endswith("characters left out]")


def test_a_command_that_cannot_be_one_is_the_policys_mistake(run):
    for command in ("echo a\0b", "x" * (128 << 10), "\u00e9" * (64 << 10)):
        refused = run("Bash", command=command)
        assert not refused.valid
        assert "without NUL" in refused.text
    assert run("Bash", command="true " + "x" * ((128 << 10) - 6)).text == "exit code: 0"


def test_the_time_of_the_episode_bounds_a_command(sandbox):
    result = run_call(Call("Bash", {"command": "sleep 9"}), sandbox, seconds_left=0.2)
    assert "timed out after 0.2 s" in result.text


def test_a_call_that_cannot_be_run_is_answered(sandbox):
    result = run_call(BadCall("There is no tool 'Fly'."), sandbox)
    assert (result.text, result.valid) == ("There is no tool 'Fly'.", False)


def test_every_tool_of_a_profile_is_there():
    from strop.core.envs.shell_tools import _RUN

    for profile in PROFILES.values():
        assert {tool["function"]["name"] for tool in profile.tools} == set(profile.schemas)
        assert set(profile.schemas) <= set(_RUN)
