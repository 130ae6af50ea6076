"""strop distill as a process: signals of each method, the loop on policy, resuming, and what bad input says."""

import json
import math
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ENV = {"OMP_NUM_THREADS": "1"}
ATTACK = "You are a student who adds the digits of each column and forgets what is over ten."


def make_family(folder, seed, vocabulary=300):
    """A random Llama of another family: a byte-level BPE of two-byte tokens without pre-tokenisation."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["</s>"], initial_alphabet=alphabet, max_token_length=2
    )
    texts = [f"{a}+{b}={a + b}\nthe answer is {a + b}." for a in range(30) for b in range(30)]
    inner.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.3, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A teacher and a reference of one other family."""
    folder = tmp_path_factory.mktemp("family")
    return make_family(folder / "teacher", 1), make_family(folder / "reference", 2)


@pytest.fixture(scope="module")
def sampled(run_strop, tiny_model, tmp_path_factory):
    """Tasks and their rollouts by the tiny model, as records; the tasks carry a condition that somebody wrote."""
    tasks = run_strop(["synth-tasks", "arithmetic", "-n", "5", "--seed", "1"]).records
    for task in tasks:
        task["negative_condition"] = ATTACK
    args = ["rollout", "--model", tiny_model, "--dtype", "float32", "--max-tokens", "6", "-n", "2", "--stop", "never"]
    return run_strop(args, input=tasks, env=ENV).records


@pytest.fixture
def distill(run_strop, tiny_model):
    def run(*args, input, check=True, model=tiny_model):
        args = ["distill", "--model", model, "--dtype", "float32", *args]
        return run_strop(args, input=input, check=check, env=ENV)

    return run


def rollouts_of(records):
    return [record for record in records if record["kind"] == "rollout"]


def metrics_of(records):
    return {record["name"]: record["value"] for record in records if record["kind"] == "metric"}


def scores(model_path, prompt_ids, response_ids):
    """Log-probabilities of the response by a plain forward."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt_ids + response_ids])).logits[0, len(prompt_ids) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(response_ids)[:, None]).squeeze(1).tolist()


def test_nsd_scores_the_very_ids_under_both_prompts(distill, sampled, tiny_model):
    from transformers import AutoTokenizer

    result = distill("--nsd", "--metrics", input=sampled)
    assert [record["id"] for record in result.records[: len(sampled)]] == [record["id"] for record in sampled]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    prompts = {record["id"]: record["prompt"] for record in sampled if record["kind"] == "task"}
    for record in rollouts_of(result.records):
        (chunk,) = record["chunks"]
        start, end = chunk["sampled"][0]
        assert chunk["logp_ref"] == pytest.approx(chunk["logprobs"], abs=1e-4)
        negative = f"{prompts[record['task']].strip()}\n\n{ATTACK}\n\nSolve the problem as this instruction says."
        expected = scores(tiny_model, tokenizer(negative)["input_ids"], chunk["token_ids"][start:end])
        assert chunk["logp_neg"] == pytest.approx(expected, abs=1e-4)
        gates = [max(0, math.exp(n) - math.exp(r)) for n, r in zip(chunk["logp_neg"], chunk["logp_ref"], strict=True)]
        assert chunk["gate"] == pytest.approx(gates, abs=1e-6)
        assert record["distill"]["condition"]["writer"] == "given"
    found = metrics_of(result.records)
    assert found["distilled_rollouts"] == 10
    assert found["condition_ok_share"] == 1
    assert 0 < found["gate_open_share"] < 1


def test_a_condition_that_is_no_attack_is_neutral_and_counted(distill, sampled):
    records = [{k: v for k, v in record.items() if k != "negative_condition"} for record in sampled]
    result = distill("--nsd", "--metrics", "--condition-tokens", "8", input=records)
    for record in rollouts_of(result.records):
        assert record["distill"]["neutral"] is True
        assert record["distill"]["condition"]["writer"] == "student"
        assert set(record["chunks"][0]["gate"]) == {0}
        assert record["chunks"][0]["logp_neg"] == record["chunks"][0]["logp_ref"]
    assert metrics_of(result.records)["condition_ok_share"] == 0
    assert "every condition was neutral" in result.stderr


def test_train_takes_what_nsd_gives(distill, sampled, run_strop, tiny_model, tmp_path):
    made = distill("--nsd", input=sampled).stdout
    args = ["train", "--model", tiny_model, "--lora", "4", "--loss", "nsd", "--out", tmp_path / "out"]
    result = run_strop(args, input=made, env=ENV)
    found = metrics_of(result.records)
    assert found["trained_tokens"] == sum(len(r["chunks"][0]["logprobs"]) for r in rollouts_of(sampled))
    assert found["gate"] > 0
    assert found["gate"] / 2 <= found["push"] <= found["gate"]


def test_wiki_articles_and_offline_conditions(distill, sampled, tmp_path):
    records = [{k: v for k, v in record.items() if k != "negative_condition"} for record in sampled]
    articles = tmp_path / "articles.jsonl"
    texts = [{"kind": "text", "id": str(i), "text": f"River {i}. " * size} for i, size in enumerate([5, 60, 60])]
    articles.write_text("".join(json.dumps(text) + "\n" for text in texts))
    made = distill("--nsd", "--condition", "wiki", "--articles", articles, input=records)
    (characters,) = {record["distill"]["condition"]["characters"] for record in rollouts_of(made.records)}
    assert characters == 540
    kept = tmp_path / "conditions.jsonl"
    args = ["--nsd", "--condition", "offline", "--conditions", kept, "--condition-tokens", "8"]
    first = distill(*args, input=records)
    lines = kept.read_bytes()
    assert lines.count(b"\n") == 5
    again = distill(*args, input=records)
    assert again.stdout == first.stdout
    assert kept.read_bytes() == lines


@pytest.mark.parametrize(
    ("args", "name"),
    [
        (["--compass", "--reference", "REFERENCE"], "compass"),
        (["--compass", "--reference", "REFERENCE", "--alpha", "0"], "compass"),
        (["--compass", "--reference", "REFERENCE", "--beta", "1", "--units", "one-to-one"], "compass"),
        (["--opd"], "opd"),
        (["--opd", "--span-score", "sum"], "opd"),
        (["--opd", "--span-score", "split"], "opd"),
        (["--gopd", "--lambda", "2"], "gopd"),
    ],
)
def test_teachers_of_another_family(distill, sampled, family, args, name, run_strop, tiny_model, tmp_path):
    teacher, reference = family
    named = [str(reference) if arg == "REFERENCE" else arg for arg in args]
    result = distill(*named, "--teacher", teacher, "--metrics", "--trace", input=sampled)
    for record in rollouts_of(result.records):
        (chunk,) = record["chunks"]
        assert len(chunk["advantages"]) == len(chunk["logprobs"])
        assert all(map(math.isfinite, chunk["advantages"]))
        assert record["distill"]["method"] == name
        assert record["distill"]["teacher"]["model"] == str(teacher)
        assert "logp_ref" not in chunk or name == "compass"
    found = metrics_of(result.records)
    # Random text of the tiny model rarely cuts where the other tokenizer does.
    assert found["coverage"] == found["one_to_one"] if "one-to-one" in args else 0 < found["coverage"] <= 1
    trained = run_strop(["train", "--model", tiny_model, "--out", tmp_path / "out"], input=result.stdout, env=ENV)
    assert trained.records[-1]["kind"] == "checkpoint"


def test_compass_agrees_with_its_parts(distill, sampled, family):
    """The advantage is the units' shift less alpha times the displacement, which is 0 for the model itself."""
    teacher, reference = family
    made = distill("--compass", "--teacher", teacher, "--reference", reference, "--trace", input=sampled)
    seen = 0
    for record in rollouts_of(made.records):
        (chunk,) = record["chunks"]
        displacement = [a - b for a, b in zip(chunk["logprobs"], chunk["logp_ref"], strict=True)]
        assert displacement == pytest.approx([0] * len(displacement), abs=1e-4)
        expected = [0.0] * len(displacement)
        for first, last, _, _, shift, _ in record["distill"]["units_traced"]:
            seen += 1
            expected[first:last] = [shift] * (last - first)
        assert chunk["advantages"] == pytest.approx(expected, abs=1e-3)
    assert seen > 10


def test_opsd_reads_behind_the_solution(distill, sampled, tiny_model):
    result = distill("--opsd", "--opsd-form", "sampled", input=sampled)
    for record in rollouts_of(result.records):
        assert any(abs(value) > 1e-3 for value in record["chunks"][0]["advantages"])
        assert record["distill"]["coverage"] == 1


def test_opsd_writes_what_its_teacher_reads_and_train_asks_it(distill, sampled, run_strop, tiny_model, tmp_path):
    from strop.core.distill.conditions import Prompts
    from strop.core.models.load import load_tokenizer, resolve_model

    tokenizer = load_tokenizer(resolve_model(str(tiny_model), offline=True))
    tasks = {record["id"]: record for record in sampled if record["kind"] == "task"}
    result = distill("--opsd", "--metrics", input=sampled)
    for record in rollouts_of(result.records):
        chunk, task = record["chunks"][0], tasks[record["task"]]
        told = Prompts().privileged(task["prompt"], str(task["reference"]))
        assert chunk["teacher_prompt_ids"] == tokenizer.encode_prompt(told)
        assert "advantages" not in chunk
        assert record["distill"]["method"] == "opsd"
    assert metrics_of(result.records)["distilled_rollouts"] == 10
    args = ["train", "--model", tiny_model, "--dtype", "float32", "--loss", "opsd", "--lr", "1e-2", "--epochs", "3"]
    for extra in ["--lora", "4"], ["--lora", "0"]:
        trained = run_strop([*args, *extra, "--out", tmp_path / extra[1]], input=result.records, env=ENV)
        losses = [one["value"] for one in trained.records if one.get("name") == "loss"]
        assert len(losses) == 3
        assert losses[2] < losses[0]


def test_opsd_with_an_adapter_has_no_frozen_side(distill, sampled, tmp_path):
    tasks = [record for record in sampled if record["kind"] == "task"]
    result = distill("--opsd", "--adapter", "some", "--out", tmp_path / "run", input=tasks, check=False)
    assert result.status == 2
    assert "--opsd-form sampled" in result.stderr


def test_teacher_equal_to_reference_is_warned_of(distill, sampled, family):
    result = distill("--compass", "--teacher", family[0], "--reference", family[0], input=sampled)
    assert "teacher and reference say the same" in result.stderr


def test_reference_of_another_tokenizer_than_the_teacher(distill, sampled, family, tmp_path):
    other = make_family(tmp_path / "other", 3, vocabulary=270)
    result = distill("--compass", "--teacher", family[0], "--reference", other, "--metrics", input=sampled)
    assert metrics_of(result.records)["coverage"] > 0


def test_a_mixture_is_its_own_reference(distill, sampled, tiny_model, tmp_path):
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=4, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=512, initializer_range=0.3, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "moe")
    tokenizer.save_pretrained(tmp_path / "moe")
    args = ["--compass", "--teacher", tmp_path / "moe", "--metrics"]
    result = distill(*args, "--reference", "experts:1", input=sampled)
    assert metrics_of(result.records)["mean_shift"] > 0.01
    assert {record["distill"]["experts"] for record in rollouts_of(result.records)} == {1}
    same = distill(*args, "--reference", "experts:2", input=sampled)
    assert metrics_of(same.records)["mean_shift"] < 1e-6
    refused = distill(*args, "--reference", "experts:9", input=sampled, check=False)
    assert (refused.status, "4" in refused.stderr) == (2, True)


def test_scores_are_kept_and_asked_once(distill, sampled, tmp_path):
    args = ["--nsd", "--scores", tmp_path / "scores.db"]
    first = distill(*args, input=sampled)
    again = distill(*args, input=sampled)
    assert again.stdout == first.stdout
    assert "0 of 20 sequences had been scored before" in first.stderr
    assert "20 of 20 sequences had been scored before" in again.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scores.db"]


def test_resume_does_only_what_is_missing(distill, sampled, tmp_path):
    whole = distill("--nsd", input=sampled)
    part = tmp_path / "part.jsonl"
    lines = whole.stdout.splitlines(keepends=True)
    part.write_bytes(b"".join(lines[:7]) + lines[7][:40])
    result = distill("--nsd", "--resume", part, input=sampled)
    assert "4 written before" in result.stderr
    found = [json.loads(line) for line in part.read_bytes().splitlines()]
    assert [record["id"] for record in found] == [record["id"] for record in sampled]
    assert all(record["kind"] == "task" or "distill" in record for record in found)


def test_cold_start_keeps_answers_that_ended(distill, sampled, run_strop, tmp_path):
    records = json.loads(json.dumps(sampled))
    attempts = rollouts_of(records)
    for index, record in enumerate(attempts):
        record |= {"stop": "length" if index % 2 else "eos", "response": "" if index == 0 else "82\n"}
    result = run_strop(["distill", "--sft"], input=records)
    made = [record for record in result.records if record["kind"] == "sft"]
    assert [record["id"] for record in made] == [record["id"] for record in attempts[2::2]]
    assert made[0]["prompt"] == records[3]["prompt"]
    assert "4 examples; left out: 1 empty, 5 cut off" in result.stderr


def tasks_of(records, number):
    return [record for record in records if record["kind"] == "task"][:number]


@pytest.mark.parametrize("method", ["nsd", "compass", "opsd"])
def test_the_loop_on_policy(distill, sampled, family, tmp_path, method):
    teachers = ["--teacher", family[0], "--reference", family[1]] if method == "compass" else []
    args = [f"--{method}", *teachers, "--tasks-per-update", "2", "--passes", "2", "--max-tokens", "5", "--lora", "4"]
    kept = tmp_path / "rollouts.jsonl"
    result = distill(
        *args, "--out", tmp_path / "out", "--metrics", "--lr", "0.01", "--rollouts", kept, input=tasks_of(sampled, 4)
    )
    updates = {record["update"] for record in result.records if record["kind"] == "metric"}
    assert updates == {1, 2, 3, 4}
    assert result.records[-1]["kind"] == "checkpoint"
    assert result.records[-1]["version"] == 4
    made = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [record["policy"]["version"] for record in made] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len({record["id"] for record in made}) == 8
    name = {"nsd": "gate", "compass": "advantages", "opsd": "teacher_prompt_ids"}[method]
    assert all(name in record["chunks"][0] for record in made)
    # On policy: what the engine said when it sampled is what the trainer finds, after every update.
    gaps = [r["value"] for r in result.records if r["kind"] == "metric" and r["name"] == "logprob_gap_max"]
    assert max(gaps) < 1e-3


def test_a_loop_that_was_stopped_goes_on_to_the_same_weights(distill, sampled, tmp_path):
    args = ["--nsd", "--tasks-per-update", "1", "--max-tokens", "5", "--lora", "4", "--lr", "0.01", "--save-every", "1"]
    tasks = tasks_of(sampled, 4)
    whole = distill(*args, "--out", tmp_path / "whole", input=tasks)
    distill(*args, "--out", tmp_path / "cut", input=tasks)
    # As after a kill behind the second update.
    cut = tmp_path / "cut"
    for version in ("v000003", "v000004"):
        shutil.rmtree(cut / version)
    (cut / "latest").unlink()
    (cut / "latest").symlink_to("v000002")
    about = json.loads((cut / "v000002" / "strop.json").read_text())
    assert len(about["consumed"]) == 2
    again = distill(*args, "--out", cut, "--go-on", input=tasks)
    assert {record["update"] for record in again.records if record["kind"] == "metric"} == {3, 4}
    assert again.records[-1]["sha256"] == whole.records[-1]["sha256"]
    changed = distill(*args, "--gate", "log", "--out", cut, "--go-on", input=tasks, check=False)
    assert changed.status == 2
    assert "gate" in changed.stderr


def test_killed_in_the_loop_every_checkpoint_is_whole(sampled, tiny_model, tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(task) + "\n" for task in tasks_of(sampled, 5)))
    strop = Path(os.sys.executable).with_name("strop")
    args = ["--nsd", "--model", tiny_model, "--tasks-per-update", "1", "--passes", "50", "--max-tokens", "5", "--lora",
            "4", "--save-every", "1", "--out", tmp_path / "out", tasks]  # fmt: skip
    command = [strop, "distill", *map(str, args)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, **ENV})
    deadline = time.monotonic() + 120
    while not (tmp_path / "out" / "v000002").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    latest = (tmp_path / "out" / "latest").resolve()
    about = json.loads((latest / "strop.json").read_text())
    assert about["version"] == len(about["consumed"]) >= 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "name one method"),
        (["--nsd", "--opd"], "name one method"),
        (["--compass"], "needs a --teacher"),
        (["--compass", "--teacher", "x/y"], "needs a --reference"),
        (["--compass", "--teacher", "x/y", "--reference", "experts:no"], "experts:K"),
        (["--opd", "--teacher", "x/y", "--reference", "x/y"], "--reference goes with --compass"),
        (["--nsd", "--teacher", "x/y"], "--teacher goes with"),
        (["--compass", "--teacher", "x/y", "--reference", "x/y", "--span-score", "split"], "goes with --opd"),
        (["--nsd", "--condition", "wiki"], "needs --articles"),
        (["--nsd", "--go-on"], "go with --out"),
        (["--nsd", "--out", "o", "--engine", "vllm"], "engine is transformers"),
        (["--opsd", "--out", "o", "--opsd-beta", "1"], "between 0 and 1"),
    ],
)
def test_usage(distill, args, message):
    result = distill(*args, input=[], check=False)
    assert result.status == 2
    assert message in result.stderr


def changed(records, **fields):
    """The task of the first rollout, and that rollout with other fields."""
    rollout = rollouts_of(records)[0]
    return [next(r for r in records if r["id"] == rollout["task"]), {**rollout, **fields}]


def test_a_rollout_without_its_task_is_set_aside_and_the_rest_is_done(distill, sampled, tmp_path):
    records = json.loads(json.dumps(sampled))
    bad = rollouts_of(records)[3]
    bad["task"] = "elsewhere"
    result = distill("--nsd", "--keep-going", "--rejects", tmp_path / "bad.jsonl", input=records, check=False)
    assert result.status == 1
    assert len(rollouts_of(result.records)) == 9
    (reject,) = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert "no task 'elsewhere'" in reject["reason"]
    assert json.loads(reject["text"])["id"] == bad["id"]


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        ({"token_ids": [1, 2, 10**6], "sampled": [[1, 3]], "logprobs": [-1, -1]}, "vocabulary"),
        ({"token_ids": [1, 2, 3], "sampled": [[0, 3]], "logprobs": [-1, -1, -1]}, "cannot have been sampled"),
        ({"token_ids": [1, 2, 3], "sampled": [[1, 4]], "logprobs": [-1, -1, -1]}, "outside the 3 tokens"),
    ],
)
def test_bad_chunks_name_line_and_field(distill, sampled, chunk, message):
    result = distill("--nsd", input=changed(sampled, chunks=[chunk]), check=False)
    assert result.status == 65
    assert "<stdin>:2:" in result.stderr
    assert "chunks[0]" in result.stderr
    assert message in result.stderr


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampling": {"temperature": 0.5}}, "not those of temperature 1"),
        ({"sampling": {"temperature": 1, "top_p": 0.5, "logprobs": "processed"}}, "not those of temperature 1"),
        ({"chunks": [{"token_ids": [1, 2, 3, 4], "sampled": [[1, 2], [3, 4]], "logprobs": [-1, -1]}]}, "several turns"),
        ({"chunks": [{"token_ids": [1, 2, 3], "sampled": [[1, 3]]}]}, "chunks[0].logprobs"),
    ],
)
def test_what_teachers_cannot_read(distill, sampled, family, fields, message):
    result = distill("--opd", "--teacher", family[0], input=changed(sampled, **fields), check=False)
    assert result.status == 65
    assert message in result.stderr


def test_empty_and_failed_rollouts_pass(distill, sampled):
    empty = {"token_ids": [1, 2], "sampled": [], "logprobs": []}
    records = changed(sampled, chunks=[empty], response="")
    result = distill("--nsd", input=[*records, {**rollouts_of(sampled)[1], "error": "engine lost"}])
    assert result.records == [*records, {**rollouts_of(sampled)[1], "error": "engine lost"}]
    assert "1 failed by the machine, 1 empty" in result.stderr


def test_a_condition_longer_than_the_context_is_neutral(distill, sampled):
    records = json.loads(json.dumps(sampled))
    records[0]["negative_condition"] = ATTACK + " never" * 600
    result = distill("--nsd", input=records)
    neutral = [record["distill"]["neutral"] for record in rollouts_of(result.records)]
    assert neutral == [True, True] + [False] * 8
    assert "2 too long for the context" in result.stderr


def test_a_prompt_too_long_for_the_teacher_is_set_aside(distill, sampled, family):
    records = json.loads(json.dumps(sampled))
    records[0]["prompt"] = "1+1=2\n" * 200
    args = ["--opd", "--teacher", family[0], "--keep-going"]
    result = distill(*args, input=records, check=False)
    assert result.status == 1
    assert len(rollouts_of(result.records)) == 8
    assert "context" in result.stderr


def test_a_solution_too_long_for_the_teacher_is_set_aside(distill, sampled):
    records = json.loads(json.dumps(sampled))
    records[0]["reference"] = "1+1=2\n" * 200
    result = distill("--opsd", "--keep-going", input=records, check=False)
    assert result.status == 1
    assert len(rollouts_of(result.records)) == 8
    assert "context" in result.stderr


def test_a_model_that_says_nan_is_bad_data_and_nothing_is_written(distill, sampled, tiny_model, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], float("nan"))
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    result = distill("--nsd", input=sampled, model=broken, check=False)
    assert result.status == 65
    assert "nan" in result.stderr
    assert not rollouts_of(result.records)


def test_opsd_without_a_reference(distill, sampled):
    records = [{k: v for k, v in record.items() if k != "reference"} for record in sampled]
    result = distill("--opsd", input=records, check=False)
    assert result.status == 65
    assert "has no reference in words or numbers" in result.stderr


def test_rollouts_of_another_model_are_warned_of(distill, sampled):
    result = distill("--nsd", input=changed(sampled, policy={"model": "x/y", "revision": "0"}))
    assert "1 rollouts name another model" in result.stderr


def test_articles_that_are_all_too_short(distill, sampled, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"kind": "text", "id": "a", "text": "short"}\n')
    result = distill("--nsd", "--condition", "wiki", "--articles", tmp_path / "a.jsonl", input=sampled, check=False)
    assert result.status == 65
    assert "none of 1 texts has 500 characters" in result.stderr


def test_a_template_with_an_unknown_field(distill, sampled, tmp_path):
    (tmp_path / "negative.txt").write_text("{problem}\n{answer}\n")
    result = distill("--nsd", "--prompts", tmp_path, input=sampled, check=False)
    assert result.status == 65
    assert "negative.txt:2: {answer}: unknown field" in result.stderr


def test_templates_can_be_copied(run_strop, tmp_path):
    run_strop(["distill", "--copy-prompts", tmp_path / "prompts"], input=b"")
    assert sorted(path.stem for path in (tmp_path / "prompts").iterdir()) == [
        "negative", "privileged", "question", "solution", "wiki",
    ]  # fmt: skip


def test_dry_run_asks_no_model(distill, sampled):
    (plan,) = distill("--nsd", "--dry-run", input=sampled).records
    assert plan["kind"] == "plan"
    assert plan["rollouts"] == 10
    assert plan["tokens"] == sum(len(record["chunks"][0]["logprobs"]) for record in rollouts_of(sampled))
