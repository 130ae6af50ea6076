"""Benchmarks of `strop advantage`: GiGPO's arithmetic against plain Python, and the filter pass against orjson.

Run as a script: prints one table line each. The references are ours, written from the formulas; times are the best of
several runs of both sides in this process, or of interleaved child processes, so that a busy machine hits both.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

EPSILON = 1e-6
DISCOUNT = 0.95
GROUPS, ATTEMPTS, STEPS = 64, 8, 32
FILE_MIB = 150


def make_steps(groups=GROUPS, attempts=ATTEMPTS, steps=STEPS, seed=0):
    """Rows (group, trajectory, anchor, reward) in order; 12 states a group, so anchors repeat."""
    draw = random.Random(seed)
    rows = []
    for group in range(groups):
        for attempt in range(attempts):
            succeeded = draw.random() < 0.4
            for step in range(steps):
                reward = 10.0 if succeeded and step == steps - 1 else draw.choice([0.0, 0.0, 0.0, 0.5])
                rows.append((group, group * attempts + attempt, f"room {draw.randrange(12)} of house {group}", reward))
    return rows


def plain_gigpo(rows):
    """The formulas with dictionaries, one pass a quantity: what a careful person writes without arrays."""
    returns, total, later = [0.0] * len(rows), defaultdict(float), {}
    for i in range(len(rows) - 1, -1, -1):
        _, trajectory, _, reward = rows[i]
        later[trajectory] = returns[i] = reward + DISCOUNT * later.get(trajectory, 0.0)
        total[trajectory] += reward
    episode = _normalised([total[row[1]] for row in rows], [row[0] for row in rows])
    step = _normalised(returns, [(row[0], row[2]) for row in rows])
    return [e + s for e, s in zip(episode, step, strict=True)]


def _normalised(values, keys):
    members = defaultdict(list)
    for value, key in zip(values, keys, strict=True):
        members[key].append(value)
    stats = {key: _mean_and_std(found) for key, found in members.items()}
    return [(value - stats[key][0]) / (stats[key][1] + EPSILON) for value, key in zip(values, keys, strict=True)]


def _mean_and_std(values):
    if len(values) == 1:
        return values[0], 1.0
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def naive_gigpo(rows, width):
    """The formulas read literally: each step walks its own future and searches its group (`width` rows) anew."""
    advantages = []
    for start in range(0, len(rows), width):
        mine = rows[start : start + width]
        totals = [sum(other[3] for other in mine if other[1] == row[1]) for row in mine]
        returns = [_future(mine, k) for k in range(len(mine))]
        for here, (_, _, anchor, _) in enumerate(mine):
            alike = [returns[k] for k, row in enumerate(mine) if row[2] == anchor]
            mean, std = _mean_and_std(totals)
            near_mean, near_std = _mean_and_std(alike)
            episode, step = (totals[here] - mean) / (std + EPSILON), (returns[here] - near_mean) / (near_std + EPSILON)
            advantages.append(episode + step)
    return advantages


def _future(rows, k):
    mine = [row[3] for row in rows[k:] if row[1] == rows[k][1]]
    return sum(reward * DISCOUNT**t for t, reward in enumerate(mine))


def best_of(runs, function):
    """Shortest wall time (ms) and the last result."""
    best, result = math.inf, None
    for _ in range(runs):
        started = time.perf_counter()
        result = function()
        best = min(best, time.perf_counter() - started)
    return best * 1000, result


def bench_gigpo():
    """One table line; raises if the three do not agree to 1e-6."""
    import numpy as np

    from strop.core.credit.gigpo import GigpoOptions, StepBatch, anchor_labels, gigpo

    rows = make_steps()
    group_R, trajectory_R, anchors, rewards = (list(column) for column in zip(*rows, strict=True))
    groups, reward_R = np.array(group_R), np.array(rewards)
    length_N = np.bincount(trajectory_R)

    def ours():
        # From strings and numbers to advantages: the anchors are found within the measured time.
        anchor_R = anchor_labels(groups, anchors)
        reward_N = np.bincount(trajectory_R, reward_R)
        group_N = groups[np.cumsum(length_N) - length_N]
        nothing = np.full(len(rows), np.nan)
        batch = StepBatch(group_N, reward_N, length_N, reward_R, np.ones(len(rows), bool), anchor_R, nothing)
        return gigpo(batch, GigpoOptions(discount=DISCOUNT, std=True))[1]

    ours_ms, found = best_of(20, ours)
    plain_ms, plain = best_of(3, lambda: plain_gigpo(rows))
    naive_ms, naive = best_of(1, lambda: naive_gigpo(rows, ATTEMPTS * STEPS))
    gap = max(float(np.abs(found - np.array(other)).max()) for other in (plain, naive))
    if not gap < 1e-6:
        raise SystemExit(f"advantage --gigpo: differs from the references by {gap}")
    print(
        f"| advantage --gigpo, {len(rows):,} steps, arithmetic | {ours_ms:.1f} ms | plain loops {plain_ms:.0f} ms "
        f"({plain_ms / ours_ms:.0f}x), naive {naive_ms:,.0f} ms ({naive_ms / ours_ms:.0f}x) | at most 30 ms "
        f"| {'ok' if ours_ms <= 30 else 'MISSED'}, same to {gap:.0e} |"
    )
    return ours_ms


def write_rollouts(path, mib):
    """Rollouts of about 48 KB with ids and log-probabilities, in complete groups of eight."""
    draw, written, group = random.Random(0), 0, 0
    with Path(path).open("w") as file:
        while written < mib * 2**20:
            for sample in range(8):
                ids = [draw.randrange(49152) for _ in range(3300)]
                logprobs = [round(-draw.expovariate(2), 7) for _ in range(2300)]
                name = f"task-{group}@1#0a1b2c3d"
                record = {
                    "kind": "rollout", "id": f"{name}/{sample}", "task": f"task-{group}", "group": name,
                    "group_size": 8, "sample": sample, "seed": draw.randrange(2**53),
                    "policy": {"model": "m", "revision": "0123456789"},
                    "chunks": [{"token_ids": ids, "sampled": [[1000, 3300]], "logprobs": logprobs}],
                    "response": "some words " * 120, "turns": 1, "stop": "eos",
                    "steps": [{"span": [1000, 3300], "anchor": "00ff", "valid": True, "reward": 1.0, "nll": 0.5}],
                    "reward": float(draw.random() < 0.4),
                }  # fmt: skip
                line = json.dumps(record) + "\n"
                written += file.write(line)
            group += 1
    return Path(path).stat().st_size / 2**20


ORJSON_LOOP = """
import sys, orjson
with open(sys.argv[1], "rb", buffering=1 << 20) as source, open("/dev/null", "wb", buffering=1 << 20) as sink:
    for line in source:
        record = orjson.loads(line)
        record["advantage"] = 0.5
        sink.write(orjson.dumps(record))
        sink.write(b"\\n")
"""


def bench_filter(mib=FILE_MIB, runs=5):
    """One table line: whole processes, start-up included, from a file to /dev/null; a run of each in turn."""
    strop = str(Path(sys.executable).with_name("strop"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rollouts.jsonl")
        size = write_rollouts(path, mib)
        commands = {
            "ours": [strop, "advantage", "--grpo", "--keep-zero-variance", "-q", str(path)],
            "orjson": [sys.executable, "-c", ORJSON_LOOP, str(path)],
        }
        seconds, cpu, peak_mb = defaultdict(list), defaultdict(list), {}
        for _ in range(runs):
            for name, command in commands.items():
                took, used, peak_mb[name] = _measure(command)
                seconds[name].append(took)
                cpu[name].append(used)
    wall = {name: min(values) for name, values in seconds.items()}
    ratio = wall["orjson"] / wall["ours"]
    ok = ratio >= 1.6 and peak_mb["ours"] < 60
    print(
        f"| advantage --grpo, {size:.0f} MiB of rollouts to /dev/null | {size / wall['ours']:.0f} MiB/s, "
        f"{peak_mb['ours']:.0f} MB | orjson loop {size / wall['orjson']:.0f} MiB/s ({ratio:.2f}x; by CPU time "
        f"{min(cpu['orjson']) / min(cpu['ours']):.2f}x) | at least 1.6x, under 60 MB | {'ok' if ok else 'MISSED'} |"
    )
    return ratio, peak_mb["ours"]


def _measure(command):
    """Wall seconds, CPU seconds and peak resident MB of a child."""
    started = time.perf_counter()
    with Path(os.devnull).open("wb") as null:
        child = subprocess.Popen(command, stdout=null)
        _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{command[0]}: exit {child.returncode}")
    return time.perf_counter() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


if __name__ == "__main__":
    bench_gigpo()
    bench_filter()
