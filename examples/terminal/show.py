"""Shows rollouts as people want to see them: who passed which assertion, and how the horizon moved."""

import json
import sys
from pathlib import Path


def records(name: str) -> list[dict]:
    """The records of a file."""
    return [json.loads(line) for line in Path(name).read_text("utf-8").split("\n") if line]


def main() -> None:
    """Prints the tables of the files named."""
    if sys.argv[1] == "--horizon":
        for step in records(sys.argv[2]):
            print(f"\nhorizon: {step['before']:g} turns before, {step['after']:g} after {step['successes']} successes")
        return
    print(f"{'task':<18} {'policy':<7} {'attempt':>7} {'turns':>5}  {'ended by':<20} {'reward':>6}  assertions")
    for name in sys.argv[1:]:
        policy = name.rpartition("/")[2].partition(".")[0]
        for record in records(name):
            if record["kind"] != "rollout":
                continue
            if "error" in record:
                print(f"{record['task']:<18} {policy:<7} {record['sample']:>7}  error: {record['error'][:60]}")
                continue
            marks = " ".join(
                f"{'+' if one['status'] == 'passed' else '-'}{one['name'].removeprefix('test_')}"
                for one in record.get("assertions") or []
            )
            print(
                f"{record['task']:<18} {policy:<7} {record['sample']:>7} {record['turns']:>5}  {record['stop']:<20} "
                f"{record['reward']:>6.2f}  {marks}"
            )


if __name__ == "__main__":
    main()
