"""strop train as a process: a loop's turns, resume after a kill, and what bad input says."""

import json
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest

ENV = {"OMP_NUM_THREADS": "1"}


def rollouts(groups=4, size=3, seed=0, **more):
    """Random groups with advantages and steps of a tiny policy's vocabulary."""
    chance = random.Random(seed)
    records = []
    for group in range(groups):
        for sample in range(size):
            length = chance.randint(8, 30)
            start = chance.randint(2, 5)
            records.append({
                "kind": "rollout", "id": f"g{group}/{sample}", "task": f"t{group}", "group": f"g{group}",
                "group_size": size, "sample": sample, "reward": float(sample == 0), "success": sample == 0,
                "chunks": [{
                    "token_ids": [chance.randrange(3, 40_000) for _ in range(length)],
                    "sampled": [[start, length]],
                    "logprobs": [-chance.uniform(1, 9) for _ in range(length - start)],
                }],
                "advantage": 1.0 if sample == 0 else -0.5, **more,
            })  # fmt: skip
    return records


@pytest.fixture
def train(run_strop, tiny_model, tmp_path):
    """Runs `strop train --model TINY --out OUT ARGS` on records."""

    def run(*args, input=(), out=None, check=True, model=tiny_model):
        chosen = ["--model", model] if model else []
        args = ["train", *chosen, "--out", out or tmp_path / "out", "--lora", "4", *args]
        return run_strop(args, input=input if isinstance(input, bytes) else list(input), check=check, env=ENV)

    return run


def metrics(result):
    return {(r["update"], r["name"]): r["value"] for r in result.records if r["kind"] == "metric"}


def test_one_update_and_its_records(train, tmp_path):
    task = b'{"kind": "task", "id": "t0", "prompt": "?"}\n'
    data = task + b"".join(json.dumps(record).encode() + b"\n" for record in rollouts())
    result = train("--tag", "iteration=2", input=data)
    assert result.stdout.startswith(task)
    checkpoint = result.records[-1]
    assert checkpoint["kind"] == "checkpoint"
    assert checkpoint["version"] == 1
    assert Path(checkpoint["path"]).samefile(tmp_path / "out" / "latest")
    assert checkpoint["provenance"]["tool"] == "train"
    values = metrics(result)
    names = {name for _, name in values}
    assert names == {
        "loss", "entropy", "clip_share", "mask_share", "grad_norm", "lr", "kl_rollout", "logprob_gap_mean",
        "logprob_gap_max", "groups_without_signal_share", "rollouts", "trained_tokens", "tokens", "tokens_per_s",
        "seconds",
    }  # fmt: skip
    assert values[1, "rollouts"] == 12
    assert values[1, "trained_tokens"] == sum(len(r["chunks"][0]["logprobs"]) for r in rollouts())
    assert values[1, "grad_norm"] > 0
    assert all(r["iteration"] == 2 for r in result.records if r["kind"] == "metric")
    assert "1 updates on 12 rollouts" in result.stderr
    assert not [r for r in result.records if r["kind"] == "rollout"]


def test_turns_of_a_loop_go_on_from_the_same_folder(train, tmp_path):
    out = tmp_path / "loop"
    for turn in range(2):
        again = ["--from", out]
        result = train(*again, "--lr", "1e-3", input=rollouts(seed=turn), out=out)
        assert result.records[-1]["version"] == turn + 1
    assert sorted(os.listdir(out)) == ["latest", "v000001", "v000002"]
    refused = train(input=rollouts(), out=out, check=False)
    assert refused.status == 2
    assert "--from" in refused.stderr
    # The base is in the checkpoint; --model may stay away.
    result = train("--from", out, input=rollouts(seed=3), out=tmp_path / "other", model=None)
    assert result.records[-1]["version"] == 3


def kill_after_first_checkpoint(args, data):
    process = subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **ENV})
    process.stdin.write(data)
    process.stdin.close()
    for line in process.stdout:
        if json.loads(line)["kind"] == "checkpoint":
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    return process.returncode


def test_kill_and_resume_end_with_the_weights_of_an_uninterrupted_run(train, tiny_model, tmp_path):
    options = ["--batch-groups", "2", "--save-every", "1", "--lr", "1e-2", "--epochs", "2", "--loss", "ppo"]
    records = rollouts(groups=24)
    data = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    whole = train(*options, input=data, out=tmp_path / "whole").records
    strop = Path(os.sys.executable).with_name("strop")
    out = tmp_path / "killed"
    args = [strop, "train", "--model", tiny_model, "--out", out, "--lora", "4", *options]
    assert kill_after_first_checkpoint(args, data) == -signal.SIGKILL
    about = json.loads((out / "latest" / "strop.json").read_text())
    assert not about["done"]
    assert 1 <= len(about["consumed"]) // 2 < 12
    rest = train(*options, "--resume", input=data, out=out)
    assert rest.records[-1]["sha256"] == whole[-1]["sha256"]
    assert rest.records[-1]["version"] == whole[-1]["version"] == 24
    done = json.loads((out / "latest" / "strop.json").read_text())
    assert done["done"]
    assert done["consumed"] == [f"g{i}" for i in range(24)]
    assert f"{3 * len(about['consumed'])} in groups used before" in rest.stderr
    # Once more: nothing is left to do, and other options are no continuation.
    again = train(*options, "--resume", input=data, out=out)
    assert [r["kind"] for r in again.records] == ["checkpoint"]
    assert again.records[0]["sha256"] == whole[-1]["sha256"]
    other = train(*options, "--lr", "1e-3", "--resume", input=data, out=out, check=False)
    assert other.status == 2
    assert "lr 0.01, not 0.001" in other.stderr


def test_same_input_and_seed_give_the_same_weights(train, tmp_path):
    sums = [
        train("--pack-tokens", pack, "--seed", seed, input=rollouts(), out=tmp_path / name).records[-1]["sha256"]
        for name, pack, seed in (("a", 2048, 0), ("b", 2048, 0), ("c", 2048, 1))
    ]
    assert sums[0] == sums[1] != sums[2]


def test_empty_input_leaves_a_checkpoint_and_a_warning(train, tmp_path):
    result = train(input=b"")
    assert [(r["kind"], r["version"]) for r in result.records] == [("checkpoint", 0)]
    assert "nothing to train on" in result.stderr
    assert (tmp_path / "out" / "latest" / "adapter_config.json").exists()


def test_dry_run_counts_and_touches_nothing(train, tmp_path):
    result = train("--dry-run", "--batch-groups", "2", "--epochs", "3", input=rollouts())
    assert result.stdout == b""
    tokens = sum(len(r["chunks"][0]["logprobs"]) for r in rollouts())
    assert f"6 updates on 12 rollouts and examples, {tokens} trained tokens in 4 groups" in result.stderr
    assert not (tmp_path / "out").exists()


def test_sft_on_text_and_on_successes(train):
    sft = {"kind": "sft", "id": "s", "prompt": [{"role": "user", "content": "Hi"}], "response": "Hello"}
    result = train("--loss", "sft", input=[sft, *rollouts(groups=1)])
    assert metrics(result)[1, "rollouts"] == 2
    assert metrics(result)[1, "loss"] > 0
    assert "2 no success" in result.stderr


def test_rollouts_of_our_own_engine_are_on_policy(run_strop, train, tiny_model, tmp_path):
    """The whole pipe: the trainer's log-probabilities are those the engine recorded, at a temperature other than 1."""
    tasks = run_strop(["synth-tasks", "arithmetic", "-n", "2", "--seed", "1"]).stdout
    args = ["rollout", "--model", tiny_model, "-n", "4", "--max-tokens", "6", "--temperature", "0.7", "--seed", "2"]
    drawn = run_strop([*args, "--engine", "transformers", "--dtype", "float32"], input=tasks, env=ENV).stdout
    credited = run_strop(["advantage", "--grpo", "--keep-zero-variance"], input=drawn).stdout
    first = train("--lr", "1e-2", "--kl-coef", "0.1", "--dtype", "float32", input=credited)
    values = metrics(first)
    assert values[1, "logprob_gap_max"] < 1e-4
    assert values[1, "clip_share"] == 0
    assert values[1, "rollouts"] == 8
    # The adapter that came out changes what the next rollouts sample and say of their policy.
    again = run_strop(
        [*args, "--engine", "transformers", "--dtype", "float32", "--adapter", tmp_path / "out"], input=tasks, env=ENV
    ).records
    assert {record["policy"]["version"] for record in again if record["kind"] == "rollout"} == {1}


def test_all_parameters(run_strop, tiny_model, tmp_path):
    out = ["--out", tmp_path / "full"]
    args = ["train", "--model", tiny_model, *out, "--lora", "0", "--kl-coef", "0.1", "--lr", "1e-3"]
    result = run_strop(args, input=rollouts(), env=ENV)
    assert (tmp_path / "full" / "latest" / "config.json").exists()
    assert metrics(result)[1, "kl_reference"] == pytest.approx(0, abs=1e-9)


def bad(change=None, **fields):
    """A good group with its second member changed."""
    records = rollouts(groups=1)
    records[1].update(fields)
    if change:
        records[1]["chunks"][0].update(change)
    return records


BAD = [
    (bad({"logprobs": [-1.0]}), 65, "chunks[0].logprobs: 1 values for"),
    (bad({"sampled": [[3, 999]]}), 65, "chunks[0].sampled[0]: span [3, 999)"),
    (bad({"token_ids": [1, 2, 60000], "sampled": [[1, 3]], "logprobs": [-1, -1]}), 65, "vocabulary of 49152"),
    (bad({"sampled": [], "logprobs": []}), 65, "nothing to train on"),
    (bad(chunks=[]), 65, "chunks: missing"),
    (bad(id="g0/0"), 65, "came before"),
    (bad(sampling={"top_p": 0.9, "logprobs": "processed"}), 65, "--allow-truncated-sampling"),
    (bad(advantage=None), 0, "1 without an advantage"),
    (bad(advantage=None, error="engine lost"), 0, "1 failed by the machine"),
    ([{**r, "advantage": None} for r in rollouts(groups=1)], 65, "strop advantage"),
]


def test_bad_input_names_line_and_field(run_strop, tiny_model, tmp_path):
    """In one process each, without loading a model: a dry run reads just as strictly."""
    for number, (records, status, message) in enumerate(BAD):
        args = ["train", "--model", tiny_model, "--out", tmp_path / f"{number}", "--dry-run"]
        result = run_strop(args, input=records, check=False, env=ENV)
        assert result.status == status, (message, result.stderr)
        assert message in result.stderr
        if status == 65 and "strop advantage" not in message:
            assert "<stdin>:2: " in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"1e999", b"null"])
def test_numbers_that_are_none_are_bad_data(run_strop, tiny_model, tmp_path, number):
    line = json.dumps(rollouts(groups=1)[0]).encode()
    line = line.replace(b'"logprobs": [', b'"logprobs": [' + number + b", ", 1)
    args = ["train", "--model", tiny_model, "--out", tmp_path / "out", "--dry-run"]
    result = run_strop(args, input=line + b"\n", check=False)
    assert result.status == 65
    assert "<stdin>:1: " in result.stderr


def test_keep_going_sets_the_bad_one_aside_and_trains_on_the_rest(train, tmp_path):
    rejects = tmp_path / "rejects.jsonl"
    result = train("--keep-going", "--rejects", rejects, input=bad({"logprobs": [-1.0]}), check=False)
    assert result.status == 1
    assert metrics(result)[1, "rollouts"] == 2
    (reject,) = [json.loads(line) for line in rejects.read_text().splitlines()]
    assert reject["field"] == "chunks[0].logprobs"
    assert reject["line"] == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--betas", "0.9"], "--betas"),
        (["--betas", "0.9,1.5"], "[0, 1)"),
        (["--denominator", "constant"], "--constant-tokens"),
        (["--constant-tokens", "5"], "--denominator constant"),
        (["--mismatch-cap", "0.5"], "factor above 1"),
        (["--from", "nowhere"], "no checkpoint"),
        (["--lr", "-1"], "--lr"),
    ],
)
def test_usage_errors(run_strop, tmp_path, args, message):
    result = run_strop(["train", "--model", "m", "--out", tmp_path / "out", *args], check=False)
    assert result.status == 2
    assert message in result.stderr


def test_model_that_is_not_there(run_strop, tmp_path):
    result = run_strop(["train", "--model", "./none", "--out", tmp_path / "out"], input=rollouts(), check=False)
    assert result.status == 69
    assert "no such model" in result.stderr


def test_output_that_cannot_be_written(train, tmp_path):
    (tmp_path / "file").write_text("")
    result = train(input=rollouts(), out=tmp_path / "file" / "out", check=False)
    assert result.status == 74
    assert "Traceback" not in result.stderr


def graded(groups=6, size=3, seed=0):
    """Rollouts as `rollout` leaves them, rewarded for large ids."""
    records = rollouts(groups, size, seed)
    for record in records:
        ids = record["chunks"][0]["token_ids"]
        record["reward"] = float(sum(one > 20_000 for one in ids) > len(ids) / 2)
        del record["advantage"]
    return records


def test_critic_and_policy_in_turns(train, run_strop, tmp_path):
    """Values of the critic as it was, advantages and targets, then the critic's update before the policy's."""
    out, given = tmp_path / "out", graded()
    first = run_strop(["advantage", "--gae", "--critic", "zero"], given)
    turn = train("--critic", "--critic-lr", "1e-2", input=first.stdout)
    values = metrics(turn)
    assert values[1, "explained_variance"] == 0
    assert values[1, "value_mean"] == 0
    assert {"critic_loss", "value_clip_share", "critic_grad_norm", "loss", "grad_norm"} <= {name for _, name in values}
    assert sorted(file.name for file in (out / "latest" / "critic").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "critic.json", "optimizer.pt", "value_head.safetensors",
    ]  # fmt: skip
    second = run_strop(["advantage", "--gae", "--critic", out], given, env=ENV)
    assert len({value for r in second.records for value in r["chunks"][0]["values"]}) > 5
    alone = train("--from", out, "--critic-only", "--epochs", "4", "--critic-lr", "1e-2", out=tmp_path / "alone",
                  input=second.stdout)  # fmt: skip
    losses = [r["value"] for r in alone.records if r.get("name") == "critic_loss"]
    assert losses[-1] < losses[0]
    assert not [r for r in alone.records if r.get("name") == "grad_norm"]
    # The policy has not moved.
    assert alone.records[-1]["sha256"] == turn.records[-1]["sha256"]
    both = train("--from", out, "--critic-from", tmp_path / "alone", "--critic", out=tmp_path / "both",
                 input=second.stdout)  # fmt: skip
    assert both.records[-1]["version"] == 2
    assert both.records[-1]["sha256"] != turn.records[-1]["sha256"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--critic-lr", "1"], "--critic-lr goes with --critic"),
        (["--critic", "--loss", "sft"], "not with --loss sft"),
        (["--critic-from", "nowhere"], "no critic there"),
    ],
)
def test_options_of_the_critic(train, args, says):
    done = train(*args, check=False)
    assert done.status == 2
    assert says in done.stderr


def test_a_critic_needs_targets(train):
    done = train("--critic", input=rollouts(), check=False)
    assert done.status == 65
    assert "<stdin>:1: chunks[0].values: missing; a critic learns from" in done.stderr
