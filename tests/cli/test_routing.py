"""rollout --routing into train --routing-replay, as a person runs them."""

import json

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rollouts(run_strop, tiny_moe, tmp_path_factory):
    """Rollouts of the small mixture with their routing in r.bin, and made-up advantages."""
    folder = tmp_path_factory.mktemp("run")
    tasks = run_strop(["synth-tasks", "arithmetic", "-n", 3, "--seed", 1]).stdout
    args = ["rollout", "--model", tiny_moe, "--device", "cpu", "--dtype", "float32", "-n", 4, "--seed", 2,
            "--max-tokens", 12, "--routing", "r.bin", "--only", "rollout"]  # fmt: skip
    done = run_strop(args, tasks, cwd=folder)
    records = done.records
    for number, record in enumerate(records):
        record["advantage"] = 1.0 - 2 * (number % 2)
    return folder, records, args, tasks


def train(run_strop, folder, model, out, records, *more, check=True):
    args = ["train", "--model", model, "--lora", 0, "--out", out, "--device", "cpu", "--dtype", "float32", *more]
    return run_strop(args, records, cwd=folder, check=check)


def gap(result):
    return next(one["value"] for one in result.records if one.get("name") == "logprob_gap_mean")


def test_the_file_depends_on_the_input_and_not_on_the_concurrency(run_strop, rollouts, tmp_path):
    folder, records, args, tasks = rollouts
    again = run_strop([*args, "--concurrency", 1], tasks, cwd=tmp_path).records
    assert [one["chunks"] for one in again] == [one["chunks"] for one in records]
    assert (tmp_path / "r.bin").read_bytes() == (folder / "r.bin").read_bytes()
    shapes = [one["chunks"][0]["routing"]["shape"] for one in records]
    assert shapes == [[len(one["chunks"][0]["token_ids"]) - 1, 2, 2] for one in records]


def test_a_resumed_run_goes_on_with_the_file(run_strop, rollouts, tmp_path):
    folder, records, args, tasks = rollouts
    part = [*args, "--resume", "out.jsonl"]
    (tmp_path / "r.bin").write_bytes((folder / "r.bin").read_bytes()[:-7])
    lines = [json.dumps({k: v for k, v in one.items() if k != "advantage"}, separators=(",", ":")) for one in records]
    (tmp_path / "out.jsonl").write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:200])
    run_strop(part, tasks, cwd=tmp_path)
    whole = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [one["id"] for one in whole] == [one["id"] for one in records]
    found = [one["chunks"][0]["routing"] for one in (whole[-1], records[-1])]
    arrays = [
        (place / "r.bin").read_bytes()[ref["offset"] :][: ref["shape"][0] * 4]
        for place, ref in zip((tmp_path, folder), found, strict=True)
    ]
    assert arrays[0] == arrays[1]
    assert found[0]["offset"] == found[1]["offset"] + len(arrays[0]) - 7


def test_train_replays_what_rollout_recorded(run_strop, rollouts, tiny_moe, tmp_path):
    """The trained model's routers are moved: with the record's experts less is left of the gap, and routers learn."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, records, _, _ = rollouts
    assert gap(train(run_strop, folder, tiny_moe, tmp_path / "same", records)) < 1e-5
    model = AutoModelForCausalLM.from_pretrained(tiny_moe, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for layer in (1, 2):
        weight = model.model.layers[layer].mlp.gate.weight.data
        weight += torch.randn(weight.shape, generator=generator) * 0.05
    moved = tmp_path / "moved"
    model.save_pretrained(moved)
    AutoTokenizer.from_pretrained(tiny_moe).save_pretrained(moved)
    free = gap(train(run_strop, folder, moved, tmp_path / "free", records, "--routing-replay", "off"))
    replayed = gap(train(run_strop, folder, moved, tmp_path / "auto", records))
    assert replayed < free / 2
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "auto" / "latest", dtype=torch.float32)
    for layer in (1, 2):
        assert (trained.model.layers[layer].mlp.gate.weight != model.model.layers[layer].mlp.gate.weight).any()


def test_what_train_refuses(run_strop, rollouts, tiny_moe, tmp_path):
    folder, records, _, _ = rollouts
    bare = [{**one, "chunks": [{**one["chunks"][0]}]} for one in records]
    del bare[2]["chunks"][0]["routing"]
    result = train(run_strop, folder, tiny_moe, tmp_path / "a", bare, "--keep-going", check=False)
    assert (result.status, result.stdout) == (65, b"")
    assert "<stdin>:3: chunks[0].routing: missing, but rollouts before it have one" in result.stderr
    result = train(run_strop, folder, tiny_moe, tmp_path / "a", bare[2:], "--routing-replay", "on", check=False)
    assert (result.status, result.stdout) == (65, b"")
    assert "<stdin>:1: chunks[0].routing: missing; --routing-replay on" in result.stderr
    # The name in the record is looked up from the folder that train runs in.
    result = train(run_strop, tmp_path, tiny_moe, tmp_path / "a", records, check=False)
    assert result.status == 65
    assert "<stdin>:1: chunks[0].routing.path: r.bin: No such file or directory" in result.stderr
    result = train(run_strop, folder, tiny_moe, "a", records, "--routing-replay", "on", "--loss", "sft", check=False)
    assert result.status == 2


def test_what_rollout_refuses(run_strop, tiny_model, rollouts, tmp_path):
    tasks = rollouts[3]
    args = ["rollout", "--device", "cpu", "--routing", tmp_path / "r.bin"]
    result = run_strop([*args, "--model", tiny_model], tasks, check=False)
    assert result.status == 2
    assert "is not a mixture of experts and has no routing to record" in result.stderr
    result = run_strop([*args, "--rescore"], tasks, check=False)
    assert result.status == 2
    result = run_strop([*args, "--model", tiny_model, "--endpoint", "http://127.0.0.1:1"], tasks, check=False)
    assert result.status == 2
    assert "does not return routing" in result.stderr
    assert not (tmp_path / "r.bin").exists()
