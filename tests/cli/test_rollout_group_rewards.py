"""strop rollout --rescore --reward majority | self-certainty: from sampled rollouts to rewards without a label."""

import json

import pytest


@pytest.fixture(scope="module")
def sampled(run_strop, tiny_model):
    tasks = run_strop(["synth-tasks", "arithmetic", "-n", 2, "--seed", 1]).records
    args = ["rollout", "--model", tiny_model, "-n", 3, "--seed", 5, "--max-tokens", 4, "--engine", "transformers"]
    return tasks, run_strop(args, tasks).records


def test_both_rewards_of_sampled_rollouts(run_strop, tiny_model, sampled):
    _, records = sampled
    answers = iter(["7", "8", "7", "no", "9", "9"])
    told = [r | {"response": next(answers)} if r["kind"] == "rollout" else r for r in records]
    done = run_strop(["rollout", "--rescore", "--reward", "majority"], told)
    assert [r["kind"] for r in done.records] == [r["kind"] for r in records]
    graded = [r for r in done.records if r["kind"] == "rollout"]
    assert [r["reward"] for r in graded] == [1, 0, 1, 0, 1, 1]
    assert "reward majority of 6 rollouts in 2 groups: mean 0.6667" in done.stderr
    rollouts = [r for r in told if r["kind"] == "rollout"]
    assert run_strop(["rollout", "--rescore", "--reward", "majority"], rollouts, check=False).status == 65

    args = ["rollout", "--rescore", "--reward", "self-certainty", "--model", tiny_model, "--dtype", "float32"]
    done = run_strop(args, rollouts)
    assert [r["reward"] > 0 for r in done.records] == [True] * 6
    assert len({r["reward"] for r in done.records}) == 6
    assert "another policy" not in done.stderr
    assert run_strop(args, rollouts).stdout == done.stdout


def test_tasks_in_a_file_without_references(run_strop, sampled, tmp_path):
    tasks, records = sampled
    blind = [{key: value for key, value in task.items() if key != "reference"} for task in tasks]
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(task) + "\n" for task in blind))
    rollouts = [r | {"response": "7"} for r in records if r["kind"] == "rollout"]
    done = run_strop(["rollout", "--rescore", "--reward", "majority", "--tasks", file], rollouts)
    assert [r["reward"] for r in done.records] == [1.0] * 6


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--reward", "majority"], "it goes with --rescore"),
        (["--reward", "self-certainty", "--rescore"], "--model is missing"),
        (["--reward", "majority", "--rescore", "--length-penalty", "0.1"], "go with --reward pass"),
        (["--reward", "self-certainty", "--rescore", "--endpoint", "h:1", "--model", "m"], "whole distributions"),
    ],
)
def test_usage_errors(run_strop, args, says):
    done = run_strop(["rollout", *args], check=False)
    assert done.status == 2
    assert says in done.stderr
