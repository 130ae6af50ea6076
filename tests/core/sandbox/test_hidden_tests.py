"""Hidden tests are not there while the agent acts, and what it does to them is seen."""

from __future__ import annotations

import pytest

from strop.core.sandbox.hidden import run_hidden
from strop.core.sandbox.protocol import SandboxRefused

TESTS = {"check.sh": b"grep -q done /app/answer", "data/expected": b"42\n"}


@pytest.fixture
def folder(box):
    """Where the tests go, as commands see it."""
    return box.path("/tests")


def run(box, command='sh "$T/check.sh"', files=TESTS, **options):
    return run_hidden(box, files, "/tests", command, env={"T": box.path("/tests")}, timeout_s=10.0, **options)


def check(box):
    """The tests' script, with the working folder as commands see it."""
    return {**TESTS, "check.sh": f"grep -q done {box.path('/app/answer')}".encode()}


def test_they_are_not_on_disk_while_the_agent_runs(box, folder):
    found = box.exec(f"find {folder} . {box.path('/tmp')} -name 'check.sh' 2>/dev/null; echo done >answer")
    assert found.stdout == b""
    outcome = run(box, files=check(box))
    assert (outcome.result.exit_code, outcome.tampered, outcome.planted) == (0, (), ())


def test_what_the_agent_left_running_does_not_see_them(box, folder):
    box.exec(
        f"(setsid sh -c 'while :; do cp {folder}/* . 2>/dev/null; sleep 0.02; done' >/dev/null 2>&1 &) ; sleep 0.1"
    )
    outcome = run(box, "sleep 0.3")
    assert (outcome.result.exit_code, outcome.tampered, outcome.planted) == (0, (), ())
    assert b"check.sh" not in box.exec("ls").stdout


@pytest.mark.parametrize(
    "harm",
    ['echo true >"$T/check.sh"', 'rm "$T/check.sh"', 'rm "$T/check.sh"; ln -s /bin/true "$T/check.sh"', 'rm -r "$T"/*'],
)
def test_a_verifier_that_was_tampered_with_is_noticed(box, harm):
    outcome = run(box, harm, keep_processes=True)
    assert "/tests/check.sh" in outcome.tampered
    assert ("/tests/data/expected" in outcome.tampered) == ("-r" in harm)


def test_what_the_tests_write_is_no_tampering(box):
    outcome = run(box, 'echo report >"$T/report"; exit 1', keep_processes=True)
    assert (outcome.result.exit_code, outcome.tampered, outcome.planted) == (1, (), ())


def test_what_was_planted_before_is_noticed(box, folder):
    box.exec(f"echo 'raise SystemExit(0)' >{folder}/conftest.py")
    assert run(box, keep_processes=True).planted == ("/tests/conftest.py",)


def test_a_folder_of_this_machine(box, tmp_path):
    for name, content in check(box).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    box.exec("echo done >answer")
    outcome = run(box, files=tmp_path)
    assert (outcome.result.exit_code, outcome.tampered) == (0, ())
    assert (
        "/tests/data/expected" in run(box, 'echo 43 >"$T/data/expected"', files=tmp_path, keep_processes=True).tampered
    )


def test_a_link_in_their_place_is_refused(box):
    box.exec("mkdir elsewhere; ln -s elsewhere hidden")
    with pytest.raises(SandboxRefused):
        run_hidden(box, TESTS, "hidden", "true", keep_processes=True)
