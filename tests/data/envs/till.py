"""An environment with tools: put the wanted things into a basket, then say so. The task's `wanted` are their names."""

import json
import sys

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "put",
            "description": "Put a thing into the basket.",
            "parameters": {"type": "object", "properties": {"thing": {"type": "string"}}, "required": ["thing"]},
        },
    }
]
wanted, basket = [], []


def step(request):
    if not request["calls"]:
        success = sorted(basket) == sorted(wanted)
        tests = [{"name": thing, "status": "passed" if thing in basket else "failed"} for thing in wanted]
        return {"done": True, "success": success, "assertions": tests}
    results = []
    for call in request["calls"]:
        if not call["valid"]:
            results.append(None)
        elif call["arguments"]["thing"] in basket:
            results.append({"text": "It is there already.", "valid": False})
        else:
            basket.append(call["arguments"]["thing"])
            results.append(f"{len(basket)} in the basket")
    return {"results": results}


for line in sys.stdin:
    request = json.loads(line)
    if request["op"] == "reset":
        wanted, basket = request["task"]["wanted"], []
        said = {"observation": [{"role": "user", "content": f"Put in {wanted}."}], "tools": TOOLS}
    else:
        said = step(request)
    print(json.dumps(said), flush=True)
