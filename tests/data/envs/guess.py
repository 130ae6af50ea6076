"""An environment for `command:python guess.py`: find a number between 1 and 100 by words, in seven steps.

The number is the task's `secret`, or comes of the seed.
"""

import json
import sys

secret, tries = 0, 0


def answer(request):
    global secret, tries
    if request["op"] == "reset":
        secret, tries = request["task"].get("secret", request["seed"] % 100 + 1), 0
        return {"observation": "A number from 1 to 100. Your guess?"}
    if request["op"] == "snapshot":
        return {"state": {"secret": secret, "tries": tries}}
    if request["op"] == "restore":
        secret, tries = request["state"]["secret"], request["state"]["tries"]
        return {"observation": f"You have guessed {tries} times."}
    tries += 1
    try:
        guess = int(request["action"])
    except ValueError:
        return {"observation": "That is no number.", "valid": False, "done": tries == 7}
    if guess == secret:
        return {"observation": "Yes.", "reward": 1, "done": True}
    word = "more" if guess < secret else "less"
    return {"observation": f"It is {word}.", "reward": 0, "done": tries == 7}


for line in sys.stdin:
    print(json.dumps(answer(json.loads(line))), flush=True)
