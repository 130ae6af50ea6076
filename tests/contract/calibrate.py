#!/usr/bin/env python3
"""calibrate: replay of 89 terminal tasks x 5 tries of one model (tests/data/terminal-trials)."""
import collections, json, os
from _run import DATA, fail, strop

INFRA = {"CancelledError", "DaytonaError", "VerifierTimeoutError"}
rows = [json.loads(l) for l in open(os.path.join(DATA, "terminal-trials", "tmax-27b.jsonl"), encoding="utf-8")]
mine = [r for r in rows if r["model"] == "tmax-27b"]
seen, records, want = collections.Counter(), [], collections.defaultdict(lambda: [0, 0, 0])
for r in mine:
    k = seen[r["task"]]
    seen[r["task"]] += 1
    broken = r["exception"] in INFRA or r["reward"] is None
    ok = not broken and r["reward"] >= 1
    want[r["task"]][2 if broken else (0 if ok else 1)] += 1
    records.append({"kind": "rollout", "id": f"{r['task']}/{k}", "task": r["task"], "group": r["task"], "sample": k,
                    **({"error": r["exception"] or "no reward"} if broken else {"success": ok, "reward": r["reward"]})})
out, _, _ = strop(["calibrate", "--band", "0.2:0.8", "--only", "task"], records)
if len(out) != len(want):
    fail(f"{len(out)} tasks, expected {len(want)}")
for t in out:
    c, (ok, bad, broken) = t["calibration"], want[t["id"]]
    if (c["successes"], c["attempts"], c["errors"]) != (ok, ok + bad, broken):
        fail(f"{t['id']}: {c}, expected {ok} of {ok + bad}, {broken} errors")
    n = ok + bad
    verdict = "invalid" if n == 0 else "too_hard" if ok / n < .2 else "too_easy" if ok / n > .8 else "accept"
    if c["verdict"] != verdict:
        fail(f"{t['id']}: verdict {c['verdict']}, expected {verdict}")
print(f"calibrate: {len(out)} tasks, verdicts {dict(collections.Counter(t['calibration']['verdict'] for t in out))}")
