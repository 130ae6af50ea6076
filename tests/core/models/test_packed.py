"""The probe: what can be packed is, what cannot goes one sequence at a time, and nothing is computed wrong."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from strop.core.errors import Unavailable
from strop.core.models.packed import hidden_states, output_head, packed_attention, probe

SIZES = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3,
}  # fmt: skip
SEQUENCES = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 8, 7], [5, 5, 5, 5, 1]]


def llama(**more):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **more)).double().eval()


def alone(model):
    with torch.no_grad():
        outputs = [model.model(input_ids=torch.tensor([ids]), use_cache=False) for ids in SEQUENCES]
        return torch.cat([output.last_hidden_state[0] for output in outputs])


def together(model):
    with torch.no_grad(), packed_attention(model):
        return hidden_states(model, SEQUENCES)


def test_a_plain_model_is_packed_and_its_attention_restored():
    model = llama()
    assert probe(model)
    torch.testing.assert_close(together(model), alone(model), rtol=0, atol=1e-5)
    assert model.config._attn_implementation == "sdpa"


def test_a_sliding_window_is_kept_beyond_its_length():
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=3)).double().eval()
    assert probe(model)
    wide = alone(model)
    model.config.sliding_window = None
    assert (alone(model) - wide).abs().max() > 1e-3
    model.config.sliding_window = 3
    torch.testing.assert_close(together(model), wide, rtol=0, atol=1e-5)


def test_a_model_that_does_not_hand_the_lengths_on_goes_one_at_a_time():
    model = llama()
    inner = model.model.forward
    model.model.forward = lambda packed_lengths=None, **more: inner(**more)
    assert not probe(model)
    torch.testing.assert_close(together(model), alone(model), rtol=0, atol=1e-5)


def test_layers_of_an_unknown_kind_go_one_at_a_time():
    model = llama()
    model.config.layer_types = ["full_attention", "chunked_attention"]
    assert not probe(model)
    torch.testing.assert_close(together(model), alone(model), rtol=0, atol=1e-5)


def test_logits_that_are_not_the_product_are_refused():
    model = llama()
    head = model.lm_head.forward
    model.lm_head.forward = lambda hidden: head(hidden).tanh()
    with pytest.raises(Unavailable, match="differ from the model's own"):
        probe(model)


def test_scaled_logits_are_understood():
    model = llama()
    model.config.logits_scaling = 4.0
    head = model.lm_head.forward
    model.lm_head.forward = lambda hidden: head(hidden) / 4.0
    assert probe(model)
    assert output_head(model).divisor == 4.0
