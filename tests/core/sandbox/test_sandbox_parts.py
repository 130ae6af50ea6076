"""The parts below the sandboxes: choosing a driver, owners, capture, clean-up, and what is the process driver's own."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.core.errors import Unavailable, UsageError
from strop.core.sandbox.capture import Capture
from strop.core.sandbox.cleanup import run_all
from strop.core.sandbox.open import open_sandboxes
from strop.core.sandbox.owner import Owner
from strop.core.sandbox.process import ProcessSandboxes
from strop.core.sandbox.process_files import remove_tree
from strop.core.sandbox.protocol import MIB, Limits, SandboxRefused, SandboxSpec


def test_auto_falls_back_to_processes_and_says_so_in_one_line(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with caplog.at_level(logging.WARNING, "strop.sandbox"), open_sandboxes() as driver:
        assert driver.name == "process"
    (record,) = caplog.records
    assert "\n" not in record.getMessage()
    assert "trusted tasks" in record.getMessage()
    assert "ocker" in record.getMessage()
    with pytest.raises(Unavailable):
        open_sandboxes("docker")
    with pytest.raises(UsageError, match="known: auto, docker, process"):
        open_sandboxes("podman")


def test_auto_takes_docker_where_it_answers(engine):
    with open_sandboxes(run_id="named") as driver:
        assert driver.name == "docker"
        assert driver.labels["strop.run"] == "named"


def test_the_process_driver_says_what_it_is_for(caplog):
    for bubblewrap, said in ((False, True), (None, False)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "strop.sandbox"), ProcessSandboxes(bubblewrap=bubblewrap) as driver:
            (record,) = caplog.records
            assert "for trusted tasks" in record.getMessage()
            assert ("network is not cut off" in record.getMessage()) == (said or not driver.wraps)


def test_bubblewrap_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="apt install bubblewrap"):
        ProcessSandboxes(bubblewrap=True)
    with ProcessSandboxes() as driver, pytest.raises(Unavailable, match="rootfs"):
        driver.start(SandboxSpec(rootfs=tmp_path))


@pytest.fixture(scope="module")
def wrapped():
    try:
        driver = ProcessSandboxes(bubblewrap=True)
    except Unavailable as error:
        pytest.skip(str(error))
    with driver:
        yield driver


def test_with_bubblewrap_there_is_no_network_no_home_and_no_writing_outside(wrapped):
    with wrapped.start(SandboxSpec()) as sandbox:
        assert sandbox.exec("ls /sys/class/net 2>/dev/null; tail -n +3 /proc/net/dev | cut -d: -f1").stdout.split() == [
            b"lo"
        ]
        assert sandbox.exec("touch /usr/strop /etc/strop; mount -o remount,rw /usr").exit_code != 0
        assert not Path("/usr/strop").exists()
        assert not Path("/etc/strop").exists()
        assert sandbox.exec(["test", "-e", str(Path.home() / ".")]).exit_code != 0 or Path.home() == Path("/")
        assert sandbox.exec("set -- /proc/[0-9]*; echo $#").stdout in (b"3\n", b"2\n")
        assert sandbox.exec("echo x >/tmp/kept").exit_code == 0
        assert sandbox.exec("cat /tmp/kept").stdout == b"x\n"
        assert sandbox.get("/tmp/kept") == b"x\n"
        for path in ("/etc/passwd", "/usr/bin/env", "/"):
            with pytest.raises(SandboxRefused):
                sandbox.get(path)


def test_a_rootfs_of_ones_own(wrapped, tmp_path):
    """A shell and its libraries, and a file to know it by."""
    with pytest.raises(Unavailable, match="no sandbox can be started here"):
        wrapped.start(SandboxSpec(rootfs=tmp_path))
    libraries = subprocess.run(["ldd", "/bin/sh"], capture_output=True, text=True, check=True).stdout.split()
    for name in ["/bin/sh", *(word for word in libraries if word.startswith("/"))]:
        (tmp_path / name.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(name, tmp_path / name.lstrip("/"))
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "mine").write_text("mine\n")
    with wrapped.start(SandboxSpec(rootfs=tmp_path)) as sandbox:
        assert sandbox.exec("read line </etc/mine; echo $line").stdout == b"mine\n"
        assert b" /usr" not in sandbox.exec("echo /*").stdout
        assert sandbox.exec(["ls"]).exit_code == 127


def test_limits_of_a_process(processes):
    limits = Limits(memory_bytes=300 * MIB, disk_bytes=MIB)
    with processes.start(SandboxSpec(limits=limits)) as sandbox:
        grow = "import sys; x = b'x' * (int(sys.argv[1]) << 20)"
        python = "python3" if sandbox.exec("command -v python3").exit_code == 0 else sys.executable
        assert sandbox.exec([python, "-c", grow, "50"]).exit_code == 0
        assert sandbox.exec([python, "-c", grow, "1000"]).exit_code == 1
        assert sandbox.exec("head -c 2M /dev/zero >over").exit_code != 0
        assert len(sandbox.get("over")) <= MIB


PROCESS_OWNER = """
import os, sys
from strop.core.sandbox.process import ProcessSandboxes
from strop.core.sandbox.process_files import remove_tree
from strop.core.sandbox.protocol import SandboxSpec
driver = ProcessSandboxes(bubblewrap=sys.argv[1] == "True")
sandbox = driver.start(SandboxSpec())
print(sandbox.path("."), sandbox.name, flush=True)
sandbox.exec("(setsid sleep 98765 &); while :; do date >>ticks; sleep 0.05; done", timeout_s=1000)
"""


def test_a_killed_owner_takes_its_processes_along_and_its_folders_are_reaped(processes):
    owner = subprocess.Popen(
        [sys.executable, "-c", PROCESS_OWNER, str(processes.wraps)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with owner:
        try:
            folder = Path(tempfile.gettempdir(), owner.stdout.readline().split()[1])
            ticks = folder / "files" / "app" / "ticks"
            limit = time.monotonic() + 10
            while not ticks.exists() and time.monotonic() < limit:
                time.sleep(0.05)
            assert ticks.exists()
            assert processes.reap() == 0
        finally:
            owner.kill()
    time.sleep(0.5)
    before = ticks.stat().st_size
    time.sleep(0.3)
    assert ticks.stat().st_size == before
    assert not any(b"98765" in line for line in command_lines())
    assert processes.reap() == 1
    assert not folder.exists()


def command_lines() -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:
            continue
    return found


def test_owners():
    here = Owner.here()
    assert Owner.parse(str(here)) == here
    assert not here.is_dead()
    for text in ("", "1|2", "x|a|b|c|d"):
        assert Owner.parse(text) is None
    with subprocess.Popen(["sleep", "100"]) as child:
        alive = dataclasses.replace(here, pid=child.pid, started="")
        assert not alive.is_dead()
        child.kill()
    assert alive.is_dead()
    # The number is another process's now.
    assert dataclasses.replace(here, started="1").is_dead()
    # This machine was started again; a container, or another machine, cannot be judged from here.
    assert dataclasses.replace(here, boot="another").is_dead()
    assert not dataclasses.replace(here, namespace="another", pid=1 << 22).is_dead()
    assert not dataclasses.replace(here, machine="another", boot="another").is_dead()


@given(st.lists(st.binary(max_size=40)), st.integers(0, 60))
def test_a_capture_keeps_both_ends(blocks, cap):
    capture = Capture(cap)
    for block in blocks:
        capture.add(block)
    whole = b"".join(blocks)
    assert capture.truncated == (len(whole) > cap)
    if capture.truncated:
        head, tail = cap - cap // 2, cap // 2
        middle = f"\n[... {len(whole) - cap} bytes left out ...]\n".encode()
        assert capture.value() == whole[:head] + middle + whole[len(whole) - tail :]
    else:
        assert capture.value() == whole


def test_clean_up_does_not_hang_for_ever_and_one_failure_does_not_keep_the_others(caplog):
    """It neither hangs nor is cut short by Ctrl-C (inspect #509)."""
    done = []

    def fail():
        raise OSError("no")

    started = time.monotonic()
    assert run_all([lambda: None, lambda: None])
    assert not run_all([fail, lambda: done.append(1)])
    assert not run_all([lambda: time.sleep(30), lambda: done.append(2)], 0.3)
    assert time.monotonic() - started < 5
    assert done == [1, 2]
    assert "no" in caplog.text


INTERRUPTED = """
import os, signal, sys, threading, time
from strop.core.sandbox.cleanup import run_all
for count in range(int(sys.argv[1])):
    threading.Timer(0.3 + 0.3 * count, os.kill, [os.getpid(), signal.SIGINT]).start()
def job():
    time.sleep(1.5)
    print("removed", flush=True)
try:
    run_all([job])
except KeyboardInterrupt:
    print("interrupted", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(("signals", "told"), [(1, "removed\ninterrupted\n"), (2, "interrupted\n")])
def test_a_first_interrupt_waits_for_the_clean_up_and_a_second_skips_it(signals, told):
    """It neither hangs nor is cut short by Ctrl-C (inspect #509)."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, str(signals)], capture_output=True, text=True, timeout=60)
    assert done.stdout == told, done.stderr


def test_a_forgotten_sandbox_goes_with_its_process(tmp_path):
    script = (
        "from strop.core.sandbox.process import ProcessSandboxes as P\n"
        "from strop.core.sandbox.protocol import SandboxSpec as S\n"
        "d = P(bubblewrap=False); s = d.start(S()); s.snapshot()"
    )
    subprocess.run(
        [sys.executable, "-c", script], check=True, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True
    )
    assert list(tmp_path.iterdir()) == []


REMOVE = """
import os, sys
from pathlib import Path
from strop.core.sandbox.process_files import remove_tree
if os.getuid() == 0:
    # Root is not held to modes.
    os.seteuid(65534)
remove_tree(Path(sys.argv[1]))
"""


def test_removing_a_folder_never_touches_what_is_above():
    # Not pytest's own folder: another user must reach it.
    with tempfile.TemporaryDirectory() as name:
        above = Path(name)
        tree = above / "tree"
        remove_tree(tree)
        (tree / "a" / "b").mkdir(parents=True)
        (tree / "a" / "b" / "file").write_text("")
        (tree / "a" / "out").symlink_to(above)
        for folder, mode in ((tree / "a" / "b", 0), (tree / "a", 0), (tree, 0o500)):
            folder.chmod(mode)
        above.chmod(0o755)
        if os.getuid() == 0:
            for path in [above, tree, *tree.rglob("*")]:
                os.chown(path, 65534, 65534, follow_symlinks=False)
        subprocess.run([sys.executable, "-c", REMOVE, tree], check=True)
        assert not tree.exists()
        assert above.stat().st_mode & 0o777 == 0o755
