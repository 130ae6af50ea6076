"""The child-process side of reasoning-gym: makes entries and scores answers (see tasks/gym.py, tasks/verifiers/gym.py).

Everything of that package runs here: some of its data sets depend on Python's hash seed (fixed in a child), take
seconds to make an item, or evaluate the answer they score as code.
"""

from __future__ import annotations

import ast
import dataclasses
import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from strop.core.tasks.plain import from_plain, to_plain

# Items made from one data set object: building one costs up to half a second. Part of what decides task i.
CHUNK = 32
MOST_DATASETS = 8

# Modules that call eval() on an answer in order to accept a Python literal in it; here eval accepts nothing else.
EVALUATES_ANSWERS = (
    "algorithmic.string_insertion", "algorithmic.spiral_matrix", "algorithmic.binary_matrix", "games.n_queens",
)  # fmt: skip


def worker() -> Callable[[dict[str, Any]], Any]:
    """The handler. Requests: {"do": "names" | "check" | "make" | "score", ...}."""
    from importlib import import_module

    import reasoning_gym  # noqa: F401 (registers the data sets)

    for name in EVALUATES_ANSWERS:
        module: Any = import_module(f"reasoning_gym.{name}")
        module.eval = ast.literal_eval
    return Gym().handle


class Gym:
    """Data sets, the last few of them kept."""

    def __init__(self) -> None:
        from reasoning_gym.factory import DATASETS

        self._known: dict[str, tuple[Any, Any]] = DATASETS
        self._kept: OrderedDict[str, Any] = OrderedDict()

    def handle(self, request: dict[str, Any]) -> Any:
        """One request."""
        if request["do"] == "names":
            return sorted(self._known)
        name, config = request["dataset"], request["config"]
        if name not in self._known:
            return {"known": sorted(self._known)}
        if request["do"] == "check":
            return self._check(name, config)
        if request["do"] == "make":
            return self._make(name, config, request["seed"], request["item"])
        answer, entry = request["answer"], from_plain(request["entry"])
        return float(self._dataset(name, config, 0).score_answer(answer, entry))

    def _check(self, name: str, config: dict[str, Any]) -> dict[str, Any]:
        try:
            self._dataset(name, config, 0)
        except (TypeError, ValueError, AssertionError, AttributeError, KeyError) as error:
            fields = [field.name for field in dataclasses.fields(self._known[name][1])]
            own = [field for field in fields if field not in ("seed", "size")]
            return {"wrong": f"{type(error).__name__}: {error}", "settings": own}
        return {}

    def _make(self, name: str, config: dict[str, Any], seed: int, item: int) -> dict[str, Any]:
        import numpy as np

        dataset = self._dataset(name, config, seed)
        # A few generators also draw from the global sources.
        random.seed(seed * CHUNK + item)
        np.random.seed((seed * CHUNK + item) % 2**32)
        return {"entry": to_plain(dataset[item])}

    def _dataset(self, name: str, config: dict[str, Any], seed: int) -> Any:
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import create_dataset

        key = repr((name, sorted(config.items()), seed))
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        given = {field: tuple(value) if self._wants_tuple(name, field) else value for field, value in config.items()}
        if name == "composite":
            parts = given.get("datasets", [])
            given["datasets"] = [DatasetSpec(**{"config": {}, "weight": 1.0, **part}) for part in parts]
        dataset = create_dataset(name, **given, seed=seed, size=CHUNK)
        self._kept[key] = dataset
        if len(self._kept) > MOST_DATASETS:
            self._kept.popitem(last=False)
        return dataset

    def _wants_tuple(self, name: str, field: str) -> bool:
        fields = dataclasses.fields(self._known[name][1])
        return any(known.name == field and isinstance(known.default, tuple) for known in fields)
