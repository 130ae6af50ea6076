"""The house plan, read from the source: arrows, lazy imports, no printing, sizes."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("cli", "core", "kernels")
# What a room may import of the others.
ARROWS = {"cli": {"cli", "core"}, "core": {"core", "kernels"}, "kernels": {"kernels"}}
HEAVY = {
    "torch", "triton", "transformers", "vllm", "peft", "numpy", "scipy", "sklearn", "docker", "rich", "pydantic",
    "httpx", "matplotlib", "gguf", "safetensors", "reasoning_gym", "math_verify", "jsonlines",
}  # fmt: skip
MODULES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Every import statement with the module it names; `from strop.core import x` names strop.core.x too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node, node.module or ""
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported."""
    for node in body:
        if is_type_checking(node):
            continue
        yield node
        for part in ("body", "orelse", "finalbody", "handlers"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from at_import(getattr(node, part, []))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_keeps_to_the_plan(path):
    room = path.relative_to(ROOT).parts[0]
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    for node, name in imported(tree):
        parts = name.split(".")
        assert parts[0] not in ROOMS, f"line {node.lineno}: import as strop.{name}"
        if parts[0] == "strop" and len(parts) > 1 and parts[1] in ROOMS:
            assert parts[1] in ARROWS[room], f"line {node.lineno}: {room} must not import {name}"
        if room != "cli":
            assert parts[0] not in ("typer", "click", "argparse"), f"line {node.lineno}: options are cli's"
    if room != "kernels":
        for node in at_import(tree.body):
            for _, name in imported(node) if isinstance(node, ast.Import | ast.ImportFrom) else ():
                assert name.split(".")[0] not in HEAVY, f"line {node.lineno}: import {name} inside the function"
    if room != "cli":
        for node in ast.walk(tree):
            is_print = isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stdout.write")
            assert not is_print, f"line {node.lineno}: {room} prints"
    assert len(source.splitlines()) <= 400, "over 400 lines is two rooms"
    assert ast.get_docstring(tree), "a module says what it is"


def test_kernels_is_no_package_of_its_own():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    for folder in (ROOT / "core").rglob("*/"):
        if folder.name != "__pycache__" and list(folder.glob("*.py")):
            assert (folder / "__init__.py").exists(), folder


def test_the_top_level_holds_what_the_plan_names():
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    tracked = {line.partition("/")[0] for line in done.stdout.splitlines()}
    assert tracked <= {
        "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "cli", "core", "kernels", "examples", "tests", "man",
        ".pkg", ".ci", ".gitignore",
    }  # fmt: skip
    assert all(name.endswith((".1", ".5")) for name in done.stdout.splitlines() if name.startswith("man/"))
