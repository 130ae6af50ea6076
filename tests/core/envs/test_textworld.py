"""The env `textworld`: every kind of game is won by its walkthrough, and nothing but the game hears the policy."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("textworld", reason="needs textworld")

from strop.core.envs.textworld import TextWorldRoom, command_in
from strop.core.envs.textworld_worker import is_meta
from strop.core.errors import DataError
from strop.core.records import Record, Task
from strop.core.sandbox.protocol import SandboxLost
from strop.core.tasks.families import FamilyOptions, open_family

GAMES = [
    ("tw-simple", (("rewards", "dense"),)),
    ("tw-simple", (("rewards", "sparse"), ("goal", "none"), ("test", True))),
    ("tw-coin_collector", (("level", 3),)),
    ("tw-treasure_hunter", (("level", 12),)),
    ("tw-cooking", (("recipe", 2), ("take", 1), ("cook", True), ("open", True), ("go", 6))),
    ("custom", (("rooms", 4), ("quest_length", 4))),
    ("custom", (("quests", 2), ("quest_length", 2))),
]


@pytest.fixture(scope="module")
def room():
    made = TextWorldRoom()
    yield made
    made.close()


def tasks(game, count=1, settings=(), seed=1):
    family = open_family(f"textworld:{game}", FamilyOptions(settings=settings))
    made = []
    for number in range(count):
        record = Record.parse(Record.make("task", family.make(number, seed)).encode().decode(), None)
        made.append((record, record.view(Task)))
    family.close()
    return made


@pytest.fixture(scope="module")
def simple():
    ((record, task),) = tasks("tw-simple")
    return record, task


def say(world, text):
    return world.act(text, [], seconds_left=60)


def walk(world, commands):
    outcomes = [say(world, command) for command in commands]
    assert not any(outcome.done for outcome in outcomes[:-1])
    return outcomes


@pytest.mark.parametrize(("game", "settings"), GAMES)
def test_the_walkthrough_wins_and_says_nothing_before_the_end(room, game, settings):
    for record, task in tasks(game, 1, settings):
        world = room.world(record, task, 0)
        opening = world.reset()
        assert opening.tools == []
        (message,) = opening.messages
        assert message["content"].startswith(task.prompt[0]["content"])
        assert "-= " in message["content"]
        assert "$$" not in message["content"]
        assert not message["content"].endswith(">")
        outcomes = walk(world, task.reference["commands"])
        assert (outcomes[-1].done, outcomes[-1].stop) == (True, "env")
        assert all(outcome.results[0].valid for outcome in outcomes)
        assert sum(outcome.reward for outcome in outcomes) == pytest.approx(1.0)
        verdict = world.judge()
        assert (verdict.reward, verdict.success) == (1.0, True)
        assert verdict.details["score"] == task.reference["max_score"]
        world.close()


def test_half_of_the_way_is_a_part_of_the_reward_and_no_success(room, simple):
    record, task = simple
    world = room.world(record, task, 0)
    world.reset()
    outcomes = walk(world, task.reference["commands"][:3])
    assert outcomes[0].reward == pytest.approx(1 / task.reference["max_score"])
    verdict = world.judge()
    assert verdict.reward == pytest.approx(3 / task.reference["max_score"])
    assert not verdict.success
    world.close()


def test_a_game_that_is_lost(room):
    record, task = tasks("tw-cooking", settings=(("recipe", 1), ("take", 0), ("cook", True)))[0]
    world = room.world(record, task, 0)
    world.reset()
    commands = task.reference["commands"]
    # To cook an ingredient a second time burns it.
    cook = next(number for number, command in enumerate(commands) if command.startswith("cook "))
    outcomes = walk(world, [*commands[: cook + 1], commands[cook]])
    assert outcomes[-1].done
    verdict = world.judge()
    assert (verdict.success, verdict.details["lost"], verdict.details["won"]) == (False, True, False)
    assert verdict.reward < 1
    world.close()


def test_what_the_game_does_not_understand(room, simple):
    record, task = simple
    world = room.world(record, task, 0)
    world.reset()
    texts = ("look", "dance wildly", "take moon", "go up", "", "x" * 300, "öffne Tür \x00\x1b \ud800")
    answers = {text: say(world, text).results[0] for text in texts}
    assert [answer.valid for answer in answers.values()] == [True, False, False, True, False, False, False]
    assert answers["dance wildly"].text == "That's not a verb I recognise."
    assert "-= Bedroom =-" in answers["look"].text
    assert ">" not in answers["look"].text
    world.close()


@pytest.mark.parametrize(
    "text", ["save", "Script", "look. save", "restart", "quit", "wait then undo", "tw-trace-actions"]
)
def test_the_interpreter_hears_nothing(room, simple, text):
    record, task = simple
    world = room.world(record, task, 0)
    world.reset()
    before = sorted(os.listdir(room.folder()))
    outcome = say(world, text)
    assert (outcome.done, outcome.results[0].valid) == (False, False)
    assert sorted(os.listdir(room.folder())) == before
    assert world.snapshot() == {"commands": []}
    assert walk(world, task.reference["commands"])[-1].done
    world.close()


def test_words_of_the_game_are_not_the_interpreters():
    for command in ("open chest drawer", "take test tube", "examine scope", "unlock door with old key", "eat meal"):
        assert not is_meta(command)


def test_the_command_in_a_message():
    assert command_in("<think>go north?\n</think>\n\n  > go south \nand then east") == "go south"
    assert command_in("<think>go north") == ""
    assert command_in("look") == "look"


def test_a_snapshot_goes_back_and_into_another_world(room, simple):
    record, task = simple
    world, other = room.world(record, task, 0), room.world(record, task, 5)
    world.reset()
    commands = task.reference["commands"]
    third = walk(world, commands[:3])[-1]
    snapshot = json.loads(json.dumps(world.snapshot()))
    assert walk(world, commands[3:])[-1].done
    for again in (world, other):
        assert third.results[0].text in again.restore(snapshot).messages[0]["content"]
        assert walk(again, commands[3:])[-1].done
        assert again.judge().success
        again.close()


def test_the_same_seed_is_the_same_game_in_another_room(room, simple):
    record, task = simple
    assert tasks("tw-simple")[0][1] == task
    own = TextWorldRoom()
    first, second = room.world(record, task, 0), own.world(record, task, 1)
    assert first.reset() == second.reset()
    for command in ("look", *task.reference["commands"]):
        assert say(first, command) == say(second, command)
    first.close()
    own.close()
    assert tasks("tw-simple", seed=2)[0][1].world["seed"] != task.world["seed"]


def test_episodes_side_by_side(room, simple):
    def attempt(is_whole):
        record, task = simple
        world = room.world(record, task, 0)
        world.reset()
        commands = task.reference["commands"]
        walk(world, commands if is_whole else commands[:-1])
        world.close()
        return world.judge().success

    wanted = [True, False, True, True, False, True]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(attempt, wanted)) == wanted


def test_nothing_is_left_behind(simple):
    record, task = simple
    own = TextWorldRoom()
    world = own.world(record, task, 0)
    world.reset()
    folder = own.folder()
    assert list(Path(folder).iterdir())
    own.close()
    own.close()
    assert not folder.exists()
    with pytest.raises(SandboxLost):
        say(world, "look")
    with pytest.raises(SandboxLost, match="stopped"):
        own.world(record, task, 0).reset()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"game": "tw-chess"}, "no game 'tw-chess'"),
        ({"settings": {"rewards": "huge"}}, "rewards is 'huge'"),
        ({"settings": {"level": 1}}, "no setting 'level'"),
        ({"seed": "x"}, "Expected `int`"),
    ],
)
def test_a_task_that_makes_no_game_is_bad_data(room, simple, change, says):
    _, task = simple
    wrong = Record.make("task", {"id": "t", "env": "textworld", "world": task.world | change})
    with pytest.raises(DataError, match=says) as caught:
        room.world(wrong, wrong.view(Task), 0)
    assert caught.value.field.startswith("world")


def test_a_task_without_a_game(room):
    record = Record.make("task", {"id": "t", "env": "textworld"})
    with pytest.raises(DataError, match="missing"):
        room.world(record, record.view(Task), 0)
