"""Task folders in Harbor's layout: those of the example, and folders with half of their files."""

from pathlib import Path

import pytest

from strop.core.errors import DataError, InputMissing
from strop.core.records import Task
from strop.core.tasks.families import BadRow, FamilyOptions, open_family
from strop.core.tasks.harbor import read_dockerfile, read_folder
from strop.core.tasks.harbor_folders import write_folder
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


def test_folders_written_are_read_as_the_same_tasks(tmp_path):
    tasks = list(open_family(f"harbor:{EXAMPLE}", FamilyOptions()).tasks(0))
    for task in tasks:
        assert read_folder(write_folder(task, tmp_path)) == task


def test_what_a_folder_holds_beside_the_plain_case(tmp_path):
    """A setup that is no series of RUN, files of one name, binary ones, another command than test.sh."""
    task = Task(
        id="t", prompt="Do it.", env="shell", reference="echo\n",
        verifier={"name": "tests", "files": {"a.py": "1\n"}, "command": "python3 /tests/a.py", "timeout_s": 2.5},
        sandbox={"image": "base", "workdir": "/w", "setup": "for i in 1 2; do\n  touch $i\ndone",
                 "files": {"x/a": "1", "y/a": {"base64": "/wA="}}, "env": {"A": "b c", "D": "$e"}, "memory_gib": 1.5},
    )  # fmt: skip
    read = read_folder(write_folder(task, tmp_path))
    assert (read.verifier["files"]["test.sh"], read.verifier["timeout_s"]) == ("#!/bin/sh\npython3 /tests/a.py\n", 2.5)
    sandbox = read.sandbox
    assert {name: sandbox[name] for name in ("image", "workdir", "env", "memory_gib")} == {
        "image": "base", "workdir": "/w", "env": {"A": "b c", "D": "$e"}, "memory_gib": 1.5,
    }  # fmt: skip
    assert sandbox["files"]["/w/x/a"] == "1"
    assert sandbox["files"]["/w/y/a"] == {"base64": "/wA="}
    # Written and read again nothing changes any more.
    again = read_folder(write_folder(read, tmp_path / "again"))
    assert again.sandbox == sandbox


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"env": "answer"}, "env"),
        ({"prompt": [{"role": "user", "content": "x"}]}, "prompt"),
        ({"verifier": {"name": "exact"}}, "verifier"),
        ({"verifier": {"name": "tests", "files": {}, "command": "true", "folder": "hidden"}}, "verifier"),
        ({"id": "../up"}, "id"),
        ({"id": "there"}, "id"),
        ({"verifier": {"name": "tests", "files": {"test.sh": ""}, "command": "true"}}, "verifier.command"),
    ],
)
def test_tasks_that_are_no_folders(tmp_path, change, field):
    (tmp_path / "there").mkdir()
    verifier = {"name": "tests", "files": {}, "command": "true"}
    fields = {"id": "t", "prompt": "p", "env": "shell", "verifier": verifier}
    with pytest.raises(DataError) as caught:
        write_folder(Task(**(fields | change)), tmp_path)
    assert caught.value.field == field
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.fixture
def old_folder(tmp_path):
    """A folder as Terminal-Bench 1 has them."""
    made = tmp_path / "old"
    for name, text in {
        "task.yaml": "instruction: |\n  Write 42\n  into a.txt.\nmax_agent_timeout_sec: 100\n"
        "max_test_timeout_sec: 20\n",
        "Dockerfile": "FROM base\nWORKDIR /app\nCOPY data/in.txt ./\nRUN touch x\n",
        "data/in.txt": "in\n",
        "docker-compose.yaml": "services:\n  client:\n    build: .\n",
        "run-tests.sh": "python3 $TEST_DIR/test_outputs.py\n",
        "tests/test_outputs.py": "assert open('a.txt').read() == '42'\n",
        "solution.sh": "printf 42 > a.txt\n",
    }.items():
        file = made / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return made


def test_the_older_layout_of_terminal_bench(old_folder):
    (task,) = open_family(f"harbor:{old_folder}", FamilyOptions()).tasks(0)
    assert task.prompt == "Write 42\ninto a.txt."
    assert task.reference == "printf 42 > a.txt\n"
    assert task.sandbox == {
        "image": "base", "workdir": "/app", "files": {"/app/in.txt": "in\n"}, "setup": "set -e\ncd /app\ntouch x",
        "max_time_s": 100.0,
    }  # fmt: skip
    assert set(task.verifier["files"]) == {"run-tests.sh", "test_outputs.py"}
    assert task.verifier["timeout_s"] == 20
    open_verifier("tests").check(task)


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("run-tests.sh", None, "run-tests.sh is missing"),
        ("task.yaml", "a: [", "task.yaml: "),
        ("task.yaml", "a: 1", "no instruction"),
        ("task.yaml", "- 1", "no mapping"),
        ("task.yaml", "instruction: x\nmax_agent_timeout_sec: soon", "max_agent_timeout_sec"),
        ("docker-compose.yaml", "services: {a: {}, b: {}}", "2 containers"),
    ],
)
def test_old_folders_that_are_not_whole(old_folder, file, text, says):
    if text is None:
        (old_folder / file).unlink()
    else:
        (old_folder / file).write_text(text)
    (error,) = open_family(f"harbor:{old_folder}", FamilyOptions()).tasks(0)
    assert isinstance(error, BadRow)
    assert says in error.message
