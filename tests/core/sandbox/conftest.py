"""The engine and the image that the sandboxes' tests use: what is there, and a reason where it is not."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from strop.core.errors import Unavailable
from strop.core.sandbox.process import ProcessSandboxes
from strop.core.sandbox.protocol import Limits, SandboxSpec


@pytest.fixture(scope="session")
def user_image(engine, image) -> Iterator[str]:
    """The image with a user of its own, this process's, and a working folder that is that user's."""
    tag = f"user-{os.getpid()}"
    container = engine.api.create_container(image, ["true"])["Id"]
    engine.api.commit(container, repository="strop-test", tag=tag, conf={"User": "nobody"})
    engine.api.remove_container(container)
    yield f"strop-test:{tag}"
    engine.api.remove_image(f"strop-test:{tag}", force=True)


@contextlib.contextmanager
def opened_processes(how):
    try:
        driver = ProcessSandboxes(bubblewrap=how == "bubblewrap")
    except Unavailable as error:
        pytest.skip(str(error))
    with driver:
        yield driver


@pytest.fixture(scope="session", params=["bubblewrap", "plain"])
def processes(request):
    """The driver `process`, with and without bubblewrap."""
    with opened_processes(request.param) as driver:
        yield driver


@pytest.fixture(scope="session", params=["docker", "bubblewrap", "plain"])
def driver(request):
    """Each driver."""
    if request.param == "docker":
        yield request.getfixturevalue("engine")
        return
    with opened_processes(request.param) as driver:
        yield driver


@pytest.fixture(scope="session")
def spec(request, driver) -> SandboxSpec:
    name = request.getfixturevalue("image") if driver.name == "docker" else None
    return SandboxSpec(image=name, folders=("/tests",), env={"GREETING": "hello"}, limits=Limits(wall_clock_s=20.0))


@pytest.fixture(scope="module")
def shared(driver, spec):
    """A sandbox for tests that leave it usable."""
    with driver.start(spec) as sandbox:
        yield sandbox


@pytest.fixture
def box(shared):
    """The shared sandbox with an empty working folder."""
    # Named as commands see it: without bubblewrap /tests would be this machine's.
    assert shared.exec(f"rm -rf ./* {shared.path('/tests')}/*").exit_code == 0
    return shared
