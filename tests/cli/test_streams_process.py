"""Bad input and rough handling, each against the installed `strop` in a process of its own."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)
STROP = str(Path(sys.executable).with_name("strop"))


def rollout(i: int, group: str = "g", **fields) -> dict:
    return {"kind": "rollout", "id": f"{group}/{i}", "task": group, "group": group, "group_size": 4, "sample": i,
            "reward": float(i % 2), "success": bool(i % 2), **fields}  # fmt: skip


def group(name: str = "g", **fields) -> list[dict]:
    return [rollout(i, name, **fields) for i in range(4)]


def lines(*records: dict) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


GOOD = lines(*group())
# One more attempt, of the next task: by its coming `calibrate --contiguous` knows that the first task is complete.
NEXT = lines(rollout(0, "next"))
# The tools that only compute on records, each with options that make it read rollouts and let them go early.
FILTERS = (["advantage", "--grpo"], ["calibrate", "--band", "0.2:0.8", "--contiguous"])


@pytest.fixture(params=FILTERS, ids=lambda args: args[0])
def filter_args(request):
    return request.param


# What is bad: the line, the exit status of the design (65), and words that the message must hold.
BAD = {
    "truncated": (lines(rollout(4, "h"))[:-20], "ends in the middle"),
    "not JSON": (b"hello\n", ""),
    "a list": (b"[1, 2]\n", "object"),
    "no kind": (b'{"id": "x"}\n', "kind"),
    "kind is no text": (b'{"kind": 3}\n', "kind"),
    "wrong type": (lines(rollout(4, "h", reward="high")), "reward"),
    "another wrong type": (lines(rollout(4, "h", statement_version="two")), "statement_version"),
    "missing id": (b'{"kind": "rollout", "task": "g", "reward": 1.0}\n', "id"),
    "missing task": (b'{"kind": "rollout", "id": "z", "reward": 1.0}\n', "task"),
    "NaN": (b'{"kind": "rollout", "id": "z", "task": "g", "reward": NaN}\n', "NaN"),
    "Infinity": (b'{"kind": "rollout", "id": "z", "task": "g", "reward": Infinity}\n', "Infinity"),
    "-Infinity": (b'{"kind": "rollout", "id": "z", "task": "g", "reward": -Infinity}\n', "Infinity"),
    "a number no float holds": (b'{"kind": "rollout", "id": "z", "task": "g", "reward": 1e999}\n', "reward"),
    "a lone surrogate": (b'{"kind": "rollout", "id": "\\ud800", "task": "g", "reward": 1.0}\n', "surrogate"),
    "not UTF-8": (b'{"kind": "rollout", "id": "\xff", "task": "g", "reward": 1.0}\n', "UTF-8"),
    "a duplicate id": (lines(rollout(0, "h"), rollout(0, "h")), "h/0"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_named_and_what_came_before_is_written(run_strop, filter_args, case):
    bad, words = BAD[case]
    done = run_strop(filter_args, GOOD + NEXT + bad, check=False)
    line = 5 + len(bad.splitlines())
    assert done.status == 65, done.stderr
    assert f"<stdin>:{line}:" in done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.endswith(b"\n")
    assert [r["id"] for r in done.records if r["kind"] == "rollout"][:4] == [f"g/{i}" for i in range(4)]


@pytest.mark.parametrize("case", BAD)
def test_keep_going_sets_a_bad_line_aside(run_strop, filter_args, case, tmp_path):
    bad, words = BAD[case]
    rejects = tmp_path / "rejects.jsonl"
    source = GOOD + bad.rstrip(b"\n") + b"\n" + lines(*group("after"))
    done = run_strop([*filter_args, "--keep-going", "--rejects", rejects], source, check=False)
    assert done.status == 1, done.stderr
    ids = [r["id"] for r in done.records if r["kind"] == "rollout"]
    assert [i for i in ids if not i.startswith("h/")] == [f"{g}/{i}" for g in ("g", "after") for i in range(4)]
    (reject,) = [json.loads(line) for line in rejects.read_text().splitlines()]
    assert reject["kind"] == "reject"
    assert reject["line"] == 4 + len(bad.splitlines())
    assert words in reject["reason"] + str(reject["field"])
    assert reject["text"].encode() == bad.splitlines()[-1] or case == "not UTF-8"


def test_rejects_without_keep_going_is_a_usage_error(run_strop, filter_args):
    assert run_strop([*filter_args, "--rejects", "x"], GOOD, check=False).status == 2


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind":"something-else","x":[1,2.50,1e5],"big":12345678901234567890123}',
        b'{"kind":"x","number":1e999,"twice":1,"other":"\\u00e9"}',
        '{"kind":"x","text":"a\u2028b\u2029c\u0085d"}'.encode(),
        b'{"kind":"x","text":"a\\u000bb\\u000cc\\rd\\u001ce"}',
        b'{"kind":"x",  "spaces" : [ 1 , 2 ] , "id":"x"}',
        b'{"kind":"x","twice":1,"twice":"two"}',
        '{"kind":"x","emoji":"\U0001f600"}'.encode(),
    ],
)
def test_what_a_tool_does_not_read_passes_byte_for_byte(run_strop, filter_args, line):
    done = run_strop(filter_args, line + b"\n")
    assert done.stdout == line + b"\n"


def test_numbers_of_unread_fields_are_not_evaluated(run_strop):
    records = [json.dumps(r)[:-1] + ', "huge": 1e999, "digits": 0.1000}' for r in group()]
    done = run_strop(["advantage", "--grpo"], "\n".join(records).encode())
    assert done.stdout.count(b'"huge": 1e999') + done.stdout.count(b'"huge":1e999') == 4
    assert done.stdout.count(b"0.1000") == 4


def test_of_a_field_that_occurs_twice_the_last_one_counts(run_strop):
    records = [json.dumps(r)[:-1] + f', "reward": {i}.0}}' for i, r in enumerate(group())]
    got = run_strop(["advantage", "--grpo", "--no-std"], "\n".join(records).encode()).records
    assert [r["advantage"] for r in got] == [-1.5, -0.5, 0.5, 1.5]


def test_a_field_may_change_its_type_from_line_to_line(run_strop, filter_args):
    values = [None, 1, "text", {"late": [1.5, None]}]
    records = [{**record, "extra": value} for record, value in zip(group(), values, strict=True)]
    got = [r for r in run_strop(filter_args, records).records if r["kind"] == "rollout"]
    assert [r["extra"] for r in got] == values


def test_separators_that_are_not_line_ends(run_strop, filter_args):
    text = "a\u2028b\u2029c\u0085d"
    records = group(note=text, control="\x0b\x0c\x1c\r")
    raw = b"".join(json.dumps(r, ensure_ascii=False).encode() + b"\n" for r in records)
    got = [r for r in run_strop(filter_args, raw).records if r["kind"] == "rollout"]
    assert [r["note"] for r in got] == [text] * 4
    assert [r["control"] for r in got] == ["\x0b\x0c\x1c\r"] * 4


@pytest.mark.parametrize(
    "raw",
    [
        GOOD.replace(b"\n", b"\r\n"),
        b"\xef\xbb\xbf" + GOOD,
        b"\n\n" + GOOD.replace(b"\n", b"\n\n  \n"),
        GOOD.rstrip(b"\n"),
    ],
    ids=["CRLF", "BOM", "blank lines", "no last line end"],
)
def test_harmless_framing_changes_nothing(run_strop, filter_args, raw):
    done, plain = run_strop(filter_args, raw), run_strop(filter_args, GOOD)
    assert done.stdout == plain.stdout
    assert done.stderr == plain.stderr


def test_a_lone_carriage_return_does_not_end_a_line(run_strop, filter_args):
    done = run_strop(filter_args, GOOD.replace(b"\n", b"\r"), check=False)
    assert done.status == 65
    assert "<stdin>:1:" in done.stderr


def test_empty_input_is_no_error(run_strop, filter_args):
    done = run_strop(filter_args, b"")
    assert done.stdout == b""
    assert "Traceback" not in done.stderr


def test_a_line_of_50_MB_passes(run_strop, filter_args):
    line = b'{"kind":"note","text":"' + b"x" * 50_000_000 + b'"}\n'
    done = run_strop(filter_args, line + GOOD)
    assert done.stdout.startswith(line)
    assert len(done.stdout[len(line) :].splitlines()) >= 4


def test_missing_and_unreadable_files(run_strop, filter_args, tmp_path):
    missing = run_strop([*filter_args, tmp_path / "none.jsonl"], check=False)
    assert missing.status == 66
    assert "none.jsonl: No such file" in missing.stderr
    folder = run_strop([*filter_args, tmp_path], check=False)
    assert folder.status == 66
    assert "directory" in folder.stderr
    assert "Traceback" not in missing.stderr + folder.stderr


def test_files_are_concatenated_and_errors_name_theirs(run_strop, filter_args, tmp_path):
    (tmp_path / "one").write_bytes(lines(*group()[:2]))
    (tmp_path / "two").write_bytes(lines(*group()[2:]))
    together = run_strop([*filter_args, tmp_path / "one", tmp_path / "two"])
    assert together.stdout == run_strop(filter_args, GOOD).stdout
    mixed = run_strop([*filter_args, tmp_path / "one", "-"], lines(*group()[2:]))
    assert mixed.stdout == together.stdout
    (tmp_path / "two").write_bytes(b"nope\n")
    bad = run_strop([*filter_args, tmp_path / "one", tmp_path / "two"], check=False)
    assert bad.status == 65
    assert f"{tmp_path / 'two'}:1:" in bad.stderr


def test_a_full_disk_is_74(run_strop, filter_args):
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([STROP, *filter_args], input=GOOD, stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 74
    assert b"No space left" in done.stderr
    assert b"Traceback" not in done.stderr
    assert run_strop([*filter_args, "-o", "/dev/full"], GOOD, check=False).status == 74


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["advantage", "--help"], ["advantage", "--schema"]])
def test_help_on_a_full_disk_is_74(args):
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([STROP, *args], stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 74, done.stderr
    assert b"Traceback" not in done.stderr


def test_an_output_file_over_the_size_limit_is_74_and_leaves_no_part(filter_args, tmp_path):
    # A limit on the size of files stands in for a disk that fills up in the middle.
    big = lines(*(r for i in range(2000) for r in group(f"g{i}")))
    done = subprocess.run(
        [STROP, *filter_args, "-o", str(tmp_path / "out")],
        input=big, capture_output=True, timeout=120,
        preexec_fn=lambda: (resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
                            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)),
    )  # fmt: skip
    assert done.returncode == 74, done.stderr
    assert b"File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stream", ["stdin", "stdout"])
def test_a_closed_stream_is_an_error_and_not_a_mess(filter_args, stream, tmp_path):
    redirect = {"stdin": "<&-", "stdout": ">&-"}[stream]
    (tmp_path / "in").write_bytes(GOOD)
    source = "" if stream == "stdin" else str(tmp_path / "in")
    command = f"{STROP} {' '.join(filter_args)} {source} {redirect}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60)
    assert done.returncode == {"stdin": 66, "stdout": 74}[stream], done.stderr
    assert b"Traceback" not in done.stderr
    assert (tmp_path / "in").read_bytes() == GOOD


@pytest.mark.parametrize(
    "tool", ["advantage --grpo", "synth-tasks arithmetic -n 200000 --seed 1", "calibrate --band 0.2:0.8", "--help"]
)
def test_a_closed_pipe_ends_the_tool_by_sigpipe_without_a_word(tool, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(lines(*(r for i in range(20000) for r in group(f"g{i}"))))
    given = "" if tool.startswith(("synth", "--")) else f" {source}"
    # `head` takes one line and leaves; `true` leaves before the first.
    for taker in ("head -n 1", "true"):
        script = f"{STROP} {tool}{given} | {taker} >/dev/null; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", script], capture_output=True, timeout=120)
        assert done.stderr == b"", done.stderr[-500:]
        # The overview may fit into the pipe before it closes.
        assert done.returncode == 141 or (tool == "--help" and done.returncode == 0)


def start(args, stdout=subprocess.PIPE, **settings):
    return subprocess.Popen([STROP, *args], stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.PIPE, **settings)


def first_rollouts(process, number) -> list[str]:
    """Ids of the first rollouts that come out, as soon as they do; the test's time limit ends a wait for none."""
    ids = []
    for line in iter(process.stdout.readline, b""):
        record = json.loads(line)
        ids += [record["id"]] if record["kind"] == "rollout" else []
        if len(ids) == number:
            break
    return ids


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_tool_by_itself_and_keeps_finished_records(filter_args, signum):
    with start([*filter_args, "--line-buffered"]) as process:
        process.stdin.write(GOOD + NEXT)
        process.stdin.flush()
        first = first_rollouts(process, 4)
        process.send_signal(signum)
        out, err = process.stdout.read(), process.stderr.read()
        assert process.wait(30) == -signum
    assert first == [f"g/{i}" for i in range(4)]
    assert out == b"" or out.endswith(b"\n")
    assert err.decode().splitlines()[-1].endswith(f"stopped by {signum.name}; finished records are kept")
    assert b"Traceback" not in err


def test_what_a_filter_holds_in_its_block_is_kept_too(filter_args):
    with start(filter_args) as process:
        process.stdin.write(GOOD + NEXT)
        process.stdin.flush()
        time.sleep(1.5)
        process.send_signal(signal.SIGINT)
        out = process.stdout.read()
        assert process.wait(30) == -signal.SIGINT
    ids = [record["id"] for record in map(json.loads, out.splitlines()) if record["kind"] == "rollout"]
    assert ids == [f"g/{i}" for i in range(4)]


def test_an_interrupt_ignored_by_the_parent_stays_ignored(filter_args):
    with start(filter_args, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) as process:
        process.stdin.write(GOOD)
        process.stdin.flush()
        time.sleep(0.7)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert len(out.splitlines()) >= 4


def test_a_second_interrupt_ends_at_once(tmp_path):
    # The pipe is full and nobody reads: the first signal waits for the line, the second does not.
    big = lines(*({"kind": "note", "text": "x" * 3_000_000} for _ in range(4)))
    (tmp_path / "in").write_bytes(big)
    with start(["advantage", "--grpo", str(tmp_path / "in")]) as process:
        time.sleep(1.5)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None, "the line that is being written is finished first"
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == -signal.SIGINT
        process.stdout.close()


def test_no_line_is_torn_by_a_signal(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(lines(*({"kind": "note", "n": i, "text": "x" * 500} for i in range(60_000))))
    for delay_s in (0.3, 0.4, 0.5):
        with start(["advantage", "--grpo", str(source)]) as process:
            time.sleep(delay_s)
            process.send_signal(signal.SIGTERM)
            out = process.stdout.read()
            process.wait(30)
        assert out == b"" or out.endswith(b"\n")
        numbers = [json.loads(line)["n"] for line in out.splitlines()]
        assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("tool", ["advantage --grpo", "calibrate --band 0.2:0.8"])
def test_a_terminal_on_stdin_is_a_usage_error(tool):
    leader, follower = pty.openpty()
    done = subprocess.run([STROP, *tool.split()], stdin=follower, capture_output=True, timeout=60)
    os.close(leader)
    os.close(follower)
    assert done.returncode == 2
    assert b"stdin is a terminal" in done.stderr
    assert done.stdout == b""


def test_output_appears_whole_or_not_at_all(run_strop, filter_args, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("old\n")
    failed = run_strop([*filter_args, "--output", out], GOOD + b"nope\n", check=False)
    assert failed.status == 65
    assert failed.stdout == b""
    assert out.read_text() == "old\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    run_strop([*filter_args, "--output", out], GOOD)
    assert out.read_bytes() == run_strop(filter_args, GOOD).stdout
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(out.stat().st_mode) == 0o666 & ~umask
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_an_interrupted_output_leaves_the_old_file(filter_args, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("old\n")
    with start([*filter_args, "--output", str(out)]) as process:
        process.stdin.write(GOOD)
        process.stdin.flush()
        time.sleep(1.5)
        process.send_signal(signal.SIGTERM)
        err = process.stderr.read()
        assert process.wait(30) == -signal.SIGTERM
    assert out.read_text() == "old\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert f"{out} was not touched".encode() in err


def test_an_output_that_cannot_be_made_is_74_before_any_work(run_strop, filter_args, tmp_path):
    done = run_strop([*filter_args, "-o", tmp_path / "none" / "out"], GOOD, check=False)
    assert done.status == 74
    assert "No such file" in done.stderr


def test_machine_readable_errors(run_strop, filter_args, tmp_path):
    env = {"STROP_ERRORS": "json"}
    done = run_strop(filter_args, GOOD + lines(rollout(9, reward="x")), check=False, env=env)
    (error,) = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert error["tool"] == f"strop {filter_args[0]}"
    assert (error["code"], error["file"], error["line"], error["field"]) == (65, "-", 5, "reward")
    assert error["message"]
    usage = run_strop([filter_args[0], "--no-such-option"], check=False, env=env)
    assert usage.status == 2
    assert json.loads(usage.stderr)["code"] == 2


def test_messages_as_json_lines(run_strop):
    source = lines(*group(reward=0.5)) + b"nope\n"
    for more, status in ([], 65), (["--keep-going"], 1):
        done = run_strop(["advantage", "--grpo", "--log-json", *more], source, check=False)
        assert done.status == status
        messages = [json.loads(line) for line in done.stderr.splitlines()]
        assert all({"tool", "level", "message"} <= set(message) for message in messages)
        assert "error" in {message["level"] for message in messages}


@pytest.mark.parametrize("locale", ["C", "POSIX", "en_US.ISO-8859-1"])
def test_the_locale_never_matters(run_strop, filter_args, locale):
    record = '{"kind":"note","text":"\u00e9\u2028\U0001f600"}\n'.encode()
    env = {"LC_ALL": locale, "LANG": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    done = run_strop(filter_args, record + GOOD, env=env)
    assert done.stdout.startswith(record)
    bad = run_strop(filter_args, lines(rollout(1, id="\u00e9", reward="x")), env=env, check=False)
    assert bad.status == 65
    assert "Traceback" not in bad.stderr
    missing = run_strop([*filter_args, "/no\u00e9such"], env=env, check=False)
    assert missing.status == 66


@pytest.mark.parametrize("args", [*FILTERS, ["synth-tasks", "arithmetic", "-n", "30"]], ids=lambda args: args[0])
def test_the_hash_seed_never_matters(run_strop, args):
    source = b"" if args[0] == "synth-tasks" else lines(*(r for i in range(5) for r in group(f"g{i}")))
    outputs = {run_strop(args, source, env={"PYTHONHASHSEED": seed}).stdout for seed in ("0", "1", "4711")}
    assert len(outputs) == 1


def test_an_empty_environment_is_enough(filter_args):
    done = subprocess.run([STROP, *filter_args], input=GOOD, capture_output=True, env={}, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_record_leaves_as_soon_as_its_group_is_complete(filter_args):
    with start([*filter_args, "--line-buffered"]) as process:
        process.stdin.write(GOOD + NEXT)
        process.stdin.flush()
        got = first_rollouts(process, 4)
        assert got == [f"g/{i}" for i in range(4)]
        process.stdin.close()
        assert process.wait(30) == 0


def test_only_drops_other_kinds(run_strop, filter_args):
    note = b'{"kind":"note"}\n'
    assert run_strop([*filter_args, "--only", "note"], note + GOOD).stdout == note
    assert {r["kind"] for r in run_strop([*filter_args, "--only", "rollout,x"], note + GOOD).records} == {"rollout"}


def test_quiet_is_quiet(run_strop, filter_args):
    assert run_strop([*filter_args, "--quiet"], lines(*group(reward=0.5))).stderr == ""


@pytest.mark.parametrize("tool", ["advantage", "calibrate", "synth-tasks", "rollout", "train", "report", "doctor"])
def test_the_schema_is_json(run_strop, tool):
    schema = json.loads(run_strop([tool, "--schema"], b"").stdout)
    assert set(schema) == {"reads", "writes", "$defs"}
    # Every reference leads somewhere, seen from the root as JSON Schema wants.
    for name in re.findall(r'"\$ref": "#/\$defs/(\w+)"', json.dumps(schema)):
        assert name in schema["$defs"]
    assert tool not in ("rollout", "advantage") or "group_size" in schema["$defs"]["Rollout"]["properties"]
