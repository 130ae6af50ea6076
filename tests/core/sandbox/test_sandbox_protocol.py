"""The protocol of the sandboxes, held by each driver."""

from __future__ import annotations

import dataclasses
import os
import threading
import time

import pytest

from strop.core.sandbox.protocol import Limits, SandboxLost, SandboxRefused


def test_arguments_are_passed_as_they_are(box):
    result = box.exec(["printf", "%s|", "a b", "$HOME", "'", "é", ""])
    assert (result.exit_code, result.stdout.decode(), result.stderr) == (0, "a b|$HOME|'|é||", b"")
    assert not result.timed_out
    assert not result.stdout_truncated
    assert 0 < result.duration_s < 20


def test_a_text_goes_to_the_shell(box):
    result = box.exec("cd / && echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")


def test_exit_codes(box):
    for command, exit_code in (
        (["no-such-program"], 127), ("kill -9 $$", 137), ("kill -11 $$", 139), ("exit 255", 255), ([], 0),
    ):  # fmt: skip
        assert box.exec(command).exit_code == exit_code, command


def test_stdin_ends_and_may_be_large_or_unread(box):
    assert box.exec(["cat"]).stdout == b""
    data = os.urandom(3 << 20)
    result = box.exec(["cat"], stdin=data, output_bytes=4 << 20)
    assert result.stdout == data
    assert box.exec(["true"], stdin=data).exit_code == 0


def test_the_environment_and_the_working_folder(box):
    result = box.exec('echo "$GREETING $OTHER"; pwd', env={"OTHER": "world"})
    assert result.stdout.decode().split("\n")[:2] == ["hello world", box.path(".")]
    assert box.exec("mkdir sub; echo $OTHER").stdout == b"\n"
    assert box.exec("pwd", workdir="sub").stdout.decode().strip() == box.path("sub")
    assert box.exec("ls -d usr", workdir="/").stdout == b"usr\n"
    assert box.exec("echo no", workdir="missing").exit_code != 0


def test_a_long_output_keeps_its_start_and_end(box):
    result = box.exec("seq 1000000; seq 5 >&2", output_bytes=1000)
    head, _, tail = result.stdout.partition(b"\n[... 6887896 bytes left out ...]\n")
    assert result.stdout_truncated
    assert not result.stderr_truncated
    assert (len(head), len(tail)) == (500, 500), result.stdout[400:600]
    assert head.startswith(b"1\n2\n")
    assert tail.endswith(b"\n1000000\n")
    assert result.stderr == b"1\n2\n3\n4\n5\n"


def test_a_command_that_leaves_something_running_ends_itself(box):
    started = time.monotonic()
    result = box.exec("sleep 30 & echo done")
    assert (result.exit_code, result.stdout) == (0, b"done\n")
    assert time.monotonic() - started < 10


def test_a_command_that_closes_its_streams_is_waited_for(box):
    result = box.exec("exec >&- 2>&-; sleep 0.7; exit 5")
    assert result.exit_code == 5
    assert result.duration_s > 0.6


def test_time_is_up_for_the_whole_tree_and_not_for_the_sandbox(box):
    """Children, daemons that left the session, and those that cleared their environment, all while they print.

    Not the shell alone, and inside the container too (mini-swe-agent #865).
    """
    result = box.exec(
        "echo begun; (setsid sh -c 'while :; do date >>daemon; sleep 0.1; done' &)\n"
        "env -i setsid sh -c 'while :; do date >>child; sleep 0.1; done' &\n"
        "sh -c 'while :; do date >>deep; sleep 0.1; done'",
        timeout_s=1.0,
    )
    assert (result.exit_code, result.timed_out, result.stdout) == (None, True, b"begun\n")
    assert 1.0 <= result.duration_s < 8
    before = box.get_folder(".")
    assert set(before) == {"daemon", "child", "deep"}
    time.sleep(0.5)
    assert box.get_folder(".") == before
    assert box.exec(["echo", "alive"]).stdout == b"alive\n"


def test_a_command_that_ignores_signals_is_killed(box):
    result = box.exec("trap '' TERM INT HUP; while :; do sleep 0.1; done", timeout_s=0.5)
    assert result.timed_out
    assert result.duration_s < 8


def test_the_time_of_a_command_that_names_none(driver, spec):
    limits = Limits(wall_clock_s=0.5)
    with driver.start(dataclasses.replace(spec, limits=limits)) as sandbox:
        assert sandbox.exec("sleep 30").timed_out


def test_files_go_in_and_come_out(box, tmp_path):
    data = bytes(range(256)) * 300
    box.put("deep/er/data", data)
    box.put("run.sh", b"echo ran\n", executable=True)
    assert box.get("deep/er/data") == data
    assert box.exec(["./run.sh"]).stdout == b"ran\n"
    assert box.exec("echo more >>deep/er/data && echo new >deep/x && ls").exit_code == 0
    assert box.get("deep/er/data") == data + b"more\n"
    assert box.get_folder("deep") == {"er/data": data + b"more\n", "x": b"new\n"}
    box.put("deep/x", b"")
    assert box.get("deep/x") == b""
    box.put("/tests", {"a": b"1", "b/c": b"2"})
    assert box.get_folder("/tests") == {"a": b"1", "b/c": b"2"}
    assert box.exec(["cat", box.path("/tests/b/c")]).stdout == b"2"

    (tmp_path / "from" / "sub").mkdir(parents=True)
    (tmp_path / "from" / "sub" / "tool").write_bytes(b"echo tool\n")
    (tmp_path / "from" / "sub" / "tool").chmod(0o755)
    box.put("copied", tmp_path / "from")
    box.put("single", tmp_path / "from" / "sub" / "tool")
    assert box.exec("./copied/sub/tool && ./single").stdout == b"tool\ntool\n"
    box.put("empty", {})
    assert box.get_folder("empty") == {}


def test_names_may_be_odd(box):
    name = " a'b\"c\\d\té*-" + "n" * 120
    box.put(f"{name}/{name}", b"x")
    assert box.get_folder(".") == {f"{name}/{name}": b"x"}


def test_files_that_are_not_there(box):
    box.put("file", b"")
    for path in ("missing", "no/such"):
        with pytest.raises(FileNotFoundError):
            box.get(path)
    with pytest.raises(FileNotFoundError):
        box.get_folder("missing")
    for call in (lambda: box.get("."), lambda: box.get_folder("file"), lambda: box.put("file/below", b"")):
        with pytest.raises(SandboxRefused):
            call()


def test_paths_cannot_climb_out(box):
    too_long = ("n" * 256, "\u00e9" * 128, "/".join(["d" * 100] * 41))
    for path in ("../out", "a/../../out", "/app/../etc/passwd", "..", "", "a\0b", *too_long):
        for call in (
            lambda p=path: box.put(p, b""), lambda p=path: box.get(p), lambda p=path: box.get_folder(p),
            lambda p=path: box.path(p), lambda p=path: box.put("folder", {p: b""}),
            lambda p=path: box.exec("true", workdir=p or ".."),
        ):  # fmt: skip
            with pytest.raises(SandboxRefused):
                call()


def test_names_in_a_folder_are_relative(box):
    for name in ("/etc/x", "."):
        with pytest.raises(SandboxRefused):
            box.put("folder", {name: b""})


def test_paths_cannot_go_through_links(box, tmp_path):
    assert (
        box.exec("ln -s /etc out; ln -s /etc/passwd file; ln -s missing dangling; mkdir d; ln -s d inner").exit_code
        == 0
    )
    for path in ("out/passwd", "out", "file", "dangling", "inner/x"):
        for call in (
            lambda p=path: box.put(p, b"planted"),
            lambda p=path: box.get(p),
            lambda p=path: box.get_folder(p),
        ):
            with pytest.raises(SandboxRefused):
                call()
    with pytest.raises(SandboxRefused):
        box.put("out", {"strop-planted": b""})
    assert b"planted" not in box.exec("cat /etc/passwd; ls /etc d").stdout
    box.exec("echo x >d/real; ln -s real d/link; mkfifo d/pipe; ln -s /etc d/etc")
    assert box.get_folder("d") == {"real": b"x\n"}

    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "link").symlink_to("/etc/passwd")
    with pytest.raises(SandboxRefused):
        box.put("copied", tmp_path / "from")


def test_a_pipe_is_no_file(box):
    assert box.exec("mkfifo pipe").exit_code == 0
    for call in (lambda: box.get("pipe"), lambda: box.put("pipe", b"x")):
        with pytest.raises(SandboxRefused):
            call()


def test_a_put_does_not_write_through_a_hard_link(box):
    assert box.exec("echo first >a && ln a b").exit_code == 0
    box.put("a", b"second\n")
    assert box.get("b") == b"first\n"


def test_the_size_of_a_transfer_is_bounded(driver, spec):
    limits = Limits(transfer_bytes=100_000)
    with driver.start(dataclasses.replace(spec, limits=limits)) as sandbox:
        sandbox.exec("head -c 100000 /dev/zero >fits; truncate -s 50G sparse; head -c 100001 /dev/zero >over")
        assert len(sandbox.get("fits")) == 100_000
        sandbox.put("in", bytes(100_000))
        for call in (
            lambda: sandbox.get("over"), lambda: sandbox.get("sparse"), lambda: sandbox.get_folder("."),
            lambda: sandbox.put("in", bytes(100_001)), lambda: sandbox.put("in", dict.fromkeys("ab", bytes(60_000))),
        ):  # fmt: skip
            with pytest.raises(SandboxRefused):
                call()


def test_a_snapshot_keeps_the_files_of_its_moment(driver, spec):
    with driver.start(spec) as sandbox:
        sandbox.put("state", b"before")
        sandbox.exec("ln -s state link; mkdir closed; chmod 700 closed; chmod 755 state")
        snapshot = sandbox.snapshot()
        sandbox.put("state", b"after")
        with driver.restore(snapshot) as first, driver.restore(snapshot) as second:
            first.put("state", b"first")
            assert second.get("state") == b"before"
            assert (
                second.exec("cat link; ls -l state | cut -c1-10; echo $GREETING").stdout == b"before-rwxr-xr-x\nhello\n"
            )
            assert sandbox.get("state") == b"after"
            deeper = first.snapshot()
        driver.forget(snapshot)
        with driver.restore(deeper) as third:
            assert third.get("state") == b"first"
        driver.forget(deeper)
        with pytest.raises(SandboxLost):
            driver.restore(snapshot)


def test_processes_are_stopped_and_files_stay(box):
    box.put("kept", b"1")
    box.exec("(setsid sh -c 'while :; do date >>ticks; sleep 0.05; done' >/dev/null 2>&1 &); sleep 0.2")
    box.stop_processes()
    before = box.get("ticks")
    time.sleep(0.3)
    assert box.get("ticks") == before
    assert box.get("kept") == b"1"
    assert box.exec(["echo", "on"]).stdout == b"on\n"


def test_sandboxes_do_not_see_one_another(driver, spec):
    results = {}

    def work(number):
        with driver.start(spec) as sandbox:
            sandbox.put("mine", str(number).encode())
            results[number] = sandbox.exec("sleep 0.5; ls; cat mine").stdout

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: f"mine\n{number}".encode() for number in range(4)}


def test_a_closed_sandbox_is_lost(driver, spec):
    sandbox = driver.start(spec)
    sandbox.close()
    sandbox.close()
    for call in (lambda: sandbox.exec("true"), lambda: sandbox.put("x", b""), sandbox.snapshot):
        with pytest.raises(SandboxLost):
            call()
