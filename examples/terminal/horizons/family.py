"""Makes tasks of climbing stairs, and a scripted policy whose attempts need more turns the more stairs there are.

    python3 family.py NUMBER SEED TASKS POLICY

An attempt climbs at seven turns of ten and looks around at the others; one of four never climbs, and goes on until it is
stopped. So the success rate rises with the cap on turns up to some frontier, and the tokens go on rising beyond it.
"""

import json
import random
import sys
from pathlib import Path

MOST_STAIRS = 16
CLIMBS = 0.7
HOPELESS = 0.25
PATIENCE = 60


def attempt(stairs: int, draw: random.Random) -> list[str]:
    """The messages of one attempt."""
    if draw.random() < HOPELESS:
        return ["look"] * PATIENCE
    said: list[str] = []
    while said.count("up") < stairs:
        said.append("up" if draw.random() < CLIMBS else "look")
    return said


def main() -> None:
    """Writes the two files."""
    number, seed, tasks, policy = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    program = Path(__file__).with_name("stairs.py")
    draw = random.Random(seed)
    task_lines, script_lines = [], []
    for i in range(number):
        stairs = draw.randint(2, MOST_STAIRS)
        name = f"stairs-{i}"
        task = {"kind": "task", "id": name, "env": f"command:{sys.executable} {program}", "stairs": stairs,
                "verifier": {"name": "env"}}  # fmt: skip
        task_lines.append(json.dumps(task) + "\n")
        script_lines.append(json.dumps({"task": name, "messages": attempt(stairs, draw)}) + "\n")
    tasks.write_text("".join(task_lines), "utf-8")
    policy.write_text("".join(script_lines), "utf-8")


if __name__ == "__main__":
    main()
