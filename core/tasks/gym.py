"""The family `reasoning-gym:NAME`: every data set of the package reasoning-gym, with its own scorer as verifier.

The reference holds the whole entry, so that an answer can be scored without making the entry again, and `verifier`
names the version of the package that made it. Entries are made in a child process with a fixed hash seed (five data
sets depend on it): the same seed and version give the same tasks.

Task i is item i mod 32 of the data set whose seed is derived from (seed, family, i div 32).
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

from strop.core.errors import Unavailable, UsageError, missing_extra
from strop.core.records import Task
from strop.core.seeds import derive_seed
from strop.core.tasks.families import Family, FamilyOptions, one_of
from strop.core.tasks.gym_worker import CHUNK
from strop.core.tasks.verifiers.child import Child, ChildError

PACKAGE = "reasoning-gym"
WORKER = "strop.core.tasks.gym_worker:worker"
MAKE_LIMIT_S = 300.0
MOST_DRAWS = 500
# Some data sets hand their seed to numpy, which takes 32 bits.
SEEDS = 2**32 - CHUNK
MAX_TOKENS = 1024
NONSENSE = "I would rather not say."
CHAT_REQUEST = "{question}\n\nGive your final answer between <answer> and </answer> tags."


class Gym(Family):
    """Options: settings (the data set's own, e.g. min_terms=2) and format.

    "chat" (default) asks in a user's message for the answer in <answer> tags, and scores what stands in them; "text" is
    the bare question, and the whole response is the answer.
    """

    applies = frozenset({"settings", "format"})

    def __init__(self, dataset: str, options: FamilyOptions) -> None:
        super().__init__(f"{PACKAGE}:{dataset}", options)
        self._is_chat = one_of("format", options.format, ("chat", "text")) == "chat"
        self._dataset = dataset
        self._config = dict(options.settings)
        for name in ("seed", "size"):
            if name in self._config:
                raise UsageError(f"--set {name}=...: --seed and -n decide this")
        self._version = gym_version()
        self._has_tried_scorer = False
        self._child = Child(WORKER, cpu_limit_s=MAKE_LIMIT_S)
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    def make(self, index: int, seed: int) -> Task:
        """Task `index` under `seed`. Raises Unavailable where the package cannot make it."""
        entry = self._entry(index, seed)
        question = entry["question"]
        return Task(
            id=self.task_id(seed, index),
            prompt=[{"role": "user", "content": CHAT_REQUEST.format(question=question)}] if self._is_chat else question,
            verifier={
                "name": PACKAGE,
                "version": self._version,
                "extract": "tag" if self._is_chat else "response",
            },
            reference={"dataset": self._dataset, "config": self._config, "entry": entry},
            sampling={"max_tokens": MAX_TOKENS},
        )

    def close(self) -> None:
        """Ends the child process."""
        self._child.close()

    def _entry(self, index: int, seed: int) -> dict[str, Any]:
        chunk, item = divmod(index, CHUNK)
        for draw in range(MOST_DRAWS):
            # The first draw has no number, so that a split changes nothing about the tasks it lets through at once.
            own_seed = derive_seed(seed, self.name, chunk, *([draw] if draw else [])) % SEEDS
            made = self._call("make", seed=own_seed, item=item)
            entry: dict[str, Any] = made["entry"]
            if self.admits(entry["question"]):
                self._try_scorer(entry)
                return entry
        raise UsageError(
            f"--split {self.options.split}: no question found in {MOST_DRAWS} draws; raise --heldout-share, or this "
            "data set has too few questions to be parted"
        )

    def _try_scorer(self, entry: dict[str, Any]) -> None:
        """Once: does the scorer tell an answer from nonsense? That of game_of_life_halting 0.1.25 does not."""
        if self._has_tried_scorer:
            return
        self._has_tried_scorer = True
        try:
            score = self._child.call({**self._request("score"), "entry": entry, "answer": NONSENSE})
        except ChildError:
            return
        if score >= 1:
            self.notices.append(
                f"reasoning-gym's own scorer of {self._dataset} gives {NONSENSE!r} full marks: do not train on it"
            )

    def _check(self) -> None:
        found = self._call("check")
        if "known" in found:
            near = get_close_matches(self._dataset, found["known"], n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "synth-tasks --list names them"
            raise UsageError(f"reasoning-gym has no data set {self._dataset!r} ({hint})")
        if "wrong" in found:
            known = ", ".join(found["settings"])
            raise UsageError(f"{self._dataset} does not take these --set: {found['wrong']} (known: {known})")

    def _request(self, do: str) -> dict[str, Any]:
        return {"do": do, "dataset": self._dataset, "config": self._config}

    def _call(self, do: str, **more: Any) -> Any:
        try:
            return self._child.call({**self._request(do), **more})
        except ChildError as error:
            raise Unavailable(f"reasoning-gym cannot make a task of {self._dataset}: {error}") from None


def gym_version() -> str:
    """The installed version of the package. Raises Unavailable without it."""
    if find_spec("reasoning_gym") is None:
        raise missing_extra(PACKAGE, "envs")
    from importlib.metadata import version

    return version(PACKAGE)


def gym_names() -> list[str]:
    """All data sets of the package. Raises Unavailable without it."""
    gym_version()
    child = Child(WORKER, cpu_limit_s=MAKE_LIMIT_S)
    try:
        names: list[str] = child.call({"do": "names"})
    except ChildError as error:
        raise Unavailable(f"reasoning-gym does not answer: {error}") from None
    finally:
        child.close()
    return names
