"""Right answers as examples: tasks in, sft records out."""

import json
import sys

for line in sys.stdin:
    task = json.loads(line)
    example = {"kind": "sft", "id": task["id"], "prompt": task["prompt"], "response": f"{task['reference']}\n"}
    print(json.dumps(example))
