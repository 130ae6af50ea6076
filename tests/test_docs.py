"""Documentation that cannot rot: pages are regenerated and compared, and what they name exists."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from strop.cli import helptext
from strop.cli.app import load_command
from strop.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted((ROOT / "man").glob("*.[15]"))
SECTIONS = (
    "NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "INPUT", "OUTPUT", "MEMORY", "EXIT STATUS", "ENVIRONMENT", "EXAMPLES",
    "SEE ALSO", "EVIDENCE",
)  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_repeats_the_docstring(name):
    assert helptext.parse(load_command(name).help).summary == COMMANDS[name][1]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help(name):
    for parameter in load_command(name).params:
        assert parameter.help, f"{name}: {parameter.name}"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_named_where_people_look(name):
    assert re.search(rf"\bstrop {name}\b", README), f"README.md does not name strop {name}"
    assert (ROOT / "man" / f"strop-{name}.1").exists()


def test_the_pages_are_those_of_the_commands(tmp_path):
    subprocess.run([sys.executable, "-P", ROOT / ".pkg" / "manpages.py", tmp_path], check=True, timeout=120)
    fresh = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    committed = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "man").iterdir()}
    assert set(committed) == set(fresh)
    for name, text in fresh.items():
        assert committed[name] == text, f"man/{name} has drifted: run `python .pkg/manpages.py`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_its_sections_in_order(page):
    titles = re.findall(r'^\.SH "(.*)"$', page.read_text(encoding="utf-8"), re.MULTILINE)
    known = [title for title in titles if title in SECTIONS]
    assert known == [title for title in SECTIONS if title in titles]
    wanted = SECTIONS[:-1] if page.name not in ("strop.1", "strop-records.5") else ("NAME", "DESCRIPTION", "SEE ALSO")
    assert set(wanted) <= set(titles)


@pytest.mark.parametrize(
    "name", ["rollout", "calibrate", "advantage", "distill", "train", "audit-prune", "debate-label"]
)
def test_a_method_ends_with_its_evidence(name):
    page = (ROOT / "man" / f"strop-{name}.1").read_text(encoding="utf-8")
    assert re.findall(r'^\.SH "(.*)"$', page, re.MULTILINE)[-1] == "EVIDENCE"


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="mandoc is not installed")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_mandoc_finds_nothing(page):
    done = subprocess.run(["mandoc", "-Tlint", "-W", "warning", page], capture_output=True, text=True, timeout=60)
    assert done.stdout == ""


def test_the_options_that_the_documents_show_exist():
    text = README + "".join(path.read_text(encoding="utf-8") for path in (ROOT / ".pkg" / "man").glob("*.txt"))
    for name in COMMANDS:
        known = {spelling for p in load_command(name).params for spelling in (*p.opts, *p.secondary_opts)} | {"--help"}
        for command in re.findall(rf"\bstrop {name}\b([^|`\n]*)", text.replace("\\\n", " ")):
            for option in re.findall(r"(?<![\w-])--?[a-z][\w-]*", command):
                assert option in known, f"strop {name} has no {option}"


def test_the_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", README):
        assert (ROOT / target).exists(), target
    for name in re.findall(r"`((?:examples|tests|core|cli|kernels|man|\.pkg|\.ci)/[\w./-]+)`", README):
        assert (ROOT / name).exists(), name


def test_the_first_screen_of_the_readme_holds_the_two_commands():
    first = "\n".join(README.splitlines()[:30])
    assert "examples/quickstart/run.sh" in first
    assert "tests/run.sh" in first


def test_the_changelog_names_this_version():
    from strop import __version__

    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest.group(1) == __version__
