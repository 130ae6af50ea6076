"""Prints what the example measured, and writes the same figures as metric records.

    python table.py RESULTS ATTEMPTS... -- MEASURED...

MEASURED are files of debate-label with labels and metrics. Variants that several seeds measured become one row: means
and, below them, the half-widths of 95 % intervals (Student's t over seeds; the draws are of one pool and overlap).
Others have the interval of the accuracy (Wilson), and the mean reward R of their labels (bootstrap over pairs).
ATTEMPTS are the rollouts after 0, 1, ... updates of GRPO at the same tasks; their intervals are of a bootstrap over the
attempts of each task, so they hold for these tasks alone.
"""

import json
import random
import sys
from collections.abc import Callable, Iterable
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

COLUMNS = {
    "accuracy": "ACC", "binary_f1": "F1", "macro_f1": "macro", "grey_f1": "grey F1", "over_accept": "over-acc.",
    "positive_miss": "pos. miss", "structured_validity": "valid", "skill_grounding": "grounded",
    "conflict_resolution": "conflict",
}  # fmt: skip
PAIRED = ("accuracy", "grey_f1", "over_accept", "positive_miss")
# Student's t at 97.5 % by degrees of freedom.
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
RESAMPLES = 4000


def read(path: str) -> list[dict]:
    """The records of a file."""
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]


def half_width(values: list[float]) -> float | None:
    """Of the 95 % interval of the mean over seeds; None for one seed, and for more than the table of t knows."""
    t = T_975.get(len(values) - 1)
    return None if t is None else t * stdev(values) / sqrt(len(values))


def bootstrap(draw: Callable[[random.Random], float]) -> tuple[float, float]:
    """The middle 95 % of what `draw` gives, again and again."""
    generator = random.Random(0)
    drawn = sorted(draw(generator) for _ in range(RESAMPLES))
    return drawn[int(0.025 * RESAMPLES)], drawn[int(0.975 * RESAMPLES) - 1]


def mean_of(values: list[float]) -> dict:
    """Their mean with the interval of a bootstrap over them."""
    low, high = bootstrap(lambda generator: fmean(generator.choices(values, k=len(values))))
    return {"value": fmean(values), "low": low, "high": high, "n": len(values)}


def percent(value: float | None, form: str = ".1f") -> str:
    """A share in per cent, or a dash."""
    return "-" if value is None else format(100 * value, form)


def over_seeds(name: str, runs: list[dict]) -> dict:
    """One record of the metric `name` out of those of all seeds; a run with nothing to measure has no value."""
    values = [one["value"] for one in runs]
    made = {"kind": "metric", "name": name, "seeds": sorted({seed for one in runs for seed in one["seeds"]})}
    if None in values:
        return {**made, "value": None, "n": 0}
    half = half_width(values)
    bounds = {} if half is None else {"low": fmean(values) - half, "high": fmean(values) + half}
    return {**made, "value": fmean(values), **bounds, "n": sum(one["n"] for one in runs)}


def table(files: Iterable[str]) -> list[dict]:
    """Prints the rows, and gives their records."""
    metrics: dict[tuple[str, str], dict[str, list[dict]]] = {}
    rewards: dict[tuple[str, str], list[float]] = {}
    for file in files:
        found = read(file)
        key = next((one["how"], one["variant"]) for one in found if one["kind"] == "metric")
        for one in found:
            if one["kind"] == "metric":
                metrics.setdefault(key, {}).setdefault(one["name"], []).append(one)
            else:
                rewards.setdefault(key, []).append(one["reward"]["total"])
    made = []
    print(f"{'who':<7} {'variant':<18} {'n':>4} " + " ".join(f"{title:>9}" for title in COLUMNS.values()))
    for key, by_name in metrics.items():
        tags = dict(zip(("how", "variant"), key, strict=True))
        several = len(by_name["accuracy"]) > 1
        row = [over_seeds(name, by_name[name]) if several else by_name[name][0] for name in COLUMNS]
        shown = " ".join(f"{percent(one['value']):>9}" for one in row)
        print(f"{key[0]:<7} {key[1]:<18} {row[0]['n']:>4} {shown}")
        reward = {"kind": "metric", "name": "reward", **mean_of(rewards[key]), "seeds": row[0]["seeds"]}
        if several:
            halves = ["-" if "low" not in one else f"+-{percent(one['high'] - one['value'])}" for one in row]
            print(f"{'':<31} " + " ".join(f"{half:>9}" for half in halves))
        else:
            print(f"{'':<31}       ACC in [{percent(row[0].get('low'))}, {percent(row[0].get('high'))}]; "
                  f"R {reward['value']:.2f} [{reward['low']:.2f}, {reward['high']:.2f}]")  # fmt: skip
        made += [one | tags for one in [*row, reward]]
    gaps = [b - a for a, b in zip(rewards["router", "full"], rewards["router", "full+grpo"], strict=True)]
    gap = {"kind": "metric", "name": "reward_gap", **mean_of(gaps), "how": "router", "variant": "full+grpo - full"}
    print(f"router, full+grpo minus full: R {gap['value']:+.2f} [{gap['low']:+.2f}, {gap['high']:+.2f}] on test pairs")
    return [*made, gap, *paired(metrics)]


def paired(metrics: dict[tuple[str, str], dict[str, list[dict]]]) -> list[dict]:
    """Full debate minus each other variant of the rules, seed by seed on the same pairs."""
    made = []
    full = metrics.get(("rules", "full"), {})
    for (how, variant), by_name in metrics.items():
        if how != "rules" or variant == "full" or len(by_name["accuracy"]) < 2:
            continue
        shown = []
        for name in PAIRED:
            gaps = [a["value"] - b["value"] for a, b in zip(full[name], by_name[name], strict=True)]
            half = half_width(gaps)
            seeds = [seed for one in full[name] for seed in one["seeds"]]
            record = {"kind": "metric", "name": f"{name}_gap", "value": fmean(gaps), "seeds": seeds, "how": how,
                      "variant": f"full - {variant}"}  # fmt: skip
            made.append(record if half is None else record | {"low": fmean(gaps) - half, "high": fmean(gaps) + half})
            shown.append(f"{COLUMNS[name]} {percent(fmean(gaps), '+.1f')} +-{percent(half)}")
        print(f"rules, full minus {variant}: " + ", ".join(shown))
    return made


def attempts(files: list[str]) -> list[dict]:
    """Prints the mean reward after each update, and gives the records."""
    made = []
    by_update: list[list[list[float]]] = []
    for number, file in enumerate(files):
        groups: dict[str, list[float]] = {}
        for one in read(file):
            if one["kind"] == "rollout" and one.get("reward") is not None:
                groups.setdefault(one["group"], []).append(one["reward"])
        values = [reward for group in groups.values() for reward in group]
        low, high = bootstrap(lambda generator, groups=groups: redrawn(list(groups.values()), generator))
        print(f"GRPO, after {number} updates: R {fmean(values):.2f} [{low:.2f}, {high:.2f}] over {len(values)} "
              f"attempts at {len(groups)} pairs it is trained on")  # fmt: skip
        made.append({"kind": "metric", "name": "reward", "value": fmean(values), "low": low, "high": high,
                     "n": len(values), "how": "grpo", "updates": number})  # fmt: skip
        by_update.append(list(groups.values()))
    before, after = by_update[0], by_update[-1]
    low, high = bootstrap(lambda generator: redrawn(after, generator) - redrawn(before, generator))
    gap = made[-1]["value"] - made[0]["value"]
    print(f"GRPO, last minus first: {gap:+.2f} [{low:+.2f}, {high:+.2f}]")
    return [*made, {"kind": "metric", "name": "reward_gap", "value": gap, "low": low, "high": high, "how": "grpo"}]


def redrawn(groups: list[list[float]], generator: random.Random) -> float:
    """The mean of attempts drawn anew within each group."""
    return fmean(value for group in groups for value in generator.choices(group, k=len(group)))


def main() -> None:
    """Prints the tables and writes the file."""
    results, *files = sys.argv[1:]
    middle = files.index("--")
    made = table(files[middle + 1 :])
    made += attempts(files[:middle])
    part = Path(f"{results}.part")
    part.write_text("".join(json.dumps(one) + "\n" for one in made), "utf-8")
    part.replace(results)


if __name__ == "__main__":
    main()
