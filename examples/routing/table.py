"""Prints the metric records of a file as the paper prints its table: one row a variant, shares in per cent."""

import json
import sys
from pathlib import Path

COLUMNS = {
    "accuracy": "ACC", "binary_f1": "F1", "macro_f1": "macro", "grey_f1": "grey F1", "over_accept": "over-acc.",
    "positive_miss": "pos. miss", "structured_validity": "valid", "skill_grounding": "grounded",
    "conflict_resolution": "conflict",
}  # fmt: skip


def main() -> None:
    """Prints the table."""
    rows: dict[tuple[str, str], dict[str, dict]] = {}
    for line in Path(sys.argv[1]).read_text("utf-8").splitlines():
        record = json.loads(line)
        rows.setdefault((record["how"], record["variant"]), {})[record["name"]] = record
    print(f"{'who':<7} {'variant':<18} {'n':>4} " + " ".join(f"{title:>9}" for title in COLUMNS.values()))
    for (how, variant), found in rows.items():
        cells = [found[name]["value"] for name in COLUMNS]
        shown = " ".join(f"{'-' if value is None else format(100 * value, '.1f'):>9}" for value in cells)
        print(f"{how:<7} {variant:<18} {found['accuracy']['n']:>4} {shown}")
        accuracy = found["accuracy"]
        print(f"{'':<26} {'':>4} ACC in [{100 * accuracy['low']:.1f}, {100 * accuracy['high']:.1f}]")


if __name__ == "__main__":
    main()
