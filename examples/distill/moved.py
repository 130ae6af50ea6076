"""How far training moved the tokens that the negative condition likes, and the others, in nats.

    python moved.py BEFORE.jsonl VARIANT SEED < AFTER.jsonl

Both files hold the same rollouts; `logp_ref` is what the model before and the one after training says of their tokens.
The gates are those of before.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def chunks(lines: Iterable[str]) -> dict[str, Any]:
    """The chunk of each rollout by its id."""
    records = [json.loads(line) for line in lines]
    return {r["id"]: r["chunks"][0] for r in records if r["kind"] == "rollout" and "gate" in r["chunks"][0]}


def main() -> None:
    """Prints two metric records."""
    before, after = chunks(Path(sys.argv[1]).read_text("utf-8").splitlines()), chunks(sys.stdin)
    gated, closed = [], []
    for name, chunk in before.items():
        for gate, old, new in zip(chunk["gate"], chunk["logp_ref"], after[name]["logp_ref"], strict=True):
            if gate > 0:
                gated.append((gate, new - old))
            else:
                closed.append(new - old)
    weight = sum(gate for gate, _ in gated)
    values = {
        "moved_gated": sum(gate * change for gate, change in gated) / weight if weight else None,
        "moved_closed": sum(closed) / len(closed) if closed else None,
    }
    for name, value in values.items():
        fields = {"kind": "metric", "name": name, "value": value, "variant": sys.argv[2], "seed": int(sys.argv[3])}
        print(json.dumps(fields))


if __name__ == "__main__":
    main()
