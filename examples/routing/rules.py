#!/usr/bin/env python3
"""Rule roles for `strop debate-label --role command:...`: they count words and know nothing of the world.

Support looks at the whole profile, as a search would: shared words are enough. Objection looks at each tool by itself:
one must be about what is asked. The judge asks which tool does it, and follows the objection unless a tool is near
enough; a skill that warns of over-acceptance makes it ask for more. One JSON object a line in, one out.
"""

import json
import re
import sys

# From here on a tool is taken to do what is asked, an agent to be of its subject; WARNED is added after a warning.
TOOL_NEAR, TOPIC_NEAR, WARNED = 0.5, 0.08, 0.17
COMMON = frozenset(
    re.findall(
        r"[a-z]+",
        "a an and any are as at be by can could do for from get give has have help how i if in into is it its me my of "
        "on or our please that the their then there these this to us use want was we what when which who will with "
        "would you your",
    )
)


def words(text: str) -> set[str]:
    """The words of a text, without the most common ones and without endings."""
    found = re.findall(r"[a-z]+", text.lower().replace("_", " "))
    return {word[:5] for word in found if word not in COMMON and len(word) > 2}


def near(of: set[str], within: set[str]) -> float:
    """The share of some words that others hold."""
    return len(of & within) / len(of) if of else 0.0


def best_tool(request: set[str], agent: dict) -> tuple[str, float]:
    """The tool whose name and description the request has most of; the name counts for three quarters."""
    scored = [
        (0.75 * near(words(one["name"]), request) + 0.25 * near(words(one["description"]), request), one["name"])
        for one in agent["tools"]
    ]
    score, name = max(scored, default=(0.0, "none"))
    return name, score


def speak(asked: dict) -> str:
    """What a role says."""
    example = asked["example"]
    request, agent = words(example["query"]), example["agent"]
    whole = words(" ".join([agent["profile"], *(f"{one['name']} {one['description']}" for one in agent["tools"])]))
    topic = near(request, whole)
    tool, score = best_tool(request, agent)
    warned = next((one["id"] for one in asked["skills"] if "over_accept" in one["tags"]), None)
    cited = warned or (asked["skills"][0]["id"] if asked["skills"] else None)
    cite = f" [skill:{cited}]" if cited else ""
    needed = TOOL_NEAR + (WARNED if warned else 0)
    if asked["role"] == "support":
        vote = 2 if topic >= TOPIC_NEAR else 0
        return f"The profile has {topic:.2f} of the request.\nVote: {vote}"
    if asked["role"] == "objection":
        vote = 2 if score >= needed else 1 if topic >= TOPIC_NEAR else 0
        return f"The nearest tool, {tool}, is at {score:.2f}.\nVote: {vote}"
    if asked["role"] == "router":
        verdict = 2 if (topic + score) / 2 >= TOOL_NEAR / 2 else 1 if topic >= TOPIC_NEAR else 0
        reason = f"Profile and nearest tool, {tool}, are at {(topic + score) / 2:.2f}.{cite}"
        return f"## Judgement\n{reason}\n## Verdict\nVerdict: {verdict}"
    if asked["role"] == "guidance":
        return f"Does {tool} do it?"
    verdict = 2 if score >= needed else 1 if topic >= TOPIC_NEAR else 0
    gap = {2: "none", 1: "tools", 0: "topic"}[verdict]
    return f"{tool} is at {score:.2f}.{cite}\nGap: {gap}\nVerdict: {verdict}"


def main() -> None:
    """Answers until stdin ends."""
    for line in sys.stdin:
        print(json.dumps({"text": speak(json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
