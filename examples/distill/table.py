"""The table of the example: python table.py METRICS.jsonl...; means over seeds, +- half of their 95 % interval."""

import json
import math
import sys
from collections import defaultdict
from pathlib import Path

# Student's t, 97.5 %, by degrees of freedom.
T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78}
COMPASS = ("start", "compass", "beta-0.5", "beta-1", "opd")
NSD = ("nsd", "no-gate", "no-anchor", "unbounded")


def spread(values: list[float]) -> str:
    """Mean and half width over seeds, in words."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.3f}"
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return f"{mean:.3f} +-{T.get(len(values) - 1, 2.0) * deviation / math.sqrt(len(values)):.3f}"


def main() -> None:
    """Prints it."""
    found: defaultdict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    alone: dict[str, str] = {}
    for path in map(Path, sys.argv[1:]):
        for record in map(json.loads, path.read_text("utf-8").splitlines()):
            if record["kind"] == "metric" and "seed" in record:
                found[record["variant"], record["name"]][record["seed"]] = record["value"]
            elif record["kind"] == "metric" and record["name"] == "pass@1":
                alone[record["variant"]] = f"{record['value']:.3f} [{record['low']:.3f}, {record['high']:.3f}]"
    start = found["start", "pass@1"]
    print(f"held-out pass@1, {len(start)} seeds\n\nteacher {alone['teacher']}\n")
    print(f"{'student':<12} {'pass@1':<16} {'gain':<16} {'at its optimum':<16} {'coverage':<9} {'1-1':<6} "
          f"{'same sign':<10} {'|D_T|':<6} |O|")  # fmt: skip
    for name in COMPASS:
        own = found[name, "pass@1"]
        gain = spread([own[seed] - start[seed] for seed in own]) if name != "start" else ""
        more = [found[name, key] for key in ("coverage", "one_to_one", "sign_agreement", "mean_shift", "mean_offset")]
        cells = [f"{sum(one.values()) / len(one):.2f}" if one else "" for one in more]
        best = spread(list(found[name, "optimum"].values()))
        print(f"{name:<12} {spread(list(own.values())):<16} {gain:<16} {best:<16} {cells[0]:<9} {cells[1]:<6} "
              f"{cells[2]:<10} {cells[3]:<6} {cells[4]}")  # fmt: skip
    print(f"\nNSD without labels; the model as it came {alone['nsd-start']}\n")
    print(f"{'loss':<12} {'pass@1':<16} {'gated tokens moved by':<22} others (nats)")
    for name in NSD:
        moved = [spread(list(found[name, key].values())) for key in ("moved_gated", "moved_closed")]
        print(f"{name:<12} {spread(list(found[name, 'pass@1'].values())):<16} {moved[0]:<22} {moved[1]}")


if __name__ == "__main__":
    main()
