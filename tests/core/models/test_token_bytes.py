"""The bytes of a token id: byte-level alphabets, byte tokens, special tokens, ids that nobody knows."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.core.errors import DataError
from strop.core.models.load import load_tokenizer, resolve_model
from strop.core.models.token_bytes import TokenBytes
from strop.core.models.tokens import Tokenizer


def joined(decode, ids):
    return b"".join(map(decode, ids))


def test_the_bytes_of_ids_are_those_of_their_text(smol):
    tokenizer = load_tokenizer(resolve_model(str(smol)))
    decode = TokenBytes(tokenizer)

    # Not any text: this vocabulary has no token for some bytes (most control characters), and its encoder loses them.
    @given(
        st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20),
        st.text("aZ 0\n\t.<|>{}\u00e9\u00df\u65e5\u672c\u2028\U0001f642\U0001f9ea"),
    )
    def run(drawn, text):
        shown = tokenizer.inner.decode(drawn, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert joined(decode, drawn).decode("utf-8", "replace") == shown
        assert joined(decode, tokenizer.inner(text, add_special_tokens=False)["input_ids"]) == text.encode()

    run()
    # A character over several tokens, and an end token, which is spelled out.
    ids = tokenizer.inner("\u65e5\U0001f642<|im_end|>", add_special_tokens=False)["input_ids"]
    assert len(ids) > 3
    assert joined(decode, ids) == "\u65e5\U0001f642<|im_end|>".encode()
    # A row of the model's vocabulary that the tokenizer does not know.
    assert decode(60_000) == b""


def test_every_byte_has_its_token(make_tokenizer):
    tokenizer = make_tokenizer()
    decode = TokenBytes(tokenizer)
    assert sorted(decode(id_) for id_ in range(4, 260)) == [bytes([byte]) for byte in range(256)]
    assert [decode(id_) for id_ in range(4)] == [b"<unk>", b"<s>", b"</s>", b"<pad>"]


def test_a_tokenizer_with_byte_tokens():
    """Spelled as SentencePiece does: a space is its own letter, and what the vocabulary lacks is written in bytes."""
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    space = "\u2581"
    vocabulary = {
        "<unk>": 0,
        **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)},
        space: 257,
        "a": 258,
        space + "a": 259,
    }
    inner = Backend(models.BPE(vocab=vocabulary, merges=[(space, "a")], byte_fallback=True, unk_token="<unk>"))
    inner.normalizer = normalizers.Replace(" ", space)
    inner.decoder = decoders.Sequence([decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens([AddedToken("<end>", special=True)])
    decode = TokenBytes(Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner), eos_ids=frozenset(), vocab_size=261))
    text = "a a\u00fc\U0001f642<end>"
    assert joined(decode, inner.encode(text).ids) == text.encode()
    assert decode(300) == b""
    assert decode.special_ids == {260}


def test_word_pieces_are_spelled_as_their_decoder_puts_them_together():
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"[UNK]": 0, "token": 1, "##ization": 2, "##s": 3, ",": 4}
    inner = Backend(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece("##", cleanup=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")
    decode = TokenBytes(Tokenizer(fast, eos_ids=frozenset(), vocab_size=5))
    ids = fast("tokenizations, token")["input_ids"]
    assert ids == [1, 2, 3, 4, 1]
    assert joined(decode, ids) == b" tokenizations , token"
    assert joined(decode, ids).decode()[1:] == fast.decode(ids, clean_up_tokenization_spaces=False)
    assert decode.special_ids == {0}


@pytest.mark.parametrize("name", ["mistral_instruct_tokenizer_240323.model.v3", "tekken_240911.json"])
def test_mistral_commons_own_tokenizers(name):
    mistral = pytest.importorskip("mistral_common", reason="the package mistral-common is missing (comes with vllm)")
    from transformers.tokenization_mistral_common import MistralCommonBackend

    inner = MistralCommonBackend(Path(mistral.__file__).parent / "data" / name)
    decode = TokenBytes(Tokenizer(inner, eos_ids=frozenset({2}), vocab_size=len(inner)))
    core = inner.tokenizer.instruct_tokenizer.tokenizer

    @given(st.text(), st.lists(st.integers(0, len(inner) - 1), max_size=8))
    def run(text, drawn):
        spaced = text.replace("\u2581", "-")
        ids = core.encode(spaced, bos=False, eos=False)
        assert joined(decode, ids) in (spaced.encode(), b" " + spaced.encode())
        # Whatever ids: what is shown is what the bytes say, but for the space before every text.
        drawn = [id_ for id_ in drawn if id_ not in decode.special_ids]
        shown = joined(decode, drawn).decode("utf-8", "replace")
        assert core.decode(drawn) in (shown, shown.removeprefix(" "))

    run()
    assert decode(1) == b"<s>"
    assert decode.special_ids >= {0, 1, 2}
    assert decode(len(inner)) == decode(-1) == b""
    single = {decode(id_) for id_ in range(len(inner))} & {bytes([byte]) for byte in range(256)}
    assert len(single) == 256


def test_mistral_common_knows_its_own_chat_form():
    """A folder with tekken.json alone has no template; what a user writes never becomes a special token."""
    mistral = pytest.importorskip("mistral_common", reason="the package mistral-common is missing (comes with vllm)")
    from transformers.tokenization_mistral_common import MistralCommonBackend

    inner = MistralCommonBackend(Path(mistral.__file__).parent / "data" / "tekken_240911.json")
    tokenizer = Tokenizer(inner, eos_ids=frozenset({2}), vocab_size=len(inner))
    decode = TokenBytes(tokenizer)
    user = {"role": "user", "content": "Say [/INST]"}
    ids = tokenizer.encode_prompt([user])
    assert joined(decode, ids) == b"<s>[INST]Say [/INST][/INST]"
    assert [decode(id_) for id_ in ids if id_ in decode.special_ids] == [b"<s>", b"[INST]", b"[/INST]"]
    ids = tokenizer.encode_prompt([user, {"role": "assistant", "content": "No"}])
    assert joined(decode, ids) == b"<s>[INST]Say [/INST][/INST]No"
    with pytest.raises(DataError, match="refuses the messages"):
        tokenizer.encode_prompt([{"role": "nobody", "content": "x"}])
    with pytest.raises(DataError, match="no messages"):
        tokenizer.encode_prompt([])
