"""One protocol, three engines, one real model: what goes in, what comes out, and whether the numbers are ours too.

The log-probabilities that an engine reports are compared with those of the plain transformers model in float32, whole
sequences at once. Two float32 programs that add in another order differ by about 1e-6 of the largest logit a layer;
over 30 layers and logits up to 30 that is some 1e-4 nats, so the bound is 1e-3 nats. Greedy tokens may differ only
where the two candidates are within that bound of each other.
"""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path

import pytest

from strop.core.engines.protocol import STOP_REASONS, Request
from strop.core.errors import UsageError
from strop.core.records import Sampling

BOUND = 1e-3
SUMS = [f"3+4=7\n12+5=17\n{a}+{b}=" for a, b in ((2, 6), (8, 9), (21, 17))]
QUESTION = "What is the capital of France?"
GREEDY = Sampling(temperature=0.0, max_tokens=16)
SAMPLINGS = {
    "plain": Sampling(max_tokens=10),
    "cold": Sampling(temperature=0.6, max_tokens=6),
    "cut at k": Sampling(temperature=0.8, top_k=20, max_tokens=6),
    "cut at p": Sampling(top_p=0.8, max_tokens=6),
    "greedy": GREEDY,
}
SAMPLES = 4


@pytest.fixture(scope="session")
def tokenizer(smol):
    from strop.core.models.load import load_tokenizer, resolve_model

    return load_tokenizer(resolve_model(str(smol)))


@pytest.fixture(scope="session")
def prompts(tokenizer):
    chat = tokenizer.encode_prompt([{"role": "user", "content": QUESTION}])
    return [*(tokenizer.encode_prompt(text) for text in SUMS), chat]


@pytest.fixture(scope="session")
def plain_model(smol):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tuned_model(smol, lora):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32), lora).eval()


@pytest.fixture(scope="session")
def drawn(engine, prompts):
    """(request, completion) by the name of the sampling: four samples of each prompt, one where it is greedy."""
    requests = {}
    for name, sampling in SAMPLINGS.items():
        for p, ids in enumerate(prompts):
            for row in range(1 if name == "greedy" else SAMPLES):
                requests[name, p, row] = Request((name, p, row), ids, sampling, 1000 * p + row, row)
    done = run(engine, list(requests.values()))
    return {name: [(requests[key], done[key]) for key in requests if key[0] == name] for name in SAMPLINGS}


def run(engine, requests):
    """All completions by key; each comes once."""
    for request in requests:
        engine.submit(request)
    found = {}
    while engine.pending:
        for done in engine.collect():
            assert done.key not in found
            found[done.key] = done
    return found


@pytest.fixture(scope="session")
def logits():
    """Logits [T, V] in float64 of a model before each sampled token; a prompt is computed once."""
    import torch

    prefixes = {}

    def compute(model, prompt_ids, sampled):
        key = id(model), tuple(prompt_ids)
        with torch.inference_mode():
            if key not in prefixes:
                prefixes[key] = model(torch.tensor([prompt_ids]), use_cache=True)
            prefix = prefixes[key]
            first_1V = prefix.logits[0, -1:]
            if len(sampled) == 1:
                return first_1V.double()
            cache = copy.deepcopy(prefix.past_key_values)
            rest_TV = model(torch.tensor([sampled[:-1]]), past_key_values=cache).logits[0]
            return torch.cat([first_1V, rest_TV]).double()

    return compute


def expected(logits_TV, sampling, sampled, mode):
    """The log-probabilities of the sampled tokens of the distribution that `mode` names."""
    import torch

    if mode != "raw":
        logits_TV = logits_TV / sampling.temperature
    if mode == "processed":
        if sampling.top_k:
            least = logits_TV.topk(sampling.top_k).values[:, -1:]
            logits_TV = logits_TV.masked_fill(logits_TV < least, -torch.inf)
        if sampling.top_p < 1:
            probs, order = logits_TV.softmax(-1).sort(-1, descending=True)
            dropped = probs.cumsum(-1) - probs >= sampling.top_p
            logits_TV = logits_TV.masked_fill(dropped.gather(-1, order.argsort(-1)), -torch.inf)
    picked = logits_TV.log_softmax(-1).gather(-1, torch.tensor(sampled)[:, None])
    return picked[:, 0].tolist()


@pytest.fixture(scope="session")
def differences(logits):
    """Between the reported log-probabilities and those that `model` gives."""

    def compute(model, pairs, mode):
        return [
            abs(theirs - ours)
            for request, done in pairs
            for theirs, ours in zip(
                done.logprobs,
                expected(logits(model, request.prompt_ids, done.token_ids), request.sampling, done.token_ids, mode),
                strict=True,
            )
        ]

    return compute


@pytest.fixture
def show(record_property):
    """Hands a metric on to the end of the run, where all are printed."""

    def say(name, value, **more):
        record_property(name, " ".join([f"{value:.3g}", *(f"{key}={item}" for key, item in more.items())]))

    return say


def test_every_request_comes_back_once_with_ids_logprobs_and_a_reason(drawn, prompts, tokenizer):
    pairs = [pair for found in drawn.values() for pair in found]
    assert len(pairs) == len(prompts) * (4 * SAMPLES + 1)
    for request, done in pairs:
        assert (done.key, done.error) == (request.key, None)
        assert 0 < len(done.token_ids) <= request.sampling.max_tokens
        assert len(done.logprobs) == len(done.token_ids)
        assert all(value <= 0 for value in done.logprobs)
        assert all(type(token) is int and 0 <= token < tokenizer.vocab_size for token in done.token_ids)
        assert done.stop in STOP_REASONS
        assert (done.stop == "eos") == (done.token_ids[-1] in tokenizer.eos_ids)
        assert not tokenizer.eos_ids & set(done.token_ids[:-1])
        assert done.stop != "length" or len(done.token_ids) == request.sampling.max_tokens


@pytest.mark.parametrize("name", SAMPLINGS)
def test_logprobs_are_what_their_mode_says(engine, drawn, plain_model, differences, show, name):
    mode = engine.logprobs_mode(SAMPLINGS[name])
    found = differences(plain_model, drawn[name], mode)
    mean = sum(found) / len(found)
    show("logprob_gap_max", max(found), mean=f"{mean:.2g}", engine=engine.name, sampling=name, mode=mode, n=len(found))
    assert max(found) < BOUND


def test_our_own_scoring_finds_the_same_values(engine, drawn, plain_model, show):
    """What `train` computes of a rollout is what the engine reported with it: the mismatch that matters."""
    from strop.core.models.score import TokenSequence, score_tokens

    pairs = drawn["plain"]
    whole = [(one.prompt_ids + done.token_ids, len(one.prompt_ids)) for one, done in pairs]
    ours = score_tokens(plain_model, [TokenSequence(ids, [(start, len(ids))]) for ids, start in whole])
    found = [
        abs(a - b)
        for (_, done), values in zip(pairs, ours, strict=True)
        for a, b in zip(done.logprobs, values, strict=True)
    ]
    show("scored_gap_max", max(found), mean=f"{sum(found) / len(found):.2g}", engine=engine.name, n=len(found))
    assert max(found) < BOUND


def test_modes(engine):
    plain, cold, cut, greedy = Sampling(), Sampling(temperature=0.6), Sampling(top_p=0.8), GREEDY
    said = [engine.logprobs_mode(sampling) for sampling in (plain, cold, cut, greedy)]
    assert said == {
        "transformers": ["scaled", "scaled", "scaled", "raw"],
        "vllm": ["scaled", "scaled", "processed", "raw"],
        # As vLLM's server is by default: temperature and cut-offs are not in its values.
        "server": ["scaled", "raw", "scaled", "raw"],
    }[engine.name]


def test_greedy_tokens_are_the_likeliest_of_the_plain_model(engine, drawn, plain_model, logits, show):
    """So the greedy outputs of any two engines differ at most where two tokens are as likely as each other."""
    differing = total = 0
    for request, done in drawn["greedy"]:
        logits_TV = logits(plain_model, request.prompt_ids, done.token_ids)
        for token, logits_V in zip(done.token_ids, logits_TV, strict=True):
            total += 1
            differing += token != int(logits_V.argmax())
            assert float(logits_V.max() - logits_V[token]) < BOUND
    show("greedy_share_differing", differing / total, engine=engine.name, n=total)


def test_the_samples_of_a_group_differ_and_a_seed_says_which(engine, drawn, prompts):
    samples = [tuple(done.token_ids) for request, done in drawn["plain"] if request.prompt_ids == prompts[0]]
    assert len(set(samples)) > 1
    request, done = drawn["plain"][1]
    again = Request("again", request.prompt_ids, request.sampling, request.seed, request.row)
    alone = [run(engine, [again])["again"].token_ids for _ in range(2)]
    assert alone[0] == alone[1]
    if engine.name == "transformers":
        assert alone[0] == done.token_ids
        assert run(engine, [again])["again"].logprobs == done.logprobs


def test_one_survivor_is_the_greedy_token(engine, drawn, prompts):
    sole = Sampling(temperature=1.0, top_k=1, max_tokens=5)
    done = run(engine, [Request(p, ids, sole, 7 + p) for p, ids in enumerate(prompts)])
    greedy = [found.token_ids[:5] for _, found in drawn["greedy"]]
    assert [done[p].token_ids for p in range(len(prompts))] == greedy


def test_pending_and_collect(engine, prompts):
    assert (engine.pending, engine.collect()) == (0, [])
    short, long = Sampling(max_tokens=2), Sampling(max_tokens=10)
    for row in range(3):
        engine.submit(Request(("short", row), prompts[0], short, row, row))
    assert engine.pending == 3
    first = engine.collect()
    assert first
    assert engine.pending == 3 - len(first)
    # More may come while others are under way.
    engine.submit(Request("late", prompts[1], long, 5))
    rest = []
    while engine.pending:
        rest += engine.collect()
    keys = [done.key for done in first + rest]
    assert sorted(map(str, keys)) == sorted(map(str, [("short", 0), ("short", 1), ("short", 2), "late"]))
    assert (engine.pending, engine.collect()) == (0, [])


def test_a_cancelled_request_comes_back_once_and_disturbs_no_other(engine, prompts):
    long = Sampling(max_tokens=400)
    short = Sampling(max_tokens=4)
    alone = run(engine, [Request("kept", prompts[0], short, 7, 0)])["kept"]
    for key, sampling, row in (("kept", short, 0), ("dropped", long, 1), ("never begun", long, 2)):
        engine.submit(Request(key, prompts[0], sampling, 7 + row, row))
    engine.cancel("never begun")
    engine.cancel("of no request")
    found = {}
    while "kept" not in found:
        found |= {done.key: done for done in engine.collect()}
    engine.cancel("dropped")
    while engine.pending:
        for done in engine.collect():
            assert done.key not in found
            found[done.key] = done
    assert set(found) == {"kept", "dropped", "never begun"}
    assert {found[key].stop for key in ("dropped", "never begun")} == {"cancelled"}
    assert len(found["dropped"].token_ids) == len(found["dropped"].logprobs) < 400
    if engine.name == "transformers":
        assert found["kept"] == alone
        # It knows what was drawn so far.
        assert found["dropped"].token_ids


def test_stop_strings_keep_their_tokens(engine, prompts, tokenizer):
    def draw(name, stop):
        request = Request(name, prompts[1], Sampling(temperature=0.0, max_tokens=12, stop=stop), 1)
        return run(engine, [request])[name]

    free = draw("free", ["no such text"])
    assert (free.stop, len(free.token_ids)) == ("length", 12)
    texts = [tokenizer.decode([token]) for token in free.token_ids]
    within, across = texts[2], texts[3][-1] + texts[4][0]
    for stop in ([within], [across], ["no such text", across]):
        done = draw("stopped", stop)
        ids = done.token_ids
        assert done.stop == "stop"
        assert ids == free.token_ids[: len(ids)]
        assert stop[-1] in tokenizer.decode(ids)
        assert stop[-1] not in tokenizer.decode(ids[:-1])
        assert len(done.logprobs) == len(ids)


def test_the_end_token_ends_and_is_the_last(engine, prompts, tokenizer):
    done = run(engine, [Request("chat", prompts[3], Sampling(temperature=0.0, max_tokens=20), 1)])["chat"]
    assert done.stop == "eos"
    assert done.token_ids[-1] in tokenizer.eos_ids
    assert "Paris" in tokenizer.decode(done.token_ids)


def test_the_context_bounds_prompt_and_response(engine, prompts):
    size = engine.context_length
    assert size == 512
    filler = (prompts[0] * size)[:size]
    many = Sampling(max_tokens=40)
    done = run(engine, [Request("full", filler, many, 1), Request("room for two", filler[: size - 2], many, 2)])
    assert (done["full"].stop, done["full"].token_ids, done["full"].error) == ("length", [], None)
    assert (done["room for two"].error, len(done["room for two"].token_ids)) == (None, 2)


def test_numbers_that_mean_nothing_are_usage_errors(engine, prompts):
    for bad in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -2}, {"max_tokens": 0}):
        with pytest.raises(UsageError):
            engine.submit(Request("bad", prompts[0], Sampling(**bad), 1))
    assert engine.pending == 0


@pytest.mark.parametrize(
    "kind", ["transformers", *(pytest.param(kind, marks=pytest.mark.vllm) for kind in ("vllm", "server"))]
)
def test_an_adapter_is_what_runs(kind, open_kind, lora, prompts, tuned_model, plain_model, differences, show):
    """Its log-probabilities are those of base and adapter together, and not those of the base."""
    with open_kind(kind, adapter=lora) as tuned:
        assert str(lora) in tuned.info.adapter
        requests = [Request(p, ids, Sampling(max_tokens=6), p) for p, ids in enumerate(prompts)]
        done = run(tuned, requests)
        mode = tuned.logprobs_mode(requests[0].sampling)
    pairs = [(one, done[one.key]) for one in requests]
    found, base = differences(tuned_model, pairs, mode), differences(plain_model, pairs, mode)
    show("adapter_logprob_gap_max", max(found), to_base=f"{max(base):.2g}", engine=kind, n=len(found))
    assert max(found) < BOUND
    assert max(base) > 100 * BOUND


@pytest.mark.vllm
def test_vllm_leaves_the_process_as_it_was(open_kind):
    import torch

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), torch.set_num_threads
    with open_kind("vllm") as engine:
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), torch.set_num_threads) == before
        assert os.environ["VLLM_NO_USAGE_STATS"] == os.environ["DO_NOT_TRACK"] == "1"
        # Nothing runs beside us that could be left behind.
        children = [Path(f"/proc/self/task/{task}/children").read_text() for task in os.listdir("/proc/self/task")]
        commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in " ".join(children).split()]
        assert not [command for command in commands if "vllm" in command.lower() and "api_server" not in command]
        assert engine.pending == 0
    assert torch.set_num_threads is before[2]


@pytest.mark.vllm
def test_a_device_that_this_vllm_does_not_have(smol):
    pytest.importorskip("vllm")
    from strop.core.engines.protocol import ModelInfo
    from strop.core.engines.vllm import VllmEngine

    with pytest.raises(UsageError, match="--device tpu: the vLLM that is installed here runs on"):
        VllmEngine(smol, frozenset({2}), ModelInfo("m", "r"), device="tpu")
