"""The family `bfcl:CATEGORY`: conversations of the Berkeley Function Calling Leaderboard, version 4, multi-turn.

The cases, their simulated APIs and the checker are those of the package bfcl-eval; nothing of it is copied. A task
holds the user's messages (the first as `prompt`), which classes of functions there are, their first state, and as
`reference` the calls that solve it, turn by turn. Tasks are attempted in the env `functions`, which judges.

    multi_turn_base           four turns or so, all that is needed is said and there
    multi_turn_miss_func      a function is held back at first, and comes after a turn that cannot be done
    multi_turn_miss_param     a turn leaves out what a call needs, the next one says it
    multi_turn_long_context   as base, with much more text in what the functions answer

The package lists functions as excluded in 72 cases and does not act on it; neither do we.
"""

from __future__ import annotations

import ast
import json
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from strop.core.errors import Unavailable, UsageError
from strop.core.records import Task
from strop.core.tasks.families import Family, FamilyOptions

PACKAGE = "bfcl-eval"
# Its own requirements (vendors' SDKs, numpy 1.26.4, torch) are those of its model handlers, of which nothing runs here.
INSTALL = "pip install --no-deps bfcl-eval==2026.3.23 && pip install mpmath"
CATEGORIES = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
FILE = "BFCL_v4_{}.json"


class Bfcl(Family):
    """The cases of a category, in the package's order."""

    is_finite = True

    def __init__(self, category: str, options: FamilyOptions) -> None:
        super().__init__(f"bfcl:{category}", options)
        if category not in CATEGORIES:
            near = get_close_matches(category, CATEGORIES, n=1, cutoff=0.3) or CATEGORIES
            raise UsageError(f"bfcl has no multi-turn category {category!r} (did you mean {' or '.join(near)}?)")
        folder = data_folder()
        answers = {case["id"]: case["ground_truth"] for case in _lines(folder / "possible_answer", category)}
        self._tasks = [
            _task(case, answers[case["id"]], category)
            for case in _lines(folder, category)
            # Case N is the same conversation in all categories, with other words here and there.
            if self.admits(f"bfcl multi_turn {case['id'].rpartition('_')[2]}")
        ]

    def make(self, index: int, seed: int) -> Task:
        """Case `index`, whatever the seed. Raises IndexError beyond the last."""
        return self._tasks[index]


def data_folder() -> Path:
    """The folder of the package's data. Raises Unavailable without the package; nothing of it is imported."""
    spec = find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise Unavailable(f"the package {PACKAGE} is missing; install it with: {INSTALL}")
    return Path(next(iter(spec.submodule_search_locations))) / "data"


def parse_call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """A reference's call, e.g. `cd(folder='x')`: name, arguments by place, arguments by name. Nothing is evaluated.

    Raises ValueError for what is no call with literal arguments.
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"not a call: {text!r} ({error.msg})") from None
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"not a call by name: {text!r}")
    named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg is not None}
    if len(named) < len(node.keywords):
        raise ValueError(f"arguments that are unpacked: {text!r}")
    return node.func.id, [ast.literal_eval(value) for value in node.args], named


def _lines(folder: Path, category: str) -> list[dict[str, Any]]:
    with (folder / FILE.format(category)).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _task(case: dict[str, Any], calls: list[list[str]], category: str) -> Task:
    world: dict[str, Any] = {
        "classes": case["involved_classes"], "config": case["initial_config"], "turns": case["question"][1:],
    }  # fmt: skip
    if "missed_function" in case:
        world["held_back"] = case["missed_function"]
    if "long_context" in category:
        world["long_context"] = True
    return Task(
        id=case["id"], prompt=case["question"][0], env="functions", verifier={"name": "env"},
        reference={"calls": calls}, world=world,
    )  # fmt: skip
