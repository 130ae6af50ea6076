"""Shows what each schedule of caps came to: success, tokens, the cap at the end; and the same as metric records.

    python3 compare.py SEED RESULTS FILE...    a file holds the rollouts of a run (NAME.rollouts.jsonl), or the track of
                                               a replay of stored ones (NAME.replay.jsonl)
"""

import json
import sys
from pathlib import Path

import numpy as np

DRAWS = 2_000


def records(path: Path) -> list[dict]:
    """The records of a file."""
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]


def outcome(path: Path) -> dict:
    """Rollouts, successes, tokens and the last cap of a run or of a replay."""
    found = records(path)
    steps = [one for one in found if one["kind"] == "horizon"]
    rollouts = [one for one in found if one["kind"] == "rollout"]
    cap = round(steps[-1]["after"])
    if rollouts:
        wins = [one["success"] for one in rollouts if "error" not in one]
        tokens = sum(end - start for one in rollouts for chunk in one["chunks"] for start, end in chunk["sampled"])
    else:
        wins = [i < step["successes"] for step in steps for i in range(step["rollouts"] - step["errors"])]
        tokens = steps[-1]["tokens_total"]
    return {"wins": np.array(wins, float), "tokens": tokens, "cap": cap}


def interval(wins: np.ndarray, seed: int) -> tuple[float, float]:
    """The 95 % bootstrap interval of the mean over attempts."""
    draws = np.random.default_rng(seed).integers(0, len(wins), (DRAWS, len(wins)))
    low, high = np.quantile(wins[draws].mean(1), (0.025, 0.975))
    return float(low), float(high)


def main() -> None:
    """Prints the table and writes the records."""
    seed, results, files = int(sys.argv[1]), Path(sys.argv[2]), [Path(name) for name in sys.argv[3:]]
    found = {path.name.removesuffix(".jsonl"): outcome(path) for path in files}
    most = max(one["tokens"] for one in found.values())
    lines = []
    print(f"\n{'schedule':<18} {'how':<7} {'success [95 %]':<21} {'last third':>10} {'tokens':>8} {'share':>6}  cap")
    for name, one in found.items():
        schedule, _, how = name.rpartition(".")
        rate, (low, high) = one["wins"].mean(), interval(one["wins"], seed)
        late = one["wins"][2 * len(one["wins"]) // 3 :].mean()
        how = "run" if how == "rollouts" else how
        print(f"{schedule:<18} {how:<7} {rate:.3f} [{low:.3f}, {high:.3f}]  {late:>10.3f} {one['tokens']:>8} "
              f"{one['tokens'] / most:>6.2f} {one['cap']:>4}")  # fmt: skip
        about = {"schedule": schedule, "how": how, "n": len(one["wins"]), "seeds": [seed]}
        lines.append({"kind": "metric", "name": "success_rate", "value": rate, "low": low, "high": high, **about})
        lines.append({"kind": "metric", "name": "success_rate_last_third", "value": late, **about})
        lines.append({"kind": "metric", "name": "sampled_tokens", "value": one["tokens"], **about})
        lines.append({"kind": "metric", "name": "last_cap", "value": one["cap"], **about})
    results.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


if __name__ == "__main__":
    main()
