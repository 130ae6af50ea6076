"""Scoring given tokens through any engine: the numbers of the plain model, and nothing that is no number.

The bound is that of test_protocol.py, for the same reason: 1e-3 nats between two float32 programs.
"""

from __future__ import annotations

import random
from contextlib import contextmanager

import pytest

from strop.core.engines import scorers
from strop.core.engines.open import EngineOptions
from strop.core.engines.protocol import ModelInfo
from strop.core.engines.scorers import BadSequence, ModelScorer, PromptScorer, find_sequence_fault, open_scorer
from strop.core.errors import DataError, UsageError
from strop.core.models.load import load_model, resolve_model
from strop.core.models.score import TokenSequence

BOUND = 1e-3
MAX_CONTEXT = 512
KINDS = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("server", marks=pytest.mark.vllm)]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def options_of(folder, **more):
    given = {"engine": "transformers", "device": "cpu", "dtype": "float32", "offline": True, **more}
    return EngineOptions(model=str(folder), **given)


@pytest.fixture
def open_kind_of_scorer(smol, request, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")

    @contextmanager
    def opened(kind, **more):
        if kind == "vllm":
            pytest.importorskip("vllm")
        endpoints = (request.getfixturevalue("server_url"),) if kind == "server" else ()
        # One at a time: this server has --enable-lora, and on a CPU vLLM's issue 16668 then ends it.
        more["batch_rows"] = 1
        options = options_of(smol, engine=kind, endpoints=endpoints, max_context=MAX_CONTEXT, **more)
        with open_scorer(options) as scorer:
            yield scorer

    return opened


@pytest.fixture(scope="module")
def sequences(smol):
    """Text, and long arbitrary ids with a beginning in common: a prefix that a cache would not compute again."""
    from strop.core.models.load import load_tokenizer

    text = load_tokenizer(resolve_model(str(smol))).encode_prompt("3+4=7\n12+5=17\nThe capital of France is Paris.")
    rng = random.Random(0)
    shared = [rng.randrange(49152) for _ in range(300)]
    longs = [shared + [rng.randrange(49152) for _ in range(length)] for length in (5, 60, 180)]
    return [
        TokenSequence(text, [(1, 4), (9, len(text))]),
        *(TokenSequence(ids, [(200, 202), (299, len(ids))]) for ids in longs),
        TokenSequence(shared, []),
        # What stands behind the last span is not needed.
        TokenSequence(longs[0] * 3, [(1, 40)]),
    ]


def plain_logprobs(model, sequence):
    """The whole sequence through the model, log_softmax in float64."""
    import torch

    if not sequence.positions:
        return []
    with torch.inference_mode():
        table = model(torch.tensor([sequence.token_ids[: max(sequence.positions) + 1]])).logits[0].double()
    table = table.log_softmax(-1)
    return [float(table[p - 1, sequence.token_ids[p]]) for p in sequence.positions]


def gap(scores, expected):
    assert [len(values) for values in scores] == [len(values) for values in expected]
    pairs = [pair for ours, plain in zip(scores, expected, strict=True) for pair in zip(ours, plain, strict=True)]
    return max(abs(a - b) for a, b in pairs)


@pytest.fixture(scope="module")
def expected(smol, sequences):
    model = load_model(resolve_model(str(smol)), device="cpu", dtype="float32")
    return [plain_logprobs(model, sequence) for sequence in sequences]


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_the_plain_model(kind, open_kind_of_scorer, sequences, expected, record_property):
    with open_kind_of_scorer(kind) as scorer:
        scores = scorer.score(sequences)
        # Asked again, when prefixes might lie in a cache, and one at a time.
        again = [scorer.score([sequence])[0] for sequence in sequences[:3]]
        assert scorer.score([]) == []
        assert scorer.context_length == MAX_CONTEXT - (kind != "transformers")
        assert scorer.vocab_size == 49152
        assert scorer.arithmetic.split()[0] == kind
    found = gap(scores, expected)
    record_property("scorer_gap_max", f"{found:.3g} engine={kind} n={sum(map(len, expected))}")
    assert found < BOUND
    assert gap(again, expected[:3]) < BOUND
    assert max(map(max, filter(None, scores))) <= 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_what_scores(kind, open_kind_of_scorer, lora, smol, sequences, expected):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32), lora).eval()
    with open_kind_of_scorer(kind, adapter=str(lora)) as scorer:
        assert str(lora) in scorer.info.adapter
        scores = scorer.score(sequences[:2])
    assert gap(scores, [plain_logprobs(tuned, sequence) for sequence in sequences[:2]]) < BOUND
    assert gap(scores, expected[:2]) > 100 * BOUND


def test_nothing_is_loaded_before_something_is_to_be_scored(tiny_model, monkeypatch):
    loads = []
    monkeypatch.setattr("strop.core.models.load.load_model", lambda *a, **k: loads.append(1) or load_model(*a, **k))
    with open_scorer(options_of(tiny_model)) as scorer:
        assert not loads
        with pytest.raises(BadSequence):
            scorer.score([TokenSequence([1, 60_000], [(1, 2)])])
        assert not loads
        first = scorer.score([TokenSequence([1, 2, 3], [(1, 3)])])
        assert scorer.score([TokenSequence([1, 2, 3], [(1, 3)])]) == first
    assert loads == [1]


BAD = [
    (TokenSequence([1, 2, 50_000, 4], [(1, 4)]), "token id 50000 at position 2 lies outside the vocabulary of 49152"),
    (TokenSequence([-1, 2], [(1, 2)]), "token id -1 at position 0"),
    (TokenSequence([7] * 513, [(1, 513)]), "513 tokens are more than the 512 that the context holds"),
    (TokenSequence([7, 8], [(0, 2)]), "the first token has nothing before it"),
    (TokenSequence([7, 8], [(1, 3)]), r"spans \[\(1, 3\)\] of 2 tokens"),
]


@pytest.mark.parametrize(("sequence", "told"), BAD)
def test_what_cannot_be_scored_is_refused_and_named(tiny_model, sequence, told):
    with open_scorer(options_of(tiny_model)) as scorer:
        with pytest.raises(DataError, match=f"^sequence 1: .*{told}") as caught:
            scorer.score([TokenSequence([1, 2], [(1, 2)]), sequence])
        assert (caught.value.index, caught.value.exit_status) == (1, 65)
        assert caught.value.reason == find_sequence_fault(sequence, vocab_size=49152, context_length=512)


def test_tokens_behind_what_is_scored_need_no_room():
    fits = TokenSequence([7] * 600 + [60_000], [(1, 5), (500, 512)])
    assert find_sequence_fault(fits, vocab_size=49152, context_length=512) is None
    assert find_sequence_fault(TokenSequence([60_000], []), vocab_size=10, context_length=1) is None


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), -9999.0, 0.5])
def test_a_score_that_is_no_log_probability_never_goes_on(value):
    class Broken:
        context_length = 64

        def prompt_logprobs(self, prompts):
            return [[-1.0] * (len(ids) - 1) for ids in prompts[:-1]] + [[-1.0, value, -1.0]]

        def close(self):
            pass

    scorer = PromptScorer(Broken(), ModelInfo("m", "r"), arithmetic="broken", vocab_size=10)
    given = [TokenSequence([1, 2, 3], [(1, 3)]), TokenSequence([1], []), TokenSequence([1, 2, 3, 4], [(1, 2), (3, 4)])]
    assert scorer.score(given) == [[-1.0, -1.0], [], [-1.0, -1.0]]
    with pytest.raises(BadSequence, match="sequence 1: the log-probability of the token at position 2 is"):
        scorer.score([given[0], TokenSequence([1, 2, 3, 4], [(1, 4)])])


def test_a_model_that_computes_no_numbers(tiny_model):
    model = load_model(resolve_model(str(tiny_model)), device="cpu", dtype="float32")
    with ModelScorer(model, ModelInfo("m", "r"), context_length=512) as scorer:
        sequence = TokenSequence([1, 2, 3, 4], [(2, 4)])
        scorer.score([sequence])
        model.model.norm.weight.data.fill_(float("nan"))
        with pytest.raises(BadSequence, match="sequence 0: the log-probability of the token at position 2 is nan"):
            scorer.score([sequence])


def test_the_policy_in_memory_with_its_adapter_on_and_off(tiny_model):
    import torch
    from peft import LoraConfig, get_peft_model

    base = load_model(resolve_model(str(tiny_model)), device="cpu", dtype="float32")
    sequence = TokenSequence([5, 9, 17, 3, 88, 41], [(1, 6)])
    plain = plain_logprobs(base, sequence)
    policy = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")).eval()
    info = ModelInfo("m", "r", "a@1")
    on = ModelScorer(policy, info, context_length=512)
    off = ModelScorer(policy, info, context_length=512, without_adapter=True)
    assert (on.info.adapter, off.info.adapter) == ("a@1", None)
    assert gap(on.score([sequence]), [plain]) < 1e-4
    torch.manual_seed(0)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    # An update between two calls is seen by the policy's scorer, and not by its base's.
    moved = plain_logprobs(policy, sequence)
    assert gap([moved], [plain]) > 0.1
    assert gap(on.score([sequence]), [moved]) < 1e-4
    assert gap(off.score([sequence]), [plain]) < 1e-4
    assert gap(on.score([sequence]), [moved]) < 1e-4
    with pytest.raises(ValueError, match="none to switch off"):
        ModelScorer(policy.get_base_model(), info, context_length=512, without_adapter=True)


def test_experts_are_those_of_the_checkpoint_configured_so(tiny_moe):
    """K experts a token by switch, against the same weights under a configuration that says K."""
    from transformers import AutoModelForCausalLM

    rng = random.Random(1)
    given = [TokenSequence([rng.randrange(49152) for _ in range(40)], [(1, 40)]) for _ in range(3)]
    found = {}
    with open_scorer(options_of(tiny_moe)) as teacher:
        found[None] = teacher.score(given)
        for experts in (1, 2, 5):
            with open_scorer(options_of(tiny_moe), experts=experts, beside=teacher) as scorer:
                assert (scorer.experts, teacher.experts) == (experts, None)
                found[experts] = scorer.score(given)
                assert scorer.weights is teacher.weights
            configured = AutoModelForCausalLM.from_pretrained(tiny_moe, num_experts_per_tok=experts).eval()
            assert gap(found[experts], [plain_logprobs(configured, sequence) for sequence in given]) < 1e-4
        assert teacher.score(given) == found[None]
    assert found[None] == found[2]
    assert gap(found[1], found[2]) > 0.1


def test_scorers_of_one_checkpoint_load_it_once(tiny_moe, tiny_model, monkeypatch):
    loads = []
    monkeypatch.setattr("strop.core.models.load.load_model", lambda *a, **k: loads.append(1) or load_model(*a, **k))
    sequence = TokenSequence([1, 2, 3], [(1, 3)])
    weak = open_scorer(options_of(tiny_moe), experts=1)
    strong = open_scorer(options_of(tiny_moe), beside=weak)
    assert weak.score([sequence]) != strong.score([sequence])
    assert loads == [1]
    # The one that goes first leaves the weights to the other.
    weak.close()
    strong.score([sequence])
    assert loads == [1]
    strong.close()
    # Another checkpoint, or another precision, is another model.
    with open_scorer(options_of(tiny_model), beside=strong) as other:
        other.score([sequence])
    with open_scorer(options_of(tiny_moe, dtype="bfloat16"), beside=strong) as narrow:
        narrow.score([sequence])
    assert loads == [1, 1, 1]


@pytest.mark.parametrize(
    ("kind", "experts", "told"),
    [
        ("transformers", 9, "9 experts a token: .* has 8"),
        ("transformers", 0, "0 experts a token: .* has 8"),
        ("vllm", 1, "the engine vllm cannot choose that"),
    ],
)
def test_experts_that_cannot_be_had(tiny_moe, kind, experts, told):
    with pytest.raises(UsageError, match=told):
        open_scorer(options_of(tiny_moe, engine=kind), experts=experts)


def test_a_dense_model_has_no_experts(tiny_model):
    with pytest.raises(UsageError, match="is not a mixture of experts"):
        open_scorer(options_of(tiny_model), experts=1)
    with pytest.raises(UsageError, match="the engine server cannot choose that"):
        open_scorer(options_of(tiny_model, engine="auto", endpoints=("localhost:1",)), experts=1)


def test_a_script_scores_nothing(tiny_model, tmp_path):
    with pytest.raises(UsageError, match="a script says tokens, and scores none"):
        open_scorer(options_of(tiny_model, engine=f"script:{tmp_path / 'said.txt'}"))


def test_a_run_that_asks_vllm_nothing_does_not_start_it(tiny_model, monkeypatch):
    started = []
    monkeypatch.setattr(scorers, "open_vllm", lambda *a, **k: started.append(1))
    with open_scorer(options_of(tiny_model, engine="vllm", max_context=64)) as scorer:
        assert scorer.score([TokenSequence([1, 2, 3], [])]) == [[]]
        with pytest.raises(BadSequence, match="64 tokens are more than the 63"):
            scorer.score([TokenSequence([1] * 64, [(1, 64)])])
    assert not started


@pytest.mark.parametrize("name", ["vllm", "server"])
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_the_output_matrix_that_vllm_would_leave_out(tiny_model, tmp_path, name):
    from peft import LoraConfig, get_peft_model

    base = load_model(resolve_model(str(tiny_model)), device="cpu", dtype="float32")
    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    get_peft_model(base, config).save_pretrained(tmp_path, save_embedding_layers=False)
    endpoints = ("localhost:1",) if name == "server" else ()
    with pytest.raises(UsageError, match=f"vLLM leaves out .* so the engine {name} cannot"):
        open_scorer(options_of(tiny_model, engine=name, adapter=str(tmp_path), endpoints=endpoints))
