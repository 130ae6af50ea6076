"""Families of models, small and random: greedy text is transformers' own, and no sample depends on its neighbours."""

import random

import pytest

from strop.core.engines.blocks import BlockScheduler
from strop.core.engines.open import EngineOptions, open_engine
from strop.core.engines.protocol import Request
from strop.core.engines.schedule import RowScheduler
from strop.core.errors import Unavailable
from strop.core.records import Sampling

SHAPE = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {
    "vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MAMBA = {
    "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2}
ROWS = {
    "llama": ("LlamaConfig", SHAPE),
    "llama with biases": ("LlamaConfig", SHAPE | {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2Config", SHAPE),
    "qwen3": ("Qwen3Config", SHAPE),
    "a sliding window": ("MistralConfig", SHAPE | {"sliding_window": 7}),
    "gemma3": ("Gemma3TextConfig", SHAPE | {"sliding_window": 9}),
    "scaled logits": ("GraniteConfig", SHAPE | {"logits_scaling": 3.0}),
    "gpt2": ("GPT2Config", GPT2),
}
BLOCKS = {
    "capped attention": ("Gemma2Config", SHAPE | {"attn_logit_softcapping": 5.0, "sliding_window": 9}),
    "experts": ("MixtralConfig", SHAPE | EXPERTS | {"num_local_experts": 4}),
}
# They keep their history in caches of their own; without it each token would be answered by itself.
OTHERS = {"state space": ("MambaConfig", MAMBA)}
SAMPLING = Sampling(max_tokens=12, temperature=1.3)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_model(tiny_model, tmp_path):
    """A folder with a random model of the named configuration, beside some tokenizer."""

    def make(config_name, values):
        import torch
        import transformers

        torch.manual_seed(3)
        config = getattr(transformers, config_name)(**values)
        transformers.AutoModelForCausalLM.from_config(config).eval().save_pretrained(tmp_path)
        for file in tiny_model.glob("tokenizer*"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
        return tmp_path

    return make


def run(engine, requests):
    for request in requests:
        engine.submit(request)
    done = {}
    while engine.pending:
        done |= {one.key: (one.token_ids, one.logprobs, one.stop, one.error) for one in engine.collect()}
    return done


def opened(folder, **options):
    fixed = {"engine": "transformers", "device": "cpu", "dtype": "float32"}
    return open_engine(EngineOptions(model=str(folder), **fixed, **options))


def prompts():
    rng = random.Random(8)
    return [[rng.randrange(3, 300) for _ in range(length)] for length in (1, 5, 20, 63, 64, 65, 150)]


@pytest.mark.parametrize("name", [*ROWS, *BLOCKS])
def test_greedy_is_transformers_own_and_samples_are_their_own(make_model, name):
    import torch
    from transformers import AutoModelForCausalLM

    folder = make_model(*(ROWS | BLOCKS)[name])
    greedy = [Request(p, ids, Sampling(temperature=0.0, max_tokens=15), 0) for p, ids in enumerate(prompts())]
    drawn = [
        Request((p, row), ids, SAMPLING, 10 * p + row, row) for p, ids in enumerate(prompts()) for row in range(3)
    ]
    with opened(folder) as engine:
        done = run(engine, greedy)
        assert type(engine._scheduler) is (RowScheduler if name in ROWS else BlockScheduler)
        reference = run(engine, drawn)
        assert not any(fate[3] for fate in reference.values())
        for request in (drawn[4], drawn[11], drawn[20]):
            assert run(engine, [request]) == {request.key: reference[request.key]}
    with opened(folder, batch_rows=2) as engine:
        assert run(engine, random.Random(1).sample(drawn, len(drawn))) == reference
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for p, ids in enumerate(prompts()):
        whole = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
            max_new_tokens=15,
        )  # fmt: skip
        assert done[p][0] == whole[0, len(ids) :].tolist()


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_this_engine_cannot_run_is_refused(make_model, name):
    folder = make_model(*OTHERS[name])
    with opened(folder) as engine, pytest.raises(Unavailable, match="mamba"):
        run(engine, [Request(0, [5, 6, 7], SAMPLING, 0)])
