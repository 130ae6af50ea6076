"""strop calibrate as a process: the replay of real trials, rules, streams, adaptive replay, bad input."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, defaultdict
from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[1] / "data" / "terminal-trials"
# Failures of the machinery; an AgentTimeoutError is the policy running out of time.
INFRASTRUCTURE = {"CancelledError", "DaytonaError", "VerifierTimeoutError"}


def terminal_rollouts() -> list[dict]:
    """The 445 trials of one model as rollouts, counted as the data's README says."""
    seen: Counter = Counter()
    found = []
    for line in (DATA / "tmax-27b.jsonl").read_text(encoding="utf-8").splitlines():
        trial = json.loads(line)
        name, broken = trial["task"], trial["exception"] in INFRASTRUCTURE or trial["reward"] is None
        outcome = {"error": trial["exception"] or "no reward"} if broken else {"reward": trial["reward"]}
        found.append({"kind": "rollout", "id": trial["trial"], "task": name, "sample": seen[name], **outcome})
        seen[name] += 1
    return found


def attempts(name: str, outcomes: str, **fields) -> list[dict]:
    """Rollouts by letter: + success, - failure, x failure of the machinery."""
    told: dict[str, dict] = {"+": {"success": True}, "-": {"success": False}, "x": {"error": "lost"}}
    return [
        {"kind": "rollout", "id": f"{name}/{i}", "task": name, **told[letter], **fields}
        for i, letter in enumerate(outcomes)
    ]


def task(name: str, **fields) -> dict:
    return {"kind": "task", "id": name, "prompt": f"{name}?", **fields}


def of_tasks(result) -> dict[str, dict]:
    return {record["id"]: record["calibration"] for record in result.records if record["kind"] == "task"}


def coin_stream(count: int, tries: int, seed: int = 5, draw=None) -> list[dict]:
    """Attempts at tasks whose rates are drawn by `draw`, a task's attempts together."""
    generator = random.Random(seed)
    records = []
    for index in range(count):
        rate = draw(generator) if draw else generator.random()
        letters = "".join("+" if generator.random() < rate else "-" for _ in range(tries))
        records += attempts(f"t{index}", letters)
    return records


def test_the_terminal_trials_are_replayed_as_their_readme_counts_them(run_strop):
    rollouts = terminal_rollouts()
    result = run_strop(["calibrate", "--band", "0.2:0.8", "--only", "task"], rollouts)
    want: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for rollout in rollouts:
        want[rollout["task"]][2 if "error" in rollout else 0 if rollout["reward"] >= 1 else 1] += 1
    assert [record["id"] for record in result.records] == list(want)
    found = of_tasks(result)
    for name, (good, bad, broken) in want.items():
        fields = found[name]
        assert (fields["successes"], fields["attempts"], fields["errors"]) == (good, good + bad, broken)
    # The data's own sheet: 42/3/3/8/8/25 tasks with 0..5 successes.
    assert Counter(fields["successes"] for fields in found.values()) == {0: 42, 1: 3, 2: 3, 3: 8, 4: 8, 5: 25}
    assert Counter(fields["verdict"] for fields in found.values()) == {"too_hard": 42, "accept": 22, "too_easy": 25}
    assert "89 tasks: 22 accept, 42 too_hard, 25 too_easy, 0 invalid; 444 attempts, 1 failed" in result.stderr


def test_output_by_hand(run_strop):
    stream = [task("a", note=1), *attempts("a", "+-x-"), {"kind": "other"}, *attempts("b", "xx")]
    result = run_strop(["calibrate"], stream)
    out = result.records
    assert [record.get("id", record["kind"]) for record in out] == [
        "a", "a/0", "a/1", "a/2", "a/3", "other", "b", "b/0", "b/1",
    ]  # fmt: skip
    assert out[0] == {
        "kind": "task", "id": "a", "prompt": "a?", "note": 1,
        "calibration": {
            "successes": 1, "attempts": 3, "errors": 1, "stale": 0, "pass_rate": 1 / 3,
            "low": pytest.approx(0.0614919), "high": pytest.approx(0.7923404), "learnability": pytest.approx(2 / 9),
            "verdict": "accept", "rule": "band 0.2:0.8", "admits": [1 / 3, 2 / 3],
        },
    }  # fmt: skip
    stub = out[6]
    assert stub["provenance"]["tool"] == "calibrate"
    assert (stub["calibration"]["verdict"], stub["calibration"]["pass_rate"]) == ("invalid", None)
    assert out[1:5] == stream[1:5]


def test_accepted_lets_out_accepted_tasks_and_their_rollouts(run_strop):
    stream = [task("a"), task("b"), *attempts("a", "+-"), *attempts("b", "--"), {"kind": "other"}, *attempts("c", "+-")]
    result = run_strop(["calibrate", "--accepted"], stream)
    assert [record.get("id", "other") for record in result.records] == ["a", "a/0", "a/1", "other", "c", "c/0", "c/1"]
    only = run_strop(["calibrate", "--accepted", "--only", "task"], stream)
    assert [record["id"] for record in only.records] == ["a", "c"]


def test_rules_by_name(run_strop):
    stream = attempts("half", "++--") + attempts("odd", "++---") + attempts("few", "+---") + attempts("many", "+++-")

    def verdicts(*args):
        return [fields["verdict"] for fields in of_tasks(run_strop(["calibrate", *args], stream)).values()]

    assert verdicts("--rule", "frognano-half") == ["accept", "accept", "too_hard", "too_easy"]
    assert verdicts("--rule", "frognano-round5") == ["accept", "accept", "accept", "too_easy"]
    assert verdicts("--rule", "learnable") == ["accept"] * 4
    assert verdicts("--band", "0.5:0.5") == ["accept", "too_hard", "too_hard", "too_easy"]
    odd = of_tasks(run_strop(["calibrate", "--rule", "frognano-half"], stream))["odd"]
    assert odd["admits"] == [0.4, 0.6]


def test_a_band_that_no_rate_can_meet_is_warned_of(run_strop):
    result = run_strop(["calibrate", "--band", "0.5:0.5"], attempts("a", "+-+"))
    assert "no pass rate that 1 tasks could show" in result.stderr
    assert of_tasks(result)["a"]["admits"] is None


def test_at_least_says_no_with_status_1_and_whole_output(run_strop, tmp_path):
    out = tmp_path / "edge.jsonl"
    stream = attempts("a", "+-") + attempts("b", "--")
    result = run_strop(["calibrate", "--accepted", "--at-least", "2", "-o", out, "-q"], stream, check=False)
    assert result.status == 1
    assert result.stderr == "strop calibrate: 1 tasks accepted, fewer than --at-least 2\n"
    assert len(out.read_text().splitlines()) == 3
    assert run_strop(["calibrate", "--at-least", "1"], stream).status == 0


def test_contiguous_input_leaves_task_by_task_with_the_same_verdicts(run_strop):
    stream = coin_stream(30, 6)
    whole = run_strop(["calibrate"], stream)
    by_task = run_strop(["calibrate", "--contiguous"], stream)
    assert by_task.stdout == whole.stdout
    late = run_strop(["calibrate", "--contiguous"], [*stream, *attempts("t0", "------+")[6:]], check=False)
    assert late.status == 65
    assert "<stdin>:181: task: task 't0' came before and has left" in late.stderr
    assert len(late.records) > 180


def test_calibrating_again_replaces_the_calibration(run_strop):
    once = run_strop(["calibrate"], [task("a"), *attempts("a", "+-")])
    again = run_strop(["calibrate", "--band", "0.6:0.9"], once.stdout)
    assert of_tasks(once)["a"]["verdict"] == "accept"
    assert of_tasks(again)["a"]["verdict"] == "too_hard"
    assert run_strop(["calibrate"], again.stdout).stdout == once.stdout


def test_several_policies_are_warned_of(run_strop):
    stream = attempts("a", "+-", policy={"model": "m", "version": 1}) + attempts("b", "+", policy={"model": "m"})
    assert "attempts of 2 policies are counted together" in run_strop(["calibrate"], stream).stderr


def metrics_of(result) -> dict[str, dict]:
    return {record["name"]: record for record in result.records if record["kind"] == "metric"}


def test_metrics_by_hand(run_strop):
    stream = attempts("a", "+---", policy={"model": "m"}) + attempts("b", "++-+") + attempts("c", "xx")
    stream += attempts("d", "--")
    result = run_strop(["calibrate", "--metrics", "--k", "1,2,4", "--only", "metric", "--tag", "set=dev"], stream)
    found = metrics_of(result)
    assert list(found) == ["pass@1", "avg@2", "pass@2", "avg@4", "pass@4"]
    assert found["pass@1"]["value"] == pytest.approx((0.25 + 0.75 + 0) / 3)
    assert (found["pass@1"]["n"], found["pass@1"]["left_out"], found["pass@1"]["set"]) == (3, 1, "dev")
    # C(3,2)/C(4,2) = 1/2 without a success of one; C(1,2) = 0 of three.
    assert found["pass@2"]["value"] == pytest.approx((0.5 + 1 + 0) / 3)
    assert found["avg@2"]["value"] == pytest.approx((0.5 + 1 + 0) / 3)
    assert (found["pass@4"]["value"], found["avg@4"]["value"], found["pass@4"]["n"]) == (1.0, 0.5, 2)
    assert found["pass@1"]["low"] <= found["pass@1"]["value"] <= found["pass@1"]["high"]
    assert found["pass@1"]["of"] == "m"
    again = run_strop(["calibrate", "--metrics", "--k", "1,2,4", "--only", "metric", "--tag", "set=dev"], stream)
    assert again.stdout == result.stdout


def test_metrics_by_default_are_pass_1_and_the_most_that_every_task_allows(run_strop):
    stream = attempts("a", "+---") + attempts("b", "++-")
    assert list(metrics_of(run_strop(["calibrate", "--metrics"], stream))) == ["pass@1", "avg@3", "pass@3"]
    empty = metrics_of(run_strop(["calibrate", "--metrics"], []))
    assert empty["pass@1"]["value"] is None


def terminal_like(generator: random.Random) -> float:
    hard = generator.random() < 0.7325
    return generator.betavariate(1.427985, 98.572015) if hard else generator.betavariate(1.69, 0.505)


def test_an_adaptive_replay_saves_attempts_and_says_how_many(run_strop):
    stream = coin_stream(300, 16, draw=terminal_like)
    whole = of_tasks(run_strop(["calibrate", "--only", "task"], stream))
    result = run_strop(["calibrate", "--adaptive", "--only", "task,metric"], stream)
    found = of_tasks(result)
    used = sum(fields["attempts"] for fields in found.values())
    assert all(fields["attempts"] + fields["unused"] == 16 for fields in found.values())
    saved = metrics_of(result)["attempts_saved"]
    assert saved["value"] == pytest.approx(1 - used / (300 * 16))
    assert (saved["used"], saved["attempts"], saved["n"]) == (used, 4800, 300)
    # As right as 8 of the 16: the plan makes about 4.6 a task.
    assert 0.65 < saved["value"] < 0.80
    changed = sum(found[name]["verdict"] != whole[name]["verdict"] for name in found)
    assert f"{changed} verdicts differ from those of all attempts" in result.stderr
    assert changed < 0.08 * 300
    assert "plan for tasks like the prior terminal: 4.6 attempts a task, 95.0% of verdicts right" in result.stderr
    assert "of another kind" not in result.stderr


def test_with_a_confidence_each_settled_verdict_has_it(run_strop):
    stream = coin_stream(100, 12, draw=terminal_like)
    found = of_tasks(run_strop(["calibrate", "--adaptive", "--confidence", "0.9", "--max-attempts", "12"], stream))
    for fields in found.values():
        assert fields["settled"] == (fields["confidence"] >= 0.9)
        assert fields["settled"] or fields["attempts"] == 12
    assert sum(fields["settled"] for fields in found.values()) > 50


def test_errors_are_made_up_for_in_a_replay(run_strop):
    fields = of_tasks(run_strop(["calibrate", "--adaptive"], attempts("a", "xx-x-x-----")))["a"]
    assert (fields["attempts"], fields["errors"], fields["unused"], fields["verdict"]) == (4, 4, 3, "too_hard")
    assert fields["settled"]


def test_a_replay_out_of_attempts_is_not_settled(run_strop):
    result = run_strop(["calibrate", "--adaptive"], attempts("a", "+-"))
    assert not of_tasks(result)["a"]["settled"]
    assert "1 tasks ran out of attempts before they were settled" in result.stderr


def test_tasks_of_another_kind_than_the_prior_are_warned_of(run_strop, tmp_path):
    stream = coin_stream(200, 16, draw=lambda generator: generator.betavariate(2, 3))
    result = run_strop(["calibrate", "--adaptive", "--only", "metric"], stream)
    assert "these tasks are of another kind" in result.stderr
    earlier = tmp_path / "earlier.jsonl"
    before = coin_stream(200, 8, seed=6, draw=lambda generator: generator.betavariate(2, 3))
    earlier.write_bytes(run_strop(["calibrate"], before).stdout)
    fitted = run_strop(["calibrate", "--adaptive", "--prior", earlier, "--only", "task"], stream)
    assert "of another kind" not in fitted.stderr
    assert of_tasks(fitted)["t0"]["prior"] == "fitted"
    # Rollouts alone hold the same counts as the calibrated tasks made of them.
    rollouts = tmp_path / "rollouts.jsonl"
    rollouts.write_text("".join(json.dumps(record) + "\n" for record in before))
    again = run_strop(["calibrate", "--adaptive", "--prior", rollouts, "--only", "task"], stream)
    assert again.stdout == fitted.stdout


def test_dry_run_shows_the_plan(run_strop):
    (plan,) = run_strop(["calibrate", "--adaptive", "--dry-run", "-n", "8"], [task("a"), *attempts("a", "+-")]).records
    assert (plan["kind"], plan["tasks"], plan["rollouts"], plan["max_attempts"]) == ("plan", 1, 2, 16)
    assert plan["stops"][0] == "after 4: too_hard at 0 of them; accept at 2 of them; too_easy at 4 of them"
    assert plan["right"] >= plan["fixed_right"]
    assert plan["attempts_per_task"] < 8 * 0.65


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--band", "0.8:0.2"], "expected 0 <= LO <= HI <= 1"),
        (["--band", "half"], "expected LO:HI"),
        (["--rule", "best"], "expected one of frognano-half, frognano-round5, learnable"),
        (["--rule", "learnable", "--band", "0:1"], "give one"),
        (["--k", "2"], "--k goes with --metrics"),
        (["--metrics", "--k", "0"], "expected whole numbers from 1 on"),
        (["-n", "4"], "goes with --model, --endpoint or --adaptive"),
        (["--confidence", "0.9"], "--confidence goes with --adaptive"),
        (["--max-attempts", "9"], "--max-attempts goes with --adaptive"),
        (["--adaptive", "--confidence", "1"], "expected at least 0.5 and less than 1"),
        (["--adaptive", "--rule", "frognano-half"], "use --band"),
        (["--adaptive", "--prior", "no such file"], "or a file that exists"),
        (["--adaptive", "--prior", "1:2"], "expected W:A:B"),
        (["--adaptive", "--max-attempts", "513"], "expected 1 to 512"),
        (["--adaptive", "--round-size", "17"], "--round-size 17: expected 1 to --max-attempts, 16"),
        (["--model", "m", "--adaptive", "--metrics"], "leave --adaptive out"),
        (["--model", "m", "--contiguous"], "--contiguous is about attempts that come in"),
    ],
)
def test_usage_errors(run_strop, args, message):
    result = run_strop(["calibrate", *args], [], check=False)
    assert (result.status, result.stdout) == (2, b"")
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"kind":"rollout","id":"x","task":"a"}', "<stdin>:2: success: missing, as are reward and error"),
        ('{"kind":"rollout","task":"a","success":true}', "<stdin>:2: "),
        ('{"kind":"rollout","id":"x","success":true}', "<stdin>:2: "),
        ('{"kind":"rollout","id":"x","task":"a","success":"yes"}', "<stdin>:2: success: "),
        ('{"kind":"rollout","id":"x","task":"a","reward":NaN}', "<stdin>:2: "),
        ('{"kind":"rollout","id":"x","task":"a","reward":1e999}', "<stdin>:2: reward: "),
        ('{"kind":"rollout","id":"x","task":"a","success":true,"policy":{"v":1e999}}', "<stdin>:2: policy: "),
        ('{"kind":"rollout","id":"a/0","task":"a","success":true}', "<stdin>:2: id: 'a/0' came before"),
        ('{"kind":"task","id":7}', "<stdin>:2: id: "),
        ('{"kind":"task","id":"a","statement_version":"2"}', "<stdin>:2: statement_version: "),
        ('{"kind":"rollout","id":"x","task":"a","succ', "<stdin>:2: "),
    ],
)
def test_bad_records_name_their_place_and_can_be_set_aside(run_strop, tmp_path, line, message):
    good = json.dumps(attempts("a", "+")[0]).encode()
    rest = json.dumps(attempts("a", "+-")[1]).encode()
    stream = b"\n".join([good, line.encode(), rest, b""])
    stopped = run_strop(["calibrate"], stream, check=False)
    assert (stopped.status, stopped.stdout) == (65, b"")
    assert message in stopped.stderr
    rejects = tmp_path / "bad.jsonl"
    went_on = run_strop(["calibrate", "--keep-going", "--rejects", rejects], stream, check=False)
    assert went_on.status == 1
    fields = of_tasks(went_on)["a"]
    assert (fields["successes"], fields["attempts"]) == (1, 2)
    assert len(rejects.read_text().splitlines()) == 1


def test_empty_input_is_no_error(run_strop):
    result = run_strop(["calibrate"], b"")
    assert (result.status, result.stdout) == (0, b"")


def test_a_file_of_prior_without_attempts_is_refused(run_strop, tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    result = run_strop(["calibrate", "--adaptive", "--prior", path], [], check=False)
    assert result.status == 2
    assert "holds no attempts" in result.stderr


def test_neither_torch_nor_numpy_is_loaded_to_count(run_strop):
    result = run_strop(["calibrate"], attempts("a", "+-"), env={"PYTHONPROFILEIMPORTTIME": "1"})
    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time:")}
    assert "strop.core.tasks.ledger" in loaded
    assert not loaded & {"torch", "numpy", "scipy", "transformers", "rich", "httpx"}


def test_a_wide_interval_holds_the_true_rate_about_as_often_as_it_says(run_strop):
    records = coin_stream(400, 10, seed=9)
    generator = random.Random(9)
    rates = []
    for _ in range(400):
        rates.append(generator.random())
        for _ in range(10):
            generator.random()
    found = of_tasks(run_strop(["calibrate", "--only", "task"], records))
    held = [fields["low"] <= rate <= fields["high"] for fields, rate in zip(found.values(), rates, strict=True)]
    assert 0.92 <= math.fsum(held) / 400 <= 0.985
