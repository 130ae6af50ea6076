"""Task folders in Harbor's layout: those of the example, and folders with half of their files."""

from pathlib import Path

import pytest

from strop.core.errors import InputMissing
from strop.core.records import Task
from strop.core.tasks.families import BadRow, FamilyOptions, open_family
from strop.core.tasks.harbor import read_dockerfile, read_folder
from strop.core.tasks.verifiers import open_verifier

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "terminal" / "tasks"


@pytest.fixture
def folder(tmp_path):
    """A small task folder."""
    made = tmp_path / "tasks" / "one"
    for name, text in {
        "task.toml": "agent.timeout_sec = 60\nverifier.timeout_sec = 5\nenvironment = {cpus = 2, memory = '512M'}\n",
        "instruction.md": "Do it.\n",
        "environment/Dockerfile": "FROM base\nWORKDIR /app\nCOPY a.txt .\n",
        "environment/a.txt": "a\n",
        "tests/test.sh": "exit 0\n",
        "tests/data.bin": "",
        "solution/solve.sh": "true\n",
    }.items():
        file = made / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (made / "tests" / "data.bin").write_bytes(b"\xff\x00")
    return made


def test_the_tasks_of_the_example_are_whole():
    tasks = list(open_family(f"harbor:{EXAMPLE}", FamilyOptions()).tasks(0))
    assert len(tasks) >= 6
    for task in tasks:
        assert isinstance(task, Task)
        assert task.env == "shell"
        assert task.reference
        assert "test.sh" in task.verifier["files"]
        open_verifier("tests").check(task)


def test_a_folder_becomes_a_task(folder):
    task = read_folder(folder)
    assert (task.id, task.prompt, task.reference) == ("one", "Do it.", "true\n")
    assert task.verifier["files"] == {"data.bin": {"base64": "/wA="}, "test.sh": "exit 0\n"}
    assert task.verifier["timeout_s"] == 5
    assert task.sandbox == {
        "image": "base", "workdir": "/app", "files": {"/app/a.txt": "a\n"}, "cpus": 2.0, "memory_gib": 0.5,
        "max_time_s": 60.0,
    }  # fmt: skip
    (alone,) = open_family(f"harbor:{folder}", FamilyOptions()).tasks(0)
    assert alone == task


def test_what_a_dockerfile_says(folder):
    (folder / "environment" / "src").mkdir()
    (folder / "environment" / "src" / "b.txt").write_text("b")
    (folder / "environment" / "Dockerfile").write_text(
        "# A comment\nFROM debian:stable\nENV A=1 B='two words'\nENV C see\nWORKDIR /app\nWORKDIR in\n"
        "COPY a.txt renamed.txt\nCOPY src/ /data/\nRUN echo one && \\\n    echo two\nCMD [\"bash\"]\n"
    )
    found = read_dockerfile(folder)
    assert (found.image, found.workdir) == ("debian:stable", "/app/in")
    assert found.env == {"A": "1", "B": "two words", "C": "see"}
    assert found.files == {"/app/in/renamed.txt": "a\n", "/data/b.txt": "b"}
    assert found.commands == ["cd /app/in\necho one &&      echo two"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: (f / "task.toml").unlink(), "task.toml is missing"),
        (lambda f: (f / "task.toml").write_text("x ="), "task.toml: "),
        (lambda f: (f / "task.toml").write_text("[agent]\ntimeout_sec = -1"), "agent.timeout_sec is -1"),
        (lambda f: (f / "instruction.md").unlink(), "instruction.md is missing"),
        (lambda f: (f / "instruction.md").write_text(" \n"), "instruction.md is empty"),
        (lambda f: (f / "tests" / "test.sh").unlink(), "tests/test.sh is missing"),
        (lambda f: (f / "environment" / "a.txt").unlink(), "environment/a.txt is missing"),
        (lambda f: (f / "environment" / "Dockerfile").write_text("FROM a\nFROM b\n"), "several stages"),
        (lambda f: (f / "environment" / "Dockerfile").write_text("FROM a\nVOLUME /x\n"), "VOLUME is not read"),
        (lambda f: (f / "environment" / "Dockerfile").write_text("FROM a\nADD https://x.org/y .\n"), "no file of the"),
    ],
)
def test_a_folder_that_is_not_whole_says_what_it_lacks(folder, change, says):
    change(folder)
    (bad,) = open_family(f"harbor:{folder.parent}", FamilyOptions()).tasks(0)
    assert isinstance(bad, BadRow)
    assert says in str(bad)
    assert str(folder) in str(bad)


def test_without_a_dockerfile_the_folder_is_empty(folder):
    (folder / "environment" / "Dockerfile").unlink()
    assert read_folder(folder).sandbox["workdir"] == "/app"


def test_no_tasks_there(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(InputMissing):
            open_family(f"harbor:{path}", FamilyOptions())
