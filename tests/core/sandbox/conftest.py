"""The engine and the image that the sandboxes' tests use: what is there, and a reason where it is not."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.core.errors import Unavailable
from strop.core.sandbox.process import ProcessSandboxes
from strop.core.sandbox.protocol import Limits, SandboxSpec

IMAGE = "strop-test:minbase"


@pytest.fixture(scope="session")
def engine():
    """A driver of the engine that is here."""
    pytest.importorskip("docker", reason="the package docker is missing (extra sandbox)")
    from strop.core.sandbox.docker import DockerSandboxes

    try:
        driver = DockerSandboxes()
    except Unavailable as error:
        pytest.skip(f"{error} (or bash .pkg/docker.sh start)")
    with driver:
        yield driver


@pytest.fixture(scope="session")
def image(engine) -> str:
    """An image with sh, coreutils and python3: the one that is named, or one made by debootstrap."""
    named = os.environ.get("STROP_TEST_IMAGE", IMAGE)
    # Workers of one run must not all make it.
    with (Path(tempfile.gettempdir()) / "strop-test-image.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if any(named in (one["RepoTags"] or []) for one in engine.api.images()):
            return named
        if "STROP_TEST_IMAGE" in os.environ:
            pytest.skip(f"the engine has no image {named} (STROP_TEST_IMAGE)")
        if not shutil.which("debootstrap") or os.getuid() != 0:
            pytest.skip(f"no image {named}, STROP_TEST_IMAGE names none, and debootstrap (as root) is not here")
        with tempfile.TemporaryDirectory() as root:
            made = ["debootstrap", "--variant=minbase", "--include=python3-minimal", "stable", root]
            done = subprocess.run(made, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"debootstrap could not make an image: {done.stdout[-300:]}")
            with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as tar:
                name, _, tag = named.partition(":")
                engine.slow_api.import_image_from_data(tar.stdout, repository=name, tag=tag)
    return named


@pytest.fixture(scope="session")
def shell_less(engine) -> Iterator[str]:
    """An image that holds one text file."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("readme"))
    engine.api.import_image_from_data(data.getvalue(), repository="strop-test", tag="shell-less")
    yield "strop-test:shell-less"
    engine.api.remove_image("strop-test:shell-less", force=True)


@pytest.fixture(scope="session")
def user_image(engine, image) -> Iterator[str]:
    """The image with a user of its own, and a working folder that is that user's."""
    container = engine.api.create_container(image, ["true"])["Id"]
    engine.api.commit(container, repository="strop-test", tag="user", conf={"User": "nobody"})
    engine.api.remove_container(container)
    yield "strop-test:user"
    engine.api.remove_image("strop-test:user", force=True)


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
