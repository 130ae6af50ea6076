"""Small tokenizers with one trait each, and a GGUF file of a model so small that converting it takes a second."""

from __future__ import annotations

import json

import pytest

CHAT = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% if not loop.last or "
    "add_generation_prompt %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def make_tokenizer(tmp_path):
    """A byte-level tokenizer without merges; `template` is what it puts around a text, e.g. "<s> $A </s>"."""

    def make(template="$A", chat=None, config=None, generation=None, **special):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        from strop.core.models.tokens import Tokenizer as Ours

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        names = ["<unk>", "<s>", "</s>", "<pad>"]
        vocabulary = {token: i for i, token in enumerate(names + alphabet)}
        inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        inner.add_special_tokens(names)
        inner.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(name, vocabulary[name]) for name in names]
        )
        special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | special
        fast = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
        fast.chat_template = chat
        folder = tmp_path / "tokenizer"
        fast.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | (config or {})))
        if generation:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        return Ours.from_folder(folder)

    return make


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory):
    """A GGUF file of a random Llama with one layer and a byte-level vocabulary, with a chat template."""
    import gguf
    import numpy as np
    from tokenizers import pre_tokenizers

    file = tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf"
    tokens = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt", "he"]
    width, inner, heads, kv_heads = 64, 96, 4, 2
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(width // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ t", "h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT)
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), width), "output": (len(tokens), width)}
    shapes |= {"blk.0.attn_q": (width, width), "blk.0.attn_output": (width, width)}
    shapes |= {f"blk.0.attn_{name}": (width // heads * kv_heads, width) for name in ("k", "v")}
    shapes |= {f"blk.0.ffn_{name}": (inner, width) for name in ("gate", "up")} | {"blk.0.ffn_down": (width, inner)}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32) * 0.2
        quantised = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
