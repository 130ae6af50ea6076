"""A slow tool under --output that is stopped: the old file stays, and what was finished is not lost."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

STROP = Path(sys.executable).with_name("strop")


def tasks(count: int) -> bytes:
    records = (
        {"kind": "task", "id": f"t{i}", "prompt": f"{i}+{i}=", "verifier": {"name": "number"}, "reference": 2 * i}
        for i in range(count)
    )
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def test_finished_rollouts_are_put_beside_and_can_be_resumed(tiny_model, run_strop, tmp_path):
    (tmp_path / "tasks.jsonl").write_bytes(tasks(24))
    out = tmp_path / "out.jsonl"
    out.write_text("old\n")
    command = ["rollout", "--model", str(tiny_model), "-n", "4", "--seed", "1", "--max-tokens", "8"]
    command.append(str(tmp_path / "tasks.jsonl"))
    with subprocess.Popen([STROP, *command, "--output", str(out)], stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 120
        # The temporary file beside the output shows that records are being finished.
        while not any(path.stat().st_size for path in tmp_path.glob(".out.jsonl.*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read().decode()
        assert process.wait(60) == -signal.SIGINT
    part = tmp_path / "out.jsonl.part"
    assert out.read_text() == "old\n"
    assert f"finished records are in {part}" in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.part", "tasks.jsonl"]
    kept = part.read_bytes()
    assert kept.endswith(b"\n")
    run_strop([*command, "--resume", part])
    whole = part.read_bytes()
    assert whole.startswith(kept)
    assert kept != whole, "the signal came too late to test anything"
    records = [json.loads(line) for line in whole.splitlines()]
    assert [r["id"] for r in records if r["kind"] == "task"] == [f"t{i}" for i in range(24)]
    rollouts = [(r["task"], r["sample"]) for r in records if r["kind"] == "rollout"]
    assert rollouts == [(f"t{i}", sample) for i in range(24) for sample in range(4)]
