"""A world in a few lines, for `"env": "command:python3 stairs.py"`: climb as many stairs as the task has.

One JSON object a line comes in, one goes out. The message "up" climbs a stair; whatever else is said only takes time.
"""

import json
import sys

goal = floor = 0
for line in sys.stdin:
    asked = json.loads(line)
    if asked["op"] == "reset":
        goal, floor = asked["task"]["stairs"], 0
        answer = {"observation": f"{goal} stairs lead to the top. Say up to climb one."}
    elif asked["op"] == "step":
        is_step = asked["action"].strip() == "up"
        floor += is_step
        done = floor >= goal
        answer = {"observation": f"{goal - floor} to go.", "valid": is_step, "done": done}
        if done:
            answer |= {"success": True, "reward": 1.0}
    elif asked["op"] == "snapshot":
        answer = {"state": [goal, floor]}
    else:
        goal, floor = asked["state"]
        answer = {"observation": f"{goal - floor} to go."}
    print(json.dumps(answer), flush=True)
