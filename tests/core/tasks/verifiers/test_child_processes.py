"""The verifiers that judge in a child process, and the child itself: limits, crashes, blame, threads, leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from strop.core.errors import Unavailable
from strop.core.records import Record, Task
from strop.core.tasks.verifiers import Verdict, open_verifiers
from strop.core.tasks.verifiers.child import (
    Child,
    ChildDied,
    ChildRaised,
    ChildTimeout,
    MachineFault,
    ResponseFault,
    ask,
)

WORKER = """
import os, signal, sys, time

def worker():
    print("noise on stdout while starting")
    def handle(request):
        what = request[0]
        if what == "echo": print("noise"); return request[1]
        if what == "pid": return os.getpid()
        if what == "spin":
            while True: pass
        if what == "power": return len(str(9 ** 9 ** 9 ** 9))
        if what == "sleep": time.sleep(1000)
        if what == "raise": raise ValueError("no good")
        if what == "exit": raise SystemExit(3)
        if what == "die": os._exit(3)
        if what == "killed": os.kill(os.getpid(), signal.SIGKILL)
        if what == "recurse":
            def f(): return f() + 1
            return f()
        if what == "memory": return len(bytes(1 << 40))
        if what == "input": return input()
        if what == "hash": return [hash(request[1]), list({"a", "b", "c", "d", "e"})]
        if what == "write": open(request[1], "w").write("x")
        if what == "system": return os.system("touch " + request[1])
        if what == "unlink": os.remove(request[1])
        if what == "fork": return os.fork()
        if what == "run": import subprocess; subprocess.run(["true"])
        if what == "connect": import socket; socket.socket().connect(("127.0.0.1", 9))
        if what == "ctypes": import ctypes; ctypes.CDLL(None)
        if what == "large": return "x" * request[1]
        if what == "surrogate": return chr(0xd800)
        if what == "read": return len(open(request[1]).read())
    return handle

def broken():
    raise RuntimeError("out of order")

def missing():
    import no_such_package_anywhere
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Opens children that run the worker above; closes them."""
    (tmp_path / "strop_test_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    opened = []

    def make(function="worker", cpu_limit_s=1.0, confined=False):
        opened.append(Child(f"strop_test_worker:{function}", cpu_limit_s=cpu_limit_s, confined=confined))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def test_answers_and_restarts(child):
    one = child()
    first = one.call(["pid"])
    assert one.call(["echo", {"a": ["\u2028", "é", 2**40]}]) == {"a": ["\u2028", "é", 2**40]}
    assert one.call(["pid"]) == first
    for what, error, text in [
        ("spin", ChildTimeout, "used up its 1 s of processor time"),
        ("power", ChildTimeout, "processor time"),
        ("die", ChildDied, "ended with exit status 3"),
        ("killed", ChildDied, "was killed by SIGKILL"),
        ("raise", ChildRaised, "ValueError: no good"),
        ("exit", ChildRaised, "SystemExit: 3"),
        ("recurse", ChildRaised, "RecursionError"),
        ("input", ChildRaised, "EOFError"),
        ("surrogate", ChildRaised, "Error"),
    ]:
        with pytest.raises(error, match=text):
            one.call([what])
        assert one.call(["echo", 1]) == 1
    assert one.call(["large", 3_000_000]) == "x" * 3_000_000
    assert one.call(["echo", "y" * 3_000_000]) == "y" * 3_000_000


def test_a_hang_without_work_ends_too(child, monkeypatch):
    monkeypatch.setattr("strop.core.tasks.verifiers.child.WALL_EXTRA_S", 0.5)
    monkeypatch.setattr("strop.core.tasks.verifiers.child.WALL_PER_CPU", 0.0)
    one = child()
    one.call(["echo", 1])
    with pytest.raises(ChildTimeout, match="hardly any processor time"):
        one.call(["sleep"])
    assert one.call(["echo", 2]) == 2


def test_time_is_processor_time_of_one_request(child):
    one = child(cpu_limit_s=0.5)
    for _ in range(4):
        with pytest.raises(ChildTimeout):
            one.call(["spin"])
    # Many short requests may together take longer than one may.
    started = time.monotonic()
    while time.monotonic() - started < 1.2:
        one.call(["large", 200_000])


def test_hashes_are_the_same_in_every_child(child):
    assert child().call(["hash", "x"]) == child().call(["hash", "x"])


def test_start_that_fails(child):
    with pytest.raises(ChildDied, match="could not start: RuntimeError: out of order"):
        child("broken").call(["echo", 1])
    with pytest.raises(Unavailable, match=r"no_such_package_anywhere is missing; .* pip install 'strop\[envs\]'"):
        child("missing").call(["echo", 1])


def test_confined(child, tmp_path):
    one = child(confined=True)
    kept = tmp_path / "kept"
    kept.write_text("12345")
    for what in ("write", "system", "unlink", "fork", "run", "connect", "ctypes"):
        with pytest.raises(ChildRaised, match="PermissionError: a grader does not"):
            one.call([what, str(kept)])
    with pytest.raises(ChildRaised, match="MemoryError"):
        one.call(["memory"])
    assert kept.read_text() == "12345"
    assert one.call(["read", str(kept)]) == 5


def test_blame(child):
    one = child(cpu_limit_s=0.3)
    assert ask(one, ["echo", 1], ["echo", 0]) == 1
    for what, details in [
        ("spin", {"timeout": True}),
        ("raise", {"raised": "ValueError: no good"}),
        ("die", {"crashed": "ended with exit status 3"}),
    ]:
        with pytest.raises(ResponseFault) as fault:
            ask(one, [what], ["echo", 0])
        assert fault.value.details == details
        # The control fails as well: the response is not to blame.
        with pytest.raises(MachineFault, match="cannot judge the reference itself"):
            ask(one, [what], [what])


def test_a_child_killed_from_outside_is_asked_again(child):
    one = child()
    pid = one.call(["pid"])
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.1)
    assert ask(one, ["echo", 5], ["echo", 0]) == 5
    assert one.call(["pid"]) != pid


def test_closing_ends_a_call_in_another_thread(child):
    one = child(cpu_limit_s=100.0)
    pid = one.call(["pid"])
    got = []

    def work():
        try:
            one.call(["sleep"])
        except ChildDied as error:
            got.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.2)
    started = time.monotonic()
    one.close()
    thread.join(10)
    assert time.monotonic() - started < 3
    assert got == ["the verifier is closed"]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(ChildDied, match="closed"):
        one.call(["echo", 1])


def test_a_child_outlives_the_thread_that_started_it_and_serves_many(child):
    one = child()
    answers = []
    threads = [threading.Thread(target=lambda i=i: answers.append(one.call(["echo", i]))) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == list(range(20))
    pid = one.call(["pid"])
    time.sleep(0.1)
    assert one.call(["pid"]) == pid


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc, which only Linux has")
@pytest.mark.parametrize("busy", [False, True])
def test_nothing_is_left_when_the_parent_is_killed(tmp_path, busy):
    (tmp_path / "strop_test_worker.py").write_text(WORKER)
    script = (
        "import sys, threading, time\n"
        "from strop.core.tasks.verifiers.child import Child\n"
        "child = Child('strop_test_worker:worker', cpu_limit_s=1.0)\n"
        "print(child.call(['pid']), flush=True)\n"
        + ("threading.Thread(target=child.call, args=(['spin'],), daemon=True).start()\n" if busy else "")
        + "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    pid = int(parent.stdout.readline())
    time.sleep(0.2)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def judge(verifiers, response, reference, name, **options):
    record = Record.make(
        "task", {"id": "t", "prompt": "p", "verifier": {"name": name, **options}, "reference": reference}
    )
    return verifiers.verify(response, record, record.view(Task))


@pytest.fixture(scope="module")
def verifiers():
    with open_verifiers() as opened:
        yield opened


@pytest.mark.parametrize(
    ("response", "reference", "options", "success"),
    [
        ("x = 12, y = 3", r"x = \d+", {}, True),
        ("x = a", r"x = \d+", {}, False),
        ("x = 12", "12", {"pattern": r"x = (\d+)", "group": 1}, True),
        ("x = 13", "12", {"pattern": r"x = (?P<n>\d+)", "group": "n"}, False),
        ("Yes.", None, {"pattern": "yes", "ignore_case": True}, True),
        ("Yes.", None, {"pattern": "Yes", "match": "full"}, False),
        (" Yes ", None, {"pattern": "Yes", "match": "full"}, True),
        ("a\nb", None, {"pattern": "^b$"}, False),
        ("a\nb", None, {"pattern": "^b$", "multiline": True}, True),
        ("a\nb", None, {"pattern": "a.b", "dotall": True}, True),
        ("b", "x", {"pattern": "(a)|b", "group": 1}, False),
    ],
)
def test_regex(verifiers, response, reference, options, success):
    verdict = judge(verifiers, response, reference, "regex", **options)
    assert (verdict.success, verdict.error) == (success, None)


def test_regex_of_exponential_time_is_a_failed_attempt(verifiers):
    started = time.monotonic()
    verdict = judge(verifiers, "a" * 60 + "b", None, "regex", pattern="(a+)+$")
    assert verdict == Verdict(0.0, False, {"timeout": True})
    assert judge(verifiers, "aaa", None, "regex", pattern="(a+)+$").success
    assert time.monotonic() - started < 40


MATH = [
    (r"\frac{1}{2}", r"\boxed{0.5}", True),
    ("1/2", r"\boxed{\frac12}", True),
    (r"$\frac{1}{2}$", r"\boxed{\dfrac{2}{4}}", True),
    (r"x^2+2x+1", r"\boxed{(x+1)^2}", True),
    (r"\sqrt{8}", r"\boxed{2\sqrt{2}}", True),
    (r"\{1,2\}", r"\boxed{\{2,1\}}", True),
    ("(1,2)", r"\boxed{(2,1)}", False),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", True),
    ("10\\%", r"\boxed{10\%}", True),
    ("[0,1)", r"\boxed{[0,1)}", True),
    ("[0,1)", r"\boxed{[0,1]}", False),
    ("x=3", r"\boxed{3}", True),
    (r"The answer is \boxed{7}.", r"\boxed{7}", True),
    (7, r"\boxed{7.0}", True),
    ("12", r"\boxed{1} no, \boxed{12}", True),
    ("12", r"\boxed{12} no, \boxed{1}", False),
    ("12", "12", False),
    ("12", r"\boxed{}", False),
    ("12", r"\boxed{\frac{}{", False),
    (r"\pi", r"\boxed{3.14159}", False),
]


@pytest.mark.parametrize(("reference", "response", "success"), MATH)
def test_math(verifiers, reference, response, success):
    pytest.importorskip("math_verify")
    verdict = judge(verifiers, response, reference, "math")
    assert (verdict.success, verdict.error) == (success, None)


def test_math_without_a_box(verifiers):
    pytest.importorskip("math_verify")
    assert judge(verifiers, "So it is $x = 7$.", "7", "math", extract="any").success
    assert judge(verifiers, "The answer is 1/2", r"\frac12", "math", extract="any").success
    assert judge(verifiers, "no box", "7", "math").details == {"boxed": False}


@pytest.mark.slow
@pytest.mark.parametrize("hostile", ["9^{9^{9^{9}}}", "10000000!", r"\int_0^{10} \sin(\exp(x^{100})) dx"])
def test_math_that_hangs_is_a_failed_attempt(hostile, monkeypatch):
    pytest.importorskip("math_verify")
    monkeypatch.setattr("strop.core.tasks.verifiers.math.CPU_LIMIT_S", 2.0)
    with open_verifiers() as opened:
        verdict = judge(opened, rf"\boxed{{{hostile}}}", "7", "math")
        assert (verdict.reward, verdict.success, verdict.error) == (0.0, False, None)
        assert verdict.details["timeout"] is True
        assert judge(opened, r"\boxed{7}", "7", "math").success


def test_math_garbage(verifiers):
    pytest.importorskip("math_verify")
    garbage = [
        "}{" * 50,
        "\\" * 99,
        "\x00\ud800",
        "(" * 3000,
        "$" * 500,
        "x" * 100_000,
        r"\frac" * 300,
        "__import__('os')._exit(1)",
    ]
    for text in garbage:
        verdict = judge(verifiers, rf"\boxed{{{text}}}", "7", "math")
        assert (verdict.success, verdict.error) == (False, None), text


def test_math_that_cannot_judge_the_reference_is_an_error(monkeypatch):
    pytest.importorskip("math_verify")
    monkeypatch.setattr("strop.core.tasks.verifiers.math.CPU_LIMIT_S", 0.3)
    with open_verifiers() as opened:
        verdict = judge(opened, r"\boxed{7}", "9^{9^{9^{9}}}", "math")
        assert verdict.error is not None
        assert "cannot judge the reference itself" in verdict.error


def test_verifiers_off_the_main_thread(verifiers):
    """A grader that sets an alarm fails in every thread but the first; these do not."""
    pytest.importorskip("math_verify")
    got = []

    def work():
        got.append(judge(verifiers, r"\boxed{0.5}", r"\frac12", "math"))
        got.append(judge(verifiers, "ab", "a.", "regex"))
        got.append(judge(verifiers, "7\n", 7, "number"))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 9
    assert all(verdict.success and verdict.error is None for verdict in got)


def test_a_missing_package_is_named(monkeypatch):
    for name, module, package in [("math", "math", "math-verify"), ("reasoning-gym", "gym", "reasoning-gym")]:
        monkeypatch.setattr(f"strop.core.tasks.verifiers.{module}.find_spec", lambda _: None)
        reference = {"dataset": "gcd", "entry": {"question": "q", "answer": "a"}} if name == "reasoning-gym" else "7"
        with open_verifiers() as opened, pytest.raises(Unavailable, match=package):
            judge(opened, "x", reference, name)
