"""The table of rooms: each opens without its package, and its worlds have the methods of the protocol."""

from __future__ import annotations

import pytest

from strop.core.envs.rooms import ROOMS, open_room


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_opens_without_its_package_and_closes_twice(name):
    room = open_room(f"{name}:whatever")
    assert callable(room.world)
    room.close()
    room.close()


def test_an_unknown_env():
    with pytest.raises(KeyError):
        open_room("shell")
