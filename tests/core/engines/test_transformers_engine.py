"""The embedded engine on the real model: repeatable to the last bit, equal to transformers, honest numbers."""

import random
import shutil

import pytest

from strop.core.engines.open import EngineOptions, open_engine
from strop.core.engines.protocol import Request
from strop.core.engines.schedule import RowScheduler
from strop.core.errors import UsageError
from strop.core.models.load import load_model, load_tokenizer, resolve_model
from strop.core.models.score import TokenSequence, score_tokens
from strop.core.records import Sampling

PROMPTS = [
    "3+4=7\n12+5=17\n8+3=",
    "3+4=7\n12+5=17\n21+17=",
    "The capital of France is",
    "Once upon a time there was a",
    "def fibonacci(n):\n",
    "Q: What is the largest planet of the solar system, and how many moons does it have? Answer in one sentence.\nA:",
]
# Longer than a chunk: its attention meets a cache.
LONG = " ".join(f"{a}+{b}={a + b}." for a in range(8) for b in range(5)) + " 3+9="
SAMPLING = Sampling(max_tokens=6, temperature=0.9)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Two threads that wait for each other are far slower than one wherever the machine has other work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer(smol):
    return load_tokenizer(resolve_model(str(smol)))


@pytest.fixture(scope="module")
def float_engine(smol):
    with opened(smol) as engine:
        yield engine


@pytest.fixture(scope="module")
def float_model(smol):
    return load_model(resolve_model(str(smol)), device="cpu", dtype="float32")


def opened(folder, **options):
    options = {"device": "cpu", "dtype": "float32", "engine": "transformers"} | options
    return open_engine(EngineOptions(model=str(folder), **options))


def run(engine, requests):
    """All completions by key, submitted at once."""
    for request in requests:
        engine.submit(request)
    return drain(engine)


def drain(engine):
    done = {}
    while engine.pending:
        for completion in engine.collect():
            assert completion.key not in done
            done[completion.key] = completion
    assert engine.collect() == []
    return done


def trickled(engine, requests, in_flight):
    """All completions by key, never more than so many pending."""
    done, waiting = {}, list(requests)
    while waiting or engine.pending:
        while waiting and engine.pending < in_flight:
            engine.submit(waiting.pop())
        done |= {completion.key: completion for completion in engine.collect()}
    return done


def fates(done):
    return {key: (one.token_ids, one.logprobs, one.stop, one.error) for key, one in done.items()}


def requests_of(tokenizer, prompts, samples, sampling=SAMPLING):
    return [
        Request((p, row), tokenizer.encode_prompt(prompt), sampling, 1000 * p + row, row)
        for p, prompt in enumerate(prompts)
        for row in range(samples)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sample_is_the_same_whatever_its_neighbours(smol, tokenizer, dtype):
    """Byte for byte: alone, in any order, among few or many, one at a time, in another batch size, after other work."""
    # bfloat16 is emulated, and slow, on many CPUs.
    requests = requests_of(tokenizer, [*PROMPTS[: 4 if dtype == "float32" else 2], LONG], 3)
    shuffled = random.Random(4).sample(requests, len(requests))
    with opened(smol, dtype=dtype) as engine:
        reference = fates(run(engine, requests))
        assert isinstance(engine._scheduler, RowScheduler)
        assert len({tuple(fate[0]) for fate in reference.values()}) > 5
        few = fates(run(engine, requests[1::4]))
        assert few == {request.key: reference[request.key] for request in requests[1::4]}
        alone = requests[7]
        assert fates(run(engine, [alone])) == {alone.key: reference[alone.key]}
        assert fates(trickled(engine, shuffled, 5)) == reference
    with opened(smol, dtype=dtype, batch_rows=3) as narrow:
        assert fates(run(narrow, shuffled)) == reference


def test_float32_samples_differ_by_rounding_alone_between_numbers_of_threads(smol, tokenizer, float_engine):
    """On some CPUs they are the same bits, on others a product is summed in another order."""
    import torch

    requests = requests_of(tokenizer, [PROMPTS[0], LONG], 3)
    reference = fates(run(float_engine, requests))
    torch.set_num_threads(2)
    try:
        with opened(smol) as engine:
            found = fates(run(engine, requests))
    finally:
        torch.set_num_threads(1)
    assert found.keys() == reference.keys()
    for key, (token_ids, logprobs, *rest) in found.items():
        assert (token_ids, *rest) == (reference[key][0], *reference[key][2:])
        assert logprobs == pytest.approx(reference[key][1], abs=1e-4)


def test_greedy_equals_transformers_generate(smol, tokenizer, float_engine, float_model):
    import torch

    sampling = Sampling(temperature=0.0, max_tokens=20)
    prompts = [*PROMPTS, LONG]
    done = run(float_engine, requests_of(tokenizer, prompts, 1, sampling))
    for p, prompt in enumerate(prompts):
        ids = torch.tensor([tokenizer.encode_prompt(prompt)])
        whole = float_model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, pad_token_id=0
        )
        assert done[p, 0].token_ids == whole[0, ids.shape[1] :].tolist()
        assert done[p, 0].stop == ("eos" if done[p, 0].token_ids[-1] in tokenizer.eos_ids else "length")


@pytest.mark.parametrize(
    "sampling", [SAMPLING, Sampling(temperature=0.0, max_tokens=8), Sampling(top_p=0.7, top_k=30, max_tokens=8)]
)
def test_recorded_logprobs_are_those_of_scoring(tokenizer, float_engine, float_model, sampling):
    requests = requests_of(tokenizer, [*PROMPTS, LONG], 2, sampling)
    done = run(float_engine, requests)
    sequences = [
        TokenSequence(
            request.prompt_ids + done[request.key].token_ids,
            [(len(request.prompt_ids), len(request.prompt_ids) + len(done[request.key].token_ids))],
        )
        for request in requests
    ]
    scored = score_tokens(float_model, sequences, temperature=sampling.temperature or 1.0)
    for request, values in zip(requests, scored, strict=True):
        assert done[request.key].logprobs == pytest.approx(values, abs=1e-4)


def test_bfloat16_logprobs_differ_from_scoring_by_rounding(smol, tokenizer, record_property):
    requests = requests_of(tokenizer, PROMPTS, 2)
    with opened(smol, dtype="bfloat16") as engine:
        done = run(engine, requests)
    model = load_model(resolve_model(str(smol)), device="cpu", dtype="bfloat16")
    gaps = []
    for request in requests:
        ids, start = done[request.key].token_ids, len(request.prompt_ids)
        sequence = TokenSequence(request.prompt_ids + ids, [(start, start + len(ids))])
        (values,) = score_tokens(model, [sequence], temperature=SAMPLING.temperature)
        gaps += [abs(a - b) for a, b in zip(done[request.key].logprobs, values, strict=True)]
    record_property("bfloat16_logprob_gap_max", f"{max(gaps):.3g}")
    record_property("bfloat16_logprob_gap_mean", f"{sum(gaps) / len(gaps):.3g}")
    # bfloat16 rounds a logit of 16 to 0.06; the mean over tokens is far below the largest.
    assert sum(gaps) / len(gaps) < 0.05
    assert max(gaps) < 0.5


def test_samples_follow_the_model(tokenizer, float_engine, float_model):
    """First tokens of many seeds against the model's own distribution."""
    import numpy as np
    import torch
    from scipy.stats import chisquare

    ids = tokenizer.encode_prompt(PROMPTS[2])
    num = 400
    done = run(float_engine, [Request(seed, ids, Sampling(max_tokens=1), seed, seed) for seed in range(num)])
    with torch.inference_mode():
        probs = float_model(torch.tensor([ids])).logits[0, -1].double().softmax(-1).numpy()
    counts = np.bincount([one.token_ids[0] for one in done.values()], minlength=len(probs))
    common = probs * num >= 5
    observed, expected = counts[common], probs[common] * num
    observed, expected = np.append(observed, num - observed.sum()), np.append(expected, num - expected.sum())
    assert chisquare(observed, expected).pvalue > 1e-3


def test_a_stop_string_ends_a_sample_at_the_token_that_completes_it(tokenizer, float_engine):
    greedy = Sampling(temperature=0.0, max_tokens=24)
    ids = tokenizer.encode_prompt(PROMPTS[3])
    (whole,) = run(float_engine, [Request(0, ids, greedy, 0)]).values()
    text = tokenizer.decode(whole.token_ids)
    borders = [len(tokenizer.decode(whole.token_ids[:i])) for i in range(1, len(whole.token_ids))]
    for border in borders[2:12:3]:
        # Begins in one token and ends in the next.
        stop = text[border - 2 : border + 2]
        sampling = Sampling(temperature=0.0, max_tokens=24, stop=["no such text", stop])
        (cut,) = run(float_engine, [Request(0, ids, sampling, 0)]).values()
        assert cut.stop == "stop"
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
        assert cut.logprobs == whole.logprobs[: len(cut.token_ids)]
        assert stop in tokenizer.decode(cut.token_ids)
        assert stop not in tokenizer.decode(cut.token_ids[:-1])


def test_any_of_several_end_tokens_ends_a_sample(smol, tmp_path, tokenizer, float_engine):
    """Two are declared, in two files; both count, and the rest of the sample is as it was."""
    import json

    greedy = Sampling(temperature=0.0, max_tokens=12)
    requests = requests_of(tokenizer, PROMPTS[2:5], 1, greedy)
    whole = run(float_engine, requests)
    ends = [whole[p, 0].token_ids[3] for p in range(2)]
    folder = tmp_path / "model"
    folder.mkdir()
    for file in smol.iterdir():
        (folder / file.name).symlink_to(file)
    for name, value in (("config.json", ends[0]), ("generation_config.json", [2, ends[1]])):
        config = json.loads((smol / name).read_text())
        (folder / name).unlink()
        (folder / name).write_text(json.dumps(config | {"eos_token_id": value}))
    with opened(folder) as engine:
        done = run(engine, requests)
    for p in range(2):
        expected = whole[p, 0].token_ids
        first = next(i for i, token in enumerate(expected) if token in {2, *ends})
        assert done[p, 0].token_ids == expected[: first + 1]
        assert done[p, 0].stop == "eos"


def test_the_context_bounds_a_sample(smol, tokenizer):
    ids = tokenizer.encode_prompt(PROMPTS[0])
    with opened(smol, max_context=len(ids) + 3) as engine:
        assert engine.context_length == len(ids) + 3
        done = run(engine, [
            Request("fits", ids, Sampling(max_tokens=50, temperature=1.5), 1),
            Request("full", [*ids, 5, 6, 7], SAMPLING, 1),
            Request("over", [*ids, 5, 6, 7, 8], SAMPLING, 1),
        ])  # fmt: skip
    assert (len(done["fits"].token_ids), done["fits"].stop) == (3, "length")
    for key in ("full", "over"):
        assert (done[key].token_ids, done[key].stop, done[key].error) == ([], "length", None)
    with pytest.raises(UsageError, match="8192"):
        opened(smol, max_context=9000)


def test_nothing_is_loaded_before_it_is_needed(smol, tokenizer):
    with opened(smol) as engine:
        assert engine._scheduler is None
        assert engine.collect() == []
        assert engine.info.model == str(smol)
        assert len(engine.info.revision) == 16
        with pytest.raises(UsageError, match="top-p"):
            engine.submit(Request(0, [1], Sampling(top_p=0.0), 0))
        assert engine.pending == 0
        assert engine._scheduler is None


def test_logits_that_are_no_numbers_are_an_error_of_the_machine(tiny_model, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "broken"
    shutil.copytree(tiny_model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][:] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with opened(folder) as engine:
        (done,) = run(engine, [Request(0, [1, 2, 3], SAMPLING, 0)]).values()
    assert "nan" in done.error
    assert done.token_ids == done.logprobs == []


def test_memory_bounds_the_samples_in_flight_and_changes_none(tiny_model, monkeypatch):
    requests = [
        Request((p, row), list(range(5 + p, 25 + p)), Sampling(max_tokens=9), 100 * p + row, row)
        for p in range(6)
        for row in range(5)
    ]
    with opened(tiny_model) as engine:
        reference = fates(run(engine, requests))
    # Room for two samples of 29 tokens.
    monkeypatch.setattr("strop.core.engines.transformers._cache_tokens", lambda *_: 60)
    with opened(tiny_model) as engine:
        for request in requests:
            engine.submit(request)
        done, most = {}, 0
        while engine.pending:
            done |= {one.key: one for one in engine.collect()}
            most = max(most, sum(len(group.samples) for group in engine._scheduler._groups))
    assert fates(done) == reference
    assert most <= 2


def test_closing_lets_go_of_what_is_queued(tiny_model):
    engine = opened(tiny_model)
    for row in range(5):
        engine.submit(Request(row, [1, 2, 3], Sampling(max_tokens=50), row, row))
    engine.close()
    assert engine.pending == 0
    assert engine.collect() == []
