"""strop advantage --gae as a process."""

import pytest


def rollout(number, values, reward=1.0, **more):
    chunk = {"token_ids": [5, 6, 7], "sampled": [[1, 3]], "values": values}
    return {"kind": "rollout", "id": str(number), "task": "t", "reward": reward, "chunks": [chunk], **more}


def test_tokens_get_their_advantage_and_other_kinds_pass(run_strop):
    task = {"kind": "task", "id": "t"}
    done = run_strop(["advantage", "--gae"], [task, rollout(0, [0.25, 0.5]), rollout(1, [0.0, 1.0], reward=0.5)])
    assert done.records[0] == task
    assert [r["chunks"][0]["advantages"] for r in done.records[1:]] == [[0.75, 0.5], [0.5, -0.5]]
    assert done.records[1]["credit"]["estimator"] == "gae"
    assert done.records[1]["credit"]["options"] == {"discount": 1.0, "policy_lambda": 1.0, "critic_lambda": 1.0}


def test_lambdas(run_strop):
    records = [rollout(0, [0.5, 0.25])]
    (plain,) = run_strop(["advantage", "--gae", "--discount", "0.9", "--lambda", "0.8"], records).records
    assert plain["chunks"][0]["advantages"] == pytest.approx([0.265, 0.75])
    assert plain["chunks"][0]["returns"] == pytest.approx([0.9, 1.0])
    (adaptive,) = run_strop(["advantage", "--gae", "--length-adaptive", "0.05"], records).records
    assert adaptive["chunks"][0]["advantages"] == pytest.approx([-0.25, 0.75])


def test_a_critic_that_adds_noise_is_warned_of(run_strop):
    done = run_strop(["advantage", "--gae", "--diagnose"], [rollout(0, [5.0, -5.0]), rollout(1, [5.0, -5.0], 0.0)])
    values = {r["name"]: r["value"] for r in done.records if r["kind"] == "metric"}
    assert values["explained_variance"] == pytest.approx(-100)
    assert "add noise" in done.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--gae", "--lambda", "0.9", "--length-adaptive", "0.05"], "takes the place of --lambda"),
        (["--gae", "--no-std"], "--std does not go with --gae"),
        (["--gae", "--dr-grpo"], "--dr-grpo does not go with --gae"),
        (["--grpo", "--lambda", "1"], "--lambda does not go with --grpo"),
        (["--grpo", "--gae"], "exactly one of"),
    ],
)
def test_usage_errors(run_strop, args, says):
    done = run_strop(["advantage", *args], check=False)
    assert done.status == 2
    assert says in done.stderr


def test_a_bad_rollout_is_named_and_can_be_set_aside(run_strop):
    records = [rollout(0, [0.1, 0.2]), rollout(1, [0.1])]
    done = run_strop(["advantage", "--gae"], records, check=False)
    assert done.status == 65
    assert "<stdin>:2: chunks[0].values: 1 values for 2 sampled tokens" in done.stderr
    assert len(run_strop(["advantage", "--gae", "--keep-going"], records, check=False).records) == 1
