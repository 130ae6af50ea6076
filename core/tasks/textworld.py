"""The family `textworld:GAME`: text adventures that the package textworld makes, no two alike.

    tw-simple            a house of six rooms and a meal; --set rewards=dense|balanced|sparse, goal=detailed|brief|none
    tw-coin_collector    find the coin; --set level=1..300
    tw-treasure_hunter   find a thing behind doors and in boxes; --set level=1..30
    tw-cooking           read a recipe, cook, eat; --set recipe, take, go, open, cook, cut, drop, recipe_seed, split
    custom               rooms and quests at random; --set rooms, objects, quest_length, quest_breadth, quests

The record holds the game's settings and seed, from which the env makes it again, and as `reference` the commands that
win it. Task i depends on the seed and i alone, under one version of the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

from strop.core.errors import Unavailable, UsageError, missing_extra
from strop.core.records import Task
from strop.core.seeds import derive_seed
from strop.core.tasks.families import Family, FamilyOptions
from strop.core.tasks.verifiers.child import Child, ChildError, ChildRaised

PACKAGE = "textworld"
WORKER = "strop.core.envs.textworld_worker:worker"
MAKE_LIMIT_S = 120.0
MOST_DRAWS = 100
# The package hands its seed to numpy, which takes 32 bits.
SEEDS = 2**32
PROMPT = (
    "You play a text adventure. Each of your messages is one command to the game and nothing else, such as: look, "
    "inventory, go north, examine key, take key from box, open door, unlock door with key, put apple on table."
)

# Each game's settings with their defaults; a tuple holds what is allowed, the default first.
GAMES: dict[str, dict[str, Any]] = {
    "tw-simple": {
        "rewards": ("dense", "balanced", "sparse"), "goal": ("detailed", "brief", "none"), "test": (False, True),
    },
    "tw-coin_collector": {"level": 1},
    "tw-treasure_hunter": {"level": 1},
    "tw-cooking": {
        "recipe": 1, "take": 0, "go": (1, 6, 9, 12), "open": (False, True), "cook": (False, True),
        "cut": (False, True), "drop": (False, True), "recipe_seed": 0, "split": (None, "train", "valid", "test"),
    },
    "custom": {"rooms": 3, "objects": 6, "quest_length": 3, "quest_breadth": 1, "quests": 1},
}  # fmt: skip


class TextWorld(Family):
    """Options: settings, those of the game."""

    applies = frozenset({"settings"})

    def __init__(self, game: str, options: FamilyOptions) -> None:
        super().__init__(f"{PACKAGE}:{game}", options)
        given = dict(options.settings)
        if (problem := settings_problem(game, given)) is not None:
            raise UsageError(problem)
        require()
        self._game = game
        self._settings = whole_settings(game, given)
        self._version = _version()
        self._child = Child(WORKER, cpu_limit_s=MAKE_LIMIT_S, confined=False)

    def make(self, index: int, seed: int) -> Task:
        """Task `index` under `seed`. Raises UsageError where there is no game with these settings."""
        own_seed, made = self._draw(index, seed)
        return Task(
            id=self.task_id(seed, index),
            prompt=[{"role": "user", "content": PROMPT}],
            env=PACKAGE,
            verifier={"name": "env"},
            reference={"commands": made["walkthrough"], "max_score": made["max_score"]},
            world={"game": self._game, "settings": self._settings, "seed": own_seed, "version": self._version},
            sampling={"max_tokens": 64},
        )

    def close(self) -> None:
        """Ends the child process."""
        self._child.close()

    def _draw(self, index: int, seed: int) -> tuple[int, dict[str, Any]]:
        failure = None
        for draw in range(MOST_DRAWS):
            # The first draw has no number, so that a split changes nothing about the tasks it lets through at once.
            own_seed = derive_seed(seed, self.name, index, *([draw] if draw else [])) % SEEDS
            request = {"do": "make", "game": self._game, "settings": self._settings, "seed": own_seed}
            try:
                made: dict[str, Any] = self._child.call(request)
            except ChildRaised as error:
                # Some seeds have no quest of the wanted length; settings that are wrong have none under any.
                failure = error
                if draw >= 9:
                    break
                continue
            except ChildError as error:
                raise Unavailable(f"textworld cannot make a game: {error}") from None
            # Two games that are won by the same commands are the same question.
            if self.admits("\n".join(made["walkthrough"])):
                return own_seed, made
        if failure is not None:
            raise UsageError(f"textworld makes no game {self._game} with these settings: {failure}")
        raise UsageError(
            f"--split {self.options.split}: no game found in {MOST_DRAWS} draws; raise --heldout-share, or this "
            "game has too few solutions to be parted"
        )


def settings_problem(game: str, given: Mapping[str, Any]) -> str | None:
    """What is wrong with a game's name or settings, in words."""
    if game not in GAMES:
        near = get_close_matches(game, GAMES, n=1) or GAMES
        return f"textworld has no game {game!r} (did you mean {' or '.join(near)}?)"
    known = GAMES[game]
    for name, value in given.items():
        if name not in known:
            return f"{game} has no setting {name!r} (known: {', '.join(known)})"
        allowed = known[name]
        if isinstance(allowed, tuple):
            if not any(value is choice or (value == choice and type(value) is type(choice)) for choice in allowed):
                return f"{game}: {name} is {value!r}; expected one of {', '.join(map(str, allowed))}"
        elif not isinstance(value, int) or isinstance(value, bool) or value < 0:
            return f"{game}: {name} is {value!r}; expected a whole number"
    return None


def whole_settings(game: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings given, and the defaults of all others."""
    defaults = {name: value[0] if isinstance(value, tuple) else value for name, value in GAMES[game].items()}
    return defaults | dict(given)


def require() -> None:
    """Raises Unavailable without the package."""
    if find_spec(PACKAGE) is None:
        raise missing_extra(PACKAGE, PACKAGE)


def _version() -> str:
    from importlib.metadata import version

    return version(PACKAGE)
