"""What can go wrong around an episode, through the whole command: each has its words, and no rollout disappears."""

import json
from pathlib import Path

import pytest

ENV = {"OMP_NUM_THREADS": "1"}
CHECK = 'test "$(cat answer.txt)" = 42'
SOLVED = ["```bash\necho 42 > answer.txt\n```", "Done."]


def call(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def bash(command):
    return call("Bash", {"command": command})


def task(name, command="sh hidden/check.sh", **more):
    """Write 42 into answer.txt; paths are relative, so that any kind of sandbox will do."""
    verifier = {
        "name": "tests", "files": {"check.sh": CHECK}, "folder": "hidden", "report": "logs/ctrf.json",
        "reward": "logs/reward.txt", "command": command, "timeout_s": 30,
    }  # fmt: skip
    prompt = "Write 42 into answer.txt."
    return {"kind": "task", "id": name, "prompt": prompt, "env": "shell", "verifier": verifier, **more}


@pytest.fixture(scope="session")
def roomy_model(tiny_model, tmp_path_factory):
    """The tiny model with room for long episodes: the engine `script` reads no weights."""
    folder = tmp_path_factory.mktemp("roomy")
    for path in tiny_model.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 20}))
    return folder


@pytest.fixture
def attempt(run_strop, roomy_model, tmp_path):
    """Runs `strop rollout` on tasks with a script, task -> messages: the rollouts by task, and the result."""

    def run(tasks, scripts, *args, check=True, env=None):
        file = tmp_path / "policy.jsonl"
        file.write_text("".join(json.dumps({"task": name, "messages": said}) + "\n" for name, said in scripts.items()))
        command = ["rollout", "--model", roomy_model, "--engine", f"script:{file}", "--max-tokens", "1000000", *args]
        done = run_strop(command, tasks, check=check, env=ENV | (env or {}))
        return {r["task"]: r for r in done.records if r["kind"] == "rollout"}, done

    return run


@pytest.fixture(scope="module")
def decode(smol):
    from strop.core.models.load import load_tokenizer, resolve_model

    return load_tokenizer(resolve_model(str(smol))).decode


@pytest.fixture(params=["process", "docker"])
def place(request):
    """The options of each kind of sandbox."""
    if request.param == "process":
        return ["--sandbox", "process"]
    return ["--sandbox", "docker", "--image", request.getfixturevalue("image")]


# --- what is missing


def test_no_engine(attempt, tmp_path):
    pytest.importorskip("docker")
    nowhere = {"DOCKER_HOST": f"unix://{tmp_path}/none.sock"}
    found, done = attempt([task("t")], {"*": SOLVED}, "--sandbox", "docker", check=False, env=nowhere)
    assert (done.status, found) == (69, {})
    assert f"no Docker engine answers at unix://{tmp_path}/none.sock" in done.stderr
    assert "systemctl start docker" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_image_that_is_missing_fails_its_own_task_only(attempt, image, shell_less):
    wishes = {
        "absent": "no-such-image:1",
        "at the end": "no-such-image:1",
        "no name": "No Name::",
        "no shell": shell_less,
    }
    tasks = [task(name, sandbox={"image": wish}) for name, wish in wishes.items()]
    scripts = {"*": SOLVED, "at the end": []}
    found, done = attempt([task("fine"), *tasks], scripts, "--sandbox", "docker", "--image", image)
    assert list(found) == ["fine", *wishes]
    assert found["fine"]["success"]
    words = {"absent": "docker pull no-such-image:1", "at the end": "docker pull", "no name": "invalid reference",
             "no shell": "has no shell"}  # fmt: skip
    for name, said in words.items():
        assert said in found[name]["error"]
        assert not {"reward", "success"} & set(found[name])
        # What was drawn before is kept.
        assert found[name]["chunks"][0]["logprobs"]
    assert "4 failed by the machinery" in done.stderr
    # Where it is so for all, the command has failed, and its last words are the remedy.
    found, done = attempt(tasks[:2], scripts, "--sandbox", "docker", check=False)
    assert (done.status, len(found)) == (69, 2)
    assert "every rollout failed by the machinery: the engine has no image" in done.stderr.splitlines()[-1]


def test_no_image_named_and_no_verifier_are_bad_tasks(attempt, image):
    bare = task("bare")
    del bare["verifier"]
    unnamed = task("unnamed")
    fine = task("fine", sandbox={"image": image})
    args = ["--sandbox", "docker"]
    for bad, says in ((unnamed, "<stdin>:2: sandbox.image: missing"), (bare, "<stdin>:2: verifier: missing")):
        found, done = attempt([fine, bad], {"*": SOLVED}, *args, check=False)
        assert done.status == 65
        assert says in done.stderr
        # What came before it is finished and kept.
        assert found["fine"]["success"]
    found, done = attempt([bare, unnamed, fine], {"*": SOLVED}, *args, "--keep-going", check=False)
    assert (done.status, list(found)) == (1, ["fine"])


# --- verifiers

VERIFIERS = {
    # Command; error, success, exit status, and a part of what the verdict says is wrong.
    "hangs": ("sleep 60", "did not end within 2 s", None, None, ""),
    "hangs and prints": ("yes", "did not end within 2 s", None, None, ""),
    "is not there": ("no-such-program", None, False, 127, ""),
    "kills itself": ("kill -9 $$", None, False, 137, ""),
    "prints bytes": ("head -c 9000000 /dev/urandom; printf '\\355\\240\\200'; exit 1", None, False, 1, ""),
    "leaves a child": ("sleep 60 & exit 0", None, True, 0, ""),
    "report cut off": ("printf '{\"results\": [1, \\377' > logs/ctrf.json", None, True, 0, "unparsable"),
    "report with NaN": (
        'echo \'{"results": {"tests": [{"name": NaN, "status": "passed"}]}}\' > logs/ctrf.json',
        None, True, 0, "unparsable",
    ),
    "report with a lone surrogate": (
        "printf '{\"results\": {\"tests\": [{\"name\": \"\\134ud800\", \"status\": \"passed\"}]}}' > logs/ctrf.json",
        None, True, 0, "unparsable",
    ),
    "report is empty": (": > logs/ctrf.json; exit 1", None, False, 1, "empty"),
    "report is huge": ("truncate -s 40M logs/ctrf.json", None, True, 0, "unparsable"),
    "report is a folder": ("mkdir logs/ctrf.json", None, True, 0, "missing"),
    "report with entities": (
        "echo '<!DOCTYPE x [<!ENTITY a \"b\">]><testsuite/>' > logs/ctrf.json", None, True, 0, "unparsable",
    ),
    "reward is NaN": ("echo nan > logs/reward.txt", None, False, 0, "no finite number: nan"),
    "reward is infinite": ("echo inf > logs/reward.txt", None, False, 0, "no finite number: inf"),
    "reward is bytes": ("printf '\\377\\000x' > logs/reward.txt", None, False, 0, "no number: '\ufffd\\x00x'"),
    "reward is empty": (": > logs/reward.txt", None, False, 0, "no number: ''"),
    "reward is two": ("echo 1 1 > logs/reward.txt", None, False, 0, "no number"),
    "reward is below one": ("echo 0.5 > logs/reward.txt", None, False, 0, ""),
    "reward is a folder": ("mkdir logs/reward.txt", None, True, 0, ""),
    "reward against status": ("echo 1 > logs/reward.txt; exit 3", None, True, 3, ""),
}  # fmt: skip


def test_verifiers_that_hang_or_write_garbage(attempt, place):
    tasks = [task(name, f"mkdir -p logs; {line}") for name, (line, *_) in VERIFIERS.items()]
    for one in tasks:
        one["verifier"]["timeout_s"] = 2 if "hangs" in one["id"] else 30
    found, done = attempt(tasks, {"*": SOLVED}, *place)
    assert list(found) == list(VERIFIERS)
    for name, (_, error, success, status, wrong) in VERIFIERS.items():
        record = found[name]
        assert (record["stop"], record["turns"]) == ("agent", 2)
        if error is not None:
            assert error in record["error"]
            assert not {"reward", "success", "verdict"} & set(record)
            continue
        assert "error" not in record
        assert (record["success"], record["reward"], record["verdict"]["exit_code"]) == (success, success, status), name
        if wrong:
            told = record["verdict"]["reward_error" if "reward" in name else "report_error"]
            assert wrong in told, name
        assert "assertions" not in record
    assert "2 failed by the machinery" in done.stderr


# --- what a policy says


def test_calls_that_cannot_be_run_are_answered_and_the_episode_goes_on(attempt, place):
    name, path = "n" * 300, "/".join(["d" * 200] * 40)
    bad = {
        call("Fly", {}): "There is no tool 'Fly'; the tools are: Bash",
        call("Bash", ["ls"]): '"arguments" has to be an object, not array',
        call("Bash", "ls"): '"arguments" has to be an object, not string',
        call("Bash", {}): "argument 'command' is missing",
        '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls\n</tool_call>': "not JSON",
        call("Write", {"path": "s", "content": "\ud800"}): "not JSON",
        bash("echo a\0b"): "without NUL",
        bash("true " + "x" * (128 << 10)): "less than 131072 bytes",
        call("Read", {"path": "a\0b"}): "not a path",
        call("Read", {"path": name}): "too long",
        call("Write", {"path": path, "content": ""}): "too long",
        call("Edit", {"path": path, "old_string": "a", "new_string": "b"}): "too long",
        call("Glob", {"pattern": "*", "path": name}): "too long",
        call("Write", {"path": ".", "content": ""}): "Error: ",
        call("Read", {"path": "../../etc/passwd"}): 'must not hold ".."',
    }
    scripts = {"t": [*bad, bash("echo 42 > answer.txt"), "Done."]}
    found, _ = attempt([task("t")], scripts, *place, "--tools", "leaf")
    steps = found["t"]["steps"]
    assert (found["t"]["stop"], found["t"]["success"], len(steps)) == ("agent", True, len(bad) + 2)
    assert [step["valid"] for step in steps] == [False] * len(bad) + [True] * 2
    for step, said in zip(steps[1:], bad.values(), strict=False):
        assert said in step["observation"]
        assert len(step["observation"]) < 600


# No UTF-8, half a surrogate pair, NUL, and what some take for line ends.
BINARY = r"printf '\377\376\000\355\240\200\342\200\250\342\200\251\302\205\013\014\r\033[31m\357\273\277'"


def test_output_of_any_size_and_kind_leaves_records_whole(attempt, run_strop, decode, place):
    """41 MB of a grep that ran out of time (mini-swe-agent #639): every path is cut."""
    long = "head -c 10000000 /dev/zero | tr '\\0' x"
    scripts = {
        "long": [bash(long), bash(f"{long} >&2; exit 3"),
                 call("Bash", {"command": f"{long}; sleep 60", "timeout": 1.5}), bash(f"{long} > big"),
                 call("Read", {"path": "big"}), "Done."],
        "binary": [bash(f"{BINARY}; {BINARY} >&2"), bash(f"{BINARY} > b"), call("Read", {"path": "b"}),
                   bash("head -c 300000 /dev/urandom"), "\u2028 said \x85\x0b\0."],
        "names": [bash(r"touch $(printf 'a\377b\r')"), call("Glob", {"pattern": "*"}), "Done."],
    }  # fmt: skip
    tasks = [task(name, "cat b; echo 1 > logs/reward.txt") for name in scripts]
    found, done = attempt(tasks, scripts, *place, "--tools", "leaf")
    assert list(found) == list(scripts)
    assert done.stdout.count(b"\n") == 2 * len(tasks)
    done.stdout.decode("utf-8")
    # Another reader takes them.
    assert run_strop(["calibrate"], done.stdout).stdout.count(b"\n") == 2 * len(tasks)
    record = found["long"]
    (chunk,) = record["chunks"]
    answers = [
        decode(chunk["token_ids"][a[1] : b[0]]) for a, b in zip(chunk["sampled"], chunk["sampled"][1:], strict=False)
    ]
    for number, least in ((0, 30_000), (1, 30_000), (2, 30_000), (4, 20_000)):
        assert least < len(answers[number]) < least + 1000
        assert "characters left out]\n</tool_response>" in answers[number]
    assert "timed out after 1.5 s" in answers[2]
    assert all(len(step["observation"]) <= 2000 for step in record["steps"])
    seen = found["binary"]["steps"]
    assert "\ufffd\ufffd\0\ufffd\ufffd\ufffd\u2028\u2029\x85\x0b\x0c\r\x1b[31m\ufeff" in seen[1]["observation"]
    assert "is not text" in seen[3]["observation"]
    assert found["binary"]["response"].startswith("\u2028 said \x85\x0b\0.")
    assert "a\ufffdb\r" in found["names"]["steps"][2]["observation"]


def test_a_model_that_never_stops(attempt):
    """Turns, tokens and time end it; a call that the full context cuts off is not run."""
    loop = [bash("echo on >> log")] * 99
    scripts = {"turns": loop, "tokens": [bash("touch log") + "on " * 9000], "time": [bash("sleep 60")] * 99,
               "context": [bash("echo on >> log; true " + "x y " * 5000)]}  # fmt: skip
    tasks = [task(name, "test ! -e log") for name in scripts]
    tasks[2]["sandbox"] = {"max_time_s": 1.0}
    limits = ["--tools", "leaf", "--max-turns", "7", "--max-tokens", "4000", "--max-context", "3000"]
    found, _ = attempt(tasks[:1] + tasks[2:], scripts, "--sandbox", "process", *limits)
    assert {name: (r["stop"], r["turns"], r["success"]) for name, r in found.items()} == {
        "turns": ("max_turns", 7, False), "time": ("max_time", 1, True), "context": ("max_context", 1, True),
    }  # fmt: skip
    (chunk,) = found["context"]["chunks"]
    assert len(chunk["token_ids"]) == 3000 == chunk["sampled"][0][1]
    found, _ = attempt(tasks[1:2], scripts, "--sandbox", "process", "--tools", "leaf", "--max-tokens", "4000")
    # The call that it began with is not run either (FrogNano, section 1.4).
    assert [(r["stop"], r["turns"], r["success"]) for r in found.values()] == [("max_tokens_per_turn", 1, True)]


def test_a_prompt_over_the_context_is_the_end_of_a_budget(attempt, run_strop):
    """No error (verifiers #1625), whatever the env, and the tools behind take the record."""
    long = {"prompt": "word " * 500}
    answer = {"kind": "task", "id": "answer", "verifier": {"name": "number"}, "reference": 4, **long}
    scripts = {"short": ["Done."], "*": ["4"]}
    limits = ["--sandbox", "process", "--max-context", "200", "-n", "2"]
    found, done = attempt([task("shell", **long), answer, task("short")], scripts, *limits)
    assert {name: (r["stop"], r["turns"], r["reward"]) for name, r in found.items()} == {
        "shell": ("max_context", 0, 0.0), "answer": ("length", 1, 0.0), "short": ("agent", 1, 0.0),
    }  # fmt: skip
    assert not any("error" in record for record in found.values())
    assert (found["shell"]["chunks"], found["shell"]["steps"]) == ([], [])
    verdicts = [
        r["calibration"]["verdict"] for r in run_strop(["calibrate"], done.stdout).records if r["kind"] == "task"
    ]
    assert verdicts == ["too_hard"] * 3


def test_making_a_sandbox_is_none_of_the_episodes_time(attempt, place):
    """Setup takes longer than the episode may (endpoints #456)."""
    slow = task("t", sandbox={"setup": "sleep 4", "max_time_s": 3.5})
    found, _ = attempt([slow], {"*": ["```bash\ntrue\n```", *SOLVED]}, *place)
    assert (found["t"]["stop"], found["t"]["turns"], found["t"]["success"]) == ("agent", 3, True)


# --- a folder of tasks


def test_folders_with_half_their_files(run_strop, tmp_path):
    examples = Path(__file__).resolve().parents[2] / "examples" / "terminal" / "tasks"
    lacks = {"no-text": "instruction.md", "no-tests": "tests/test.sh", "no-toml": "task.toml"}
    for name, file in {"whole": None, **lacks}.items():
        for path in (examples / "summarise-log").rglob("*"):
            below = path.relative_to(examples / "summarise-log")
            if path.is_file() and str(below) != file:
                (tmp_path / name / below).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name / below).write_bytes(path.read_bytes())
    assert run_strop(["synth-tasks", f"harbor:{tmp_path}"], check=False).status == 65
    done = run_strop(["synth-tasks", f"harbor:{tmp_path}", "--keep-going"], check=False)
    assert (done.status, [record["id"] for record in done.records]) == (1, ["whole"])
    for name, file in lacks.items():
        assert any(f"{tmp_path}/{name}" in line and f"{file} is missing" in line for line in done.stderr.splitlines())
