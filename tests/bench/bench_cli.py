"""Start-up: how long a person or a script waits for `strop` itself.

Run as a script: prints a table line each. Medians of interleaved runs, each beside `python -c "import typer"` in the
same turn, which no command can be faster than. The bars were set on a machine where that takes 65 ms, and are stretched
by as much as it takes longer here.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

STROP = str(Path(sys.executable).with_name("strop"))
RUNS = 21
FLOOR, FLOOR_MS = "import typer alone", 65
ROLLOUTS = "".join(
    json.dumps(
        {"kind": "rollout", "id": f"g{g}/{i}", "task": f"g{g}", "group": f"g{g}", "group_size": 10, "sample": i,
         "reward": float((i * g) % 3 == 0),
         "steps": [{"anchor": f"s{(i + k) % 4}", "reward": 0.0, "nll": 0.1 * k, "valid": True} for k in range(8)]}
    ) + "\n"
    for g in range(10) for i in range(10)
).encode()  # fmt: skip
CASES = (
    ("strop --help", [STROP, "--help"], 0, 150),
    ("strop report --help", [STROP, "report", "--help"], 0, None),
    ("usage error", [STROP, "advantage", "--no-such-option"], 2, 150),
    ("advantage --grpo, 100 rollouts", [STROP, "advantage", "--grpo", "-q"], 0, 1000),
    ("advantage --gaca, 100 rollouts of 8 steps", [STROP, "advantage", "--gaca", "-q"], 0, 1000),
    (FLOOR, [sys.executable, "-c", "import typer"], 0, None),
)


def run_ms(command: list[str], status: int) -> float:
    """Wall time of one run."""
    started = time.perf_counter()
    done = subprocess.run(command, input=ROLLOUTS, capture_output=True)
    took = (time.perf_counter() - started) * 1000
    if done.returncode != status:
        raise SystemExit(f"{command}: exit {done.returncode}: {done.stderr.decode()[-500:]}")
    return took


def main() -> None:
    """Prints the lines."""
    times: dict[str, list[float]] = {name: [] for name, *_ in CASES}
    for turn in range(RUNS + 1):
        for name, command, status, _ in CASES:
            took = run_ms(command, status)
            if turn:
                times[name].append(took)
    floor_ms = statistics.median(times[FLOOR])
    slower = max(1.0, floor_ms / FLOOR_MS)
    for name, _, _, bar_ms in CASES:
        median = statistics.median(times[name])
        beside = f"{FLOOR} {floor_ms:.0f} ms ({median / floor_ms:.2f}x)"
        if bar_ms is not None:
            verdict = "ok" if median <= bar_ms * slower else "MISSED"
            bar = f"at most {bar_ms} ms" + (f" x {slower:.2f}, a slower machine" if slower > 1 else "")
            print(f"| {name} | {median:.0f} ms | {beside} | {bar} | {verdict} |")
        elif name != FLOOR:
            print(f"| {name} | {median:.0f} ms | {beside} | | |")


if __name__ == "__main__":
    main()
