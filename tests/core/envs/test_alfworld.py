"""The env `alfworld`: a small game of our own in ALFWorld's format, with the package's own rules and words."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("fast_downward", reason="needs alfworld")
pytest.importorskip("textworld", reason="needs alfworld")

from strop.core.envs.alfworld import PROMPT, AlfWorldRoom
from strop.core.errors import DataError, Unavailable
from strop.core.records import Record, Task

# It is only looked for: its import makes a folder in the home directory.
pytestmark = pytest.mark.skipif(find_spec("alfworld") is None, reason="needs alfworld")

PROBLEM = """
(define (problem small) (:domain alfred)
 (:objects agent1 - agent
  loc_bar_1 loc_bar_2 loc_bar_3 - location
  Desk_bar_1 Drawer_bar_1 - receptacle
  Mug_bar_1 Book_bar_1 - object
  DeskType DrawerType - rtype
  MugType BookType - otype)
 (:init (= (total-cost) 0)
  (atLocation agent1 loc_bar_3)
  (receptacleAtLocation Desk_bar_1 loc_bar_1) (receptacleAtLocation Drawer_bar_1 loc_bar_2)
  (receptacleType Desk_bar_1 DeskType) (receptacleType Drawer_bar_1 DrawerType)
  (openable Drawer_bar_1)
  (canContain DeskType MugType) (canContain DrawerType MugType) (canContain DeskType BookType)
  (objectType Mug_bar_1 MugType) (objectType Book_bar_1 BookType)
  (pickupable Mug_bar_1) (pickupable Book_bar_1)
  (inReceptacle Mug_bar_1 Drawer_bar_1) (objectAtLocation Mug_bar_1 loc_bar_2)
  (inReceptacle Book_bar_1 Desk_bar_1) (objectAtLocation Book_bar_1 loc_bar_1))
 (:goal (and (inReceptacle Mug_bar_1 Desk_bar_1)))
 (:metric minimize (total-cost)))
"""
WAY = ["go to drawer 1", "open drawer 1", "take mug 1 from drawer 1", "go to desk 1", "move mug 1 to desk 1"]


@pytest.fixture(scope="module")
def room():
    made = AlfWorldRoom()
    yield made
    made.close()


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A folder of data with one game."""
    rules = Path(find_spec("alfworld").origin).parent / "data"
    grammar = (rules / "alfred.twl2").read_text().replace("UNKNOWN GOAL", "put a mug in desk")
    game = {"pddl_domain": (rules / "alfred.pddl").read_text(), "grammar": grammar, "pddl_problem": PROBLEM}
    folder = tmp_path / "data"
    (folder / "json_2.1.1" / "small").mkdir(parents=True)
    (folder / "json_2.1.1" / "small" / "game.tw-pddl").write_text(json.dumps(game))
    monkeypatch.setenv("ALFWORLD_DATA", str(folder))
    return folder


def world_of(room, game="json_2.1.1/small/game.tw-pddl", **fields):
    record = Record.make("task", {"id": "t", "env": "alfworld", "world": {"game": game}, **fields})
    return room.world(record, record.view(Task), 0)


def say(world, text):
    return world.act(text, [], seconds_left=60)


def test_the_task_is_done(room, data):
    world = world_of(room)
    (message,) = world.reset().messages
    assert message["content"].startswith(PROMPT)
    assert "you see a desk 1, and a drawer 1." in message["content"]
    assert message["content"].endswith("Your task is to: put a mug in desk.")
    lost = say(world, "dance")
    assert (lost.results[0].text, lost.results[0].valid) == ("Nothing happens.", False)
    outcomes = [say(world, command) for command in WAY]
    assert outcomes[1].results[0].text == "You open the drawer 1. The drawer 1 is open. In it, you see a mug 1."
    assert [outcome.done for outcome in outcomes] == [False] * 4 + [True]
    assert [outcome.reward for outcome in outcomes] == [0, 0, 0, 0, 1]
    assert all(outcome.results[0].valid for outcome in outcomes)
    verdict = world.judge()
    assert (verdict.reward, verdict.success) == (1.0, True)
    world.close()


def test_a_snapshot_and_an_attempt_that_was_cut_off(room, data):
    world = world_of(room, str(data / "json_2.1.1" / "small" / "game.tw-pddl"), prompt="Do it.")
    assert world.reset().messages[0]["content"].startswith("Do it.\n\n")
    for command in WAY[:3]:
        say(world, command)
    snapshot = world.snapshot()
    say(world, "go to desk 1")
    assert (world.judge().reward, world.judge().success) == (0.0, False)
    world.restore(snapshot)
    assert [say(world, command).done for command in WAY[3:]] == [False, True]
    world.close()


def test_data_and_games_that_are_not_there(room, data, monkeypatch):
    for game, says in (("json_2.1.1/none/game.tw-pddl", "no such game"), ("json_2.1.1/small", "is no game file")):
        with pytest.raises(DataError, match=says) as caught:
            world_of(room, game)
        assert caught.value.field == "world.game"
    monkeypatch.setenv("ALFWORLD_DATA", str(data / "nowhere"))
    with pytest.raises(Unavailable, match="alfworld-download"):
        world_of(room)
    assert not (data / "nowhere").exists()
