"""strop rollout on tasks of the envs command, functions and textworld: whole episodes by a scripted policy."""

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ENV = {"OMP_NUM_THREADS": "1"}
DATA = Path(__file__).resolve().parents[1] / "data" / "envs"


def program(name="guess.py", **more):
    return {"kind": "task", "env": f"command:{sys.executable} {DATA / name}", "verifier": {"name": "env"}, **more}


@pytest.fixture
def attempt(run_strop, tiny_model, tmp_path):
    """Runs `strop rollout` on tasks with a script: task -> messages."""

    def run(tasks, scripts, *args, check=True):
        file = tmp_path / "policy.jsonl"
        file.write_text("".join(json.dumps({"task": name, "messages": said}) + "\n" for name, said in scripts.items()))
        done = run_strop(
            ["rollout", "--model", tiny_model, "--engine", f"script:{file}", *args], tasks, check=check, env=ENV
        )
        return {r["task"]: r for r in done.records if r["kind"] == "rollout"}, done

    return run


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_programs_in_two_languages_and_one_that_breaks(attempt):
    tasks = [
        program(id="won", secret=42), program(id="lost", secret=1),
        {"kind": "task", "id": "bash", "env": f"command:bash {DATA / 'guess.sh'}", "verifier": {"name": "env"}},
        {"kind": "task", "id": "broken", "env": "command:false", "verifier": {"name": "env"}},
    ]  # fmt: skip
    found, _ = attempt(tasks, {"*": ["50", "20", "42"]}, "--max-turns", "3")
    assert {name: (r.get("reward"), r.get("success"), r["stop"]) for name, r in found.items() if name != "broken"} == {
        "won": (1.0, True, "env"), "lost": (0.0, False, "max_turns"), "bash": (1.0, True, "env"),
    }  # fmt: skip
    assert [step["reward"] for step in found["won"]["steps"]] == [0.0, 0.0, 1.0]
    assert found["won"]["steps"][1]["observation"] == "It is less."
    assert "env command: 'false', asked to reset, ended with exit status 1" in found["broken"]["error"]
    assert "reward" not in found["broken"]


def test_tools_of_a_program(attempt):
    said = [call("put", thing="tea") + call("put", thing=3), call("put", thing="bread"), "That is all."]
    found, _ = attempt([program("till.py", id="till", wanted=["tea", "bread"])], {"till": said})
    record = found["till"]
    assert (record["reward"], record["success"], record["stop"], record["turns"]) == (1.0, True, "env", 3)
    assert [step["valid"] for step in record["steps"]] == [False, True, True]
    assert "1 in the basket" in record["steps"][1]["observation"]
    assert "argument 'thing' should be string" in record["steps"][1]["observation"]
    assert record["assertions"] == [{"name": "tea", "status": "passed"}, {"name": "bread", "status": "passed"}]


def test_a_program_that_is_not_there_is_bad_data(attempt):
    task = {"kind": "task", "id": "t", "env": "command:/nowhere/game", "verifier": {"name": "env"}}
    _, done = attempt([task], {"*": ["x"]}, check=False)
    assert done.status == 65
    assert "<stdin>:1: env: no such program, or not executable: '/nowhere/game'" in done.stderr


@pytest.mark.skipif(find_spec("textworld") is None, reason="needs textworld")
def test_a_text_adventure(attempt, run_strop):
    (task,) = run_strop(["synth-tasks", "textworld:tw-treasure_hunter", "-n", "1", "--set", "level=4"]).records
    way = task["reference"]["commands"]
    found, _ = attempt([task], {task["id"]: way})
    record = found[task["id"]]
    assert (record["reward"], record["success"], record["stop"], record["turns"]) == (1.0, True, "env", len(way))


@pytest.mark.skipif(find_spec("bfcl_eval") is None, reason="needs bfcl-eval")
def test_a_conversation_with_functions(attempt, run_strop, tiny_model, tmp_path):
    from strop.core.tasks.bfcl import parse_call

    # Of the model only tokenizer and chat template are used; the docs of the functions need a longer context.
    config = json.loads((tiny_model / "config.json").read_text()) | {"max_position_embeddings": 32_768}
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "config.json").write_text(json.dumps(config))
    task = run_strop(["synth-tasks", "bfcl:multi_turn_base", "-n", "3"]).records[2]
    said = []
    for turn in task["reference"]["calls"]:
        calls = [parse_call(text) for text in turn]
        assert not any(placed for _, placed, _ in calls)
        said += ["\n".join(call(name, **named) for name, _, named in calls), "Done."]
    found, _ = attempt([task], {task["id"]: said}, "--model", model)
    record = found[task["id"]]
    assert (record["reward"], record["success"], record["stop"]) == (1.0, True, "agent")
    assert record["turns"] == len(said)
    assert {assertion["status"] for assertion in record["assertions"]} == {"passed"}
