"""The family `textworld`: games by name and settings, the same for the same seed."""

from __future__ import annotations

import pytest

pytest.importorskip("textworld", reason="needs textworld")

from strop.core.errors import UsageError
from strop.core.tasks.families import FamilyOptions, open_family
from strop.core.tasks.textworld import GAMES
from strop.core.tasks.verifiers import open_verifier


def made(game, numbers, seed=1, **options):
    family = open_family(f"textworld:{game}", FamilyOptions(**options))
    tasks = [family.make(number, seed) for number in numbers]
    family.close()
    return tasks


@pytest.mark.parametrize("game", GAMES)
def test_every_game_makes_tasks_with_its_defaults(game):
    first, second = made(game, (0, 1))
    assert first.id == f"textworld:{game}-1-0"
    assert first.env == "textworld"
    assert first.world["game"] == game
    assert set(first.world["settings"]) == set(GAMES[game])
    assert first.world["seed"] != second.world["seed"]
    assert first.reference["commands"]
    assert not any(command in str(first.prompt) for command in first.reference["commands"] if len(command) > 15)
    open_verifier("env").check(first)
    # Made alone, after others, or by another family object: the same.
    assert made(game, (1,)) == [second]


def test_settings_change_the_game_and_the_id():
    (plain,) = made("tw-coin_collector", (0,))
    (deep,) = made("tw-coin_collector", (0,), settings=(("level", 8),))
    assert deep.id != plain.id
    assert len(deep.reference["commands"]) > len(plain.reference["commands"])


def test_the_parts_of_a_split_never_share_a_game():
    options = {"settings": (("level", 4),), "heldout_share": 0.5}
    parts = {split: made("tw-treasure_hunter", range(6), split=split, **options) for split in ("train", "heldout")}
    questions = {split: {"\n".join(task.reference["commands"]) for task in tasks} for split, tasks in parts.items()}
    assert not questions["train"] & questions["heldout"]


@pytest.mark.parametrize(
    ("game", "settings", "says"),
    [
        ("tw-simpel", (), "did you mean tw-simple"),
        ("tw-simple", (("goal", "x"),), "goal is 'x'; expected one of detailed, brief, none"),
        ("tw-simple", (("test", 1),), "test is 1"),
        ("tw-simple", (("level", 1),), "no setting 'level'"),
        ("tw-coin_collector", (("level", -1),), "level is -1"),
        ("tw-treasure_hunter", (("level", 99),), "makes no game tw-treasure_hunter with these settings"),
        ("custom", (("quest_length", 2), ("quest_breadth", 9)), "makes no game custom"),
    ],
)
def test_settings_that_make_no_game(game, settings, says):
    with pytest.raises(UsageError, match=says):
        made(game, (0,), settings=settings)
