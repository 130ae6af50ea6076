"""A tiny random Llama as a policy, and random examples for it."""

import random

import pytest

VOCABULARY = 97


@pytest.fixture
def tiny_llama():
    """Makes a random Llama (float64 by default), the same for the same seed."""

    def make(dtype="float64", seed=0, **more):
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        config = LlamaConfig(**{
            "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
            "tie_word_embeddings": True, "initializer_range": 0.2, **more,
        })  # fmt: skip
        return LlamaForCausalLM(config).to(getattr(torch, dtype)).eval().requires_grad_(False)

    return make


@pytest.fixture
def lora_policy(tiny_llama):
    """Makes a policy with an adapter whose weights are already moved off zero."""

    def make(dtype="float64", rank=4, **more):
        import torch

        from strop.core.train.policy import LoraOptions, Policy, add_lora

        model = add_lora(tiny_llama(dtype, **more), LoraOptions(rank, 2.0 * rank), seed=1)
        torch.manual_seed(5)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(getattr(torch, dtype))
            if "lora_B" in name:
                parameter.data.normal_(std=0.05)
        return Policy(model)

    return make


@pytest.fixture
def random_examples():
    """Makes examples of one or two sequences with spans of trained tokens, old log-probabilities and advantages."""

    def make(count=7, seed=0, longest=30, zero_share=0.0):
        from strop.core.train.examples import Example, TrainSequence

        chance = random.Random(seed)
        examples = []
        for number in range(count):
            sequences = []
            for _ in range(chance.choice([1, 1, 2])):
                length = chance.randint(2, longest)
                ids = [chance.randrange(VOCABULARY) for _ in range(length)]
                positions = sorted(chance.sample(range(1, length), chance.randint(1, length - 1)))
                if positions[-1] != length - 1:
                    positions.append(length - 1)
                advantage = 0.0 if chance.random() < zero_share else chance.gauss(0, 1)
                old = [-chance.uniform(3, 6) for _ in positions]
                sequences.append(TrainSequence(ids, positions, [advantage] * len(positions), old))
            examples.append(Example(f"e{number}", sequences))
        return examples

    return make
