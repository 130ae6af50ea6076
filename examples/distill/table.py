"""The table of the example: python table.py RESULTS METRICS.jsonl...; means over seeds, +- half of their 95 % interval.

RESULTS gets the same figures as metric records.
"""

import json
import math
import sys
from collections import defaultdict
from pathlib import Path

# Student's t, 97.5 %, by degrees of freedom.
T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78}
COMPASS = ("start", "compass", "beta-0.5", "beta-1", "opd")
SIGNALS = ("coverage", "one_to_one", "sign_agreement", "mean_shift", "mean_offset")
NSD = ("nsd", "no-gate", "no-anchor", "unbounded")

BySeed = dict[int, float]


def half_width(values: list[float]) -> float | None:
    """Half of the mean's 95 % interval over seeds; None with one seed."""
    if len(values) == 1:
        return None
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return T.get(len(values) - 1, 2.0) * deviation / math.sqrt(len(values))


def spread(by_seed: BySeed) -> str:
    """Mean and half width over seeds, in words."""
    values = list(by_seed.values())
    if not values:
        return ""
    half = half_width(values)
    return f"{sum(values) / len(values):.3f}" + ("" if half is None else f" +-{half:.3f}")


def record(variant: str, name: str, by_seed: BySeed) -> dict[str, object]:
    """The figure over seeds as a metric record."""
    values = list(by_seed.values())
    mean, half = sum(values) / len(values), half_width(values)
    bounds = {} if half is None else {"low": mean - half, "high": mean + half}
    fields = {"name": name, "variant": variant, "value": mean, **bounds, "n": len(values), "seeds": sorted(by_seed)}
    return {"kind": "metric", **fields}


def main() -> None:
    """Prints the table and writes the records."""
    found: defaultdict[tuple[str, str], BySeed] = defaultdict(dict)
    alone: dict[str, str] = {}
    records: list[dict[str, object]] = []
    for path in map(Path, sys.argv[2:]):
        for one in map(json.loads, path.read_text("utf-8").splitlines()):
            if one["kind"] == "metric" and "seed" in one:
                found[one["variant"], one["name"]][one["seed"]] = one["value"]
            elif one["kind"] == "metric" and one["name"] == "pass@1":
                alone[one["variant"]] = f"{one['value']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"
                records.append(one)
    start = found["start", "pass@1"]
    for name in COMPASS[1:]:
        found[name, "gain"] = {seed: value - start[seed] for seed, value in found[name, "pass@1"].items()}
    print(f"held-out pass@1, {len(start)} seeds\n\nteacher {alone['teacher']}\n")
    print(f"{'student':<12} {'pass@1':<16} {'gain':<16} {'at its optimum':<16} {'coverage':<9} {'1-1':<6} "
          f"{'same sign':<10} {'|D_T|':<6} |O|")  # fmt: skip
    for name in COMPASS:
        pass_1, gain, best = (spread(found[name, key]) for key in ("pass@1", "gain", "optimum"))
        more = [found[name, key] for key in SIGNALS]
        cells = [f"{sum(one.values()) / len(one):.2f}" if one else "" for one in more]
        print(f"{name:<12} {pass_1:<16} {gain:<16} {best:<16} {cells[0]:<9} {cells[1]:<6} {cells[2]:<10} "
              f"{cells[3]:<6} {cells[4]}")  # fmt: skip
    print(f"\nNSD without labels; the model as it came {alone['nsd-start']}\n")
    print(f"{'loss':<12} {'pass@1':<16} {'gated tokens moved by':<22} others (nats)")
    for name in NSD:
        pass_1, gated, closed = (spread(found[name, key]) for key in ("pass@1", "moved_gated", "moved_closed"))
        print(f"{name:<12} {pass_1:<16} {gated:<22} {closed}")
    records += [record(variant, name, by_seed) for (variant, name), by_seed in found.items() if by_seed]
    Path(sys.argv[1]).write_text("".join(json.dumps(one) + "\n" for one in records), "utf-8")


if __name__ == "__main__":
    main()
