"""Makes pairs of a request and an agent out of BFCL's multi-turn conversations (package bfcl-eval, Apache-2.0).

    python pairs.py SEED TRAIN TEST OUT    so many requests each; writes OUT/train.jsonl and OUT/test.jsonl

A request is what a user says in one turn whose reference calls are all of one API. It comes with three agents: one with
the functions that the calls need (raw label 2), one of the same API without any of them (1), one of an API that the
conversation does not involve (0). The label follows from the reference calls; nobody looked at it. Conversations, and
with them requests, are in one split alone.
"""

import json
import random
import sys
from pathlib import Path

from strop.core.debate.labels import normal_query
from strop.core.tasks.bfcl import data_folder, parse_call

TOOLS = 4
APIS = {
    "GorillaFileSystem": ("gorilla_file_system", "File clerk", "Works with files and folders of a file system"),
    "TwitterAPI": ("posting_api", "Post keeper", "Posts and reads messages on a social platform"),
    "TradingBot": ("trading_bot", "Broker", "Deals with stocks, orders and an account for trading"),
    "VehicleControlAPI": ("vehicle_control", "Driver's aid", "Looks after a car: engine, doors, fuel, tyres, trips"),
    "TicketAPI": ("ticket_api", "Help desk", "Keeps support tickets"),
    "TravelAPI": ("travel_booking", "Travel desk", "Deals with flights, bookings, cards and travel budgets"),
    "MathAPI": ("math_api", "Calculator", "Does arithmetic and statistics"),
    "MessageAPI": ("message_api", "Messenger", "Sends and reads messages in a workspace"),
}


def lines(path: Path) -> list[dict]:
    """The JSON objects of a file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


def tools_of(folder: Path) -> dict[str, dict[str, str]]:
    """API -> function -> what it does, in one sentence."""
    found = {}
    for api, (file, _, _) in APIS.items():
        documents = lines(folder / "multi_turn_func_doc" / f"{file}.json")
        found[api] = {
            one["name"]: one["description"].partition("Tool description:")[2].strip().split(". ")[0].rstrip(".")
            for one in documents
        }
    return found


def requests(folder: Path, tools: dict[str, dict[str, str]]) -> list[dict]:
    """Turns whose calls are of one API: conversation, text, API, functions needed."""
    answers = {one["id"]: one["ground_truth"] for one in lines(folder / "possible_answer/BFCL_v4_multi_turn_base.json")}
    found = []
    for case in lines(folder / "BFCL_v4_multi_turn_base.json"):
        for number, (said, calls) in enumerate(zip(case["question"], answers[case["id"]], strict=True)):
            names = {parse_call(call)[0] for call in calls}
            apis = [api for api in case["involved_classes"] if names and names <= set(tools[api])]
            text = " ".join(message["content"] for message in said).strip()
            if len(apis) == 1 and len(names) < TOOLS and len(text) < 400:
                found.append({"case": case["id"], "id": f"{case['id']}/{number}", "text": text, "api": apis[0],
                              "needed": sorted(names), "involved": case["involved_classes"]})  # fmt: skip
    return found


def agent(api: str, tools: dict[str, str], names: list[str]) -> dict:
    """The profile of an agent with these functions."""
    _, title, about = APIS[api]
    listed = [{"name": name, "description": tools[name]} for name in sorted(names)]
    return {"name": title, "profile": f"{about}.", "tools": listed}


def pairs(request: dict, tools: dict[str, dict[str, str]], split: str, draw: random.Random) -> list[dict]:
    """The three examples of a request."""
    api, needed = request["api"], request["needed"]
    others = [name for name in tools[api] if name not in needed]
    draw.shuffle(others)
    foreign = draw.choice([name for name in APIS if name not in request["involved"]])
    strangers = draw.sample(sorted(tools[foreign]), TOOLS)
    made = {
        2: agent(api, tools[api], needed + others[: TOOLS - len(needed)]),
        1: agent(api, tools[api], others[:TOOLS]),
        0: agent(foreign, tools[foreign], strangers),
    }
    return [
        {"id": f"{request['id']}/{raw}", "query": request["text"], "agent": one, "y_raw": raw, "split": split}
        for raw, one in made.items()
    ]


def main() -> None:
    """Writes the two files."""
    seed, train, test, out = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    draw = random.Random(seed)
    folder = data_folder()
    tools = tools_of(folder)
    found = requests(folder, tools)
    draw.shuffle(found)
    cases: dict[str, str] = {}
    seen: set[str] = set()
    chosen: dict[str, list[dict]] = {"train": [], "test": []}
    for request in found:
        short = [name for name, most in (("train", train), ("test", test)) if len(chosen[name]) < most]
        split = cases.setdefault(request["case"], short[0]) if short else None
        query = normal_query(request["text"])
        if split in short and query not in seen:
            seen.add(query)
            chosen[split].append(request)
    for name, wanted in chosen.items():
        made = [pair for request in wanted for pair in pairs(request, tools, name, draw)]
        draw.shuffle(made)
        (out / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in made), "utf-8")
        print(f"{name}: {len(wanted)} requests, {len(made)} pairs (of {len(found)} requests there are)")


if __name__ == "__main__":
    main()
