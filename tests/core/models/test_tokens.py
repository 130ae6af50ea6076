"""The traps of tokenizers: start tokens, end tokens, pad tokens, templates."""

import shutil
import subprocess
import sys

import pytest

from strop.core.errors import DataError, Unavailable
from strop.core.models.load import load_tokenizer, resolve_model
from strop.core.models.tokens import PLAIN_MODELS, Tokenizer

from .conftest import CHAT

HI = [{"role": "user", "content": "hi"}]
BOS, EOS = 1, 2


def test_text_gets_the_start_token_that_the_tokenizer_puts(make_tokenizer):
    assert make_tokenizer("<s> $A").encode_prompt("ab")[0] == BOS
    assert BOS not in make_tokenizer("$A").encode_prompt("ab")
    assert make_tokenizer("<s> $A").encode_prompt("") == [BOS]


@pytest.mark.parametrize("prompt", ["<s>ab", "<s><s>ab", "ab"])
def test_the_start_token_never_stands_twice(make_tokenizer, prompt):
    ids = make_tokenizer("<s> $A").encode_prompt(prompt)
    assert ids[0] == BOS
    assert ids.count(BOS) == 1
    assert len(ids) == 3


def test_a_template_that_writes_the_start_token_gets_no_second_one(make_tokenizer):
    ids = make_tokenizer("<s> $A", chat=CHAT).encode_prompt(HI)
    assert ids.count(BOS) == 1
    assert ids[0] == BOS


def test_an_end_token_that_the_tokenizer_appends_is_left_out(make_tokenizer):
    """The answer follows; a model that reads its end token has nothing more to say."""
    tokenizer = make_tokenizer("<s> $A </s>")
    assert EOS not in tokenizer.encode_prompt("ab")
    assert tokenizer.encode_prompt("") == [BOS]
    # One that the text itself holds is the user's own.
    assert tokenizer.encode_prompt("ab</s>")[-1] == EOS


def test_messages_open_the_answer_and_an_own_last_turn_goes_on(make_tokenizer):
    tokenizer = make_tokenizer(chat=CHAT)
    text = tokenizer.inner.decode(tokenizer.encode_prompt(HI))
    assert text == "<s><|user|>hi</s><|assistant|>"
    text = tokenizer.inner.decode(tokenizer.encode_prompt([*HI, {"role": "assistant", "content": "well, I"}]))
    assert text == "<s><|user|>hi</s><|assistant|>well, I"


def test_no_chat_template_says_what_to_do(make_tokenizer):
    tokenizer = make_tokenizer(chat=None)
    with pytest.raises(DataError, match=r"no chat template.*as text") as caught:
        tokenizer.encode_prompt(HI)
    assert caught.value.field == "prompt"
    assert tokenizer.encode_prompt("hi")


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], [{"role": "critic", "content": "no"}]])
def test_messages_that_the_template_refuses(make_tokenizer, messages):
    strict = CHAT.replace("<|{{", "{% if m['role'] == 'critic' %}{{ raise_exception('who?') }}{% endif %}<|{{", 1)
    strict = strict.replace("{{ m['content'] }}", "{{ m['content'] + '' }}")
    with pytest.raises(DataError) as caught:
        make_tokenizer(chat=strict).encode_prompt(messages)
    assert caught.value.field == "prompt"


def test_no_pad_token_is_needed(make_tokenizer):
    tokenizer = make_tokenizer(chat=CHAT)
    assert tokenizer.inner.pad_token is None
    assert tokenizer.decode(tokenizer.encode_prompt("no pad")) == "no pad"


def test_end_tokens_come_from_everywhere_they_are_declared(make_tokenizer):
    tokenizer = make_tokenizer(
        config={"eos_token_id": 7, "text_config": {"eos_token_id": [8]}}, generation={"eos_token_id": [9, 2]}
    )
    assert tokenizer.eos_ids == {2, 7, 8, 9}


def test_pad_equal_to_eos_stays_an_end_token(make_tokenizer):
    assert make_tokenizer(pad_token="</s>").eos_ids == {EOS}


def test_a_model_that_declares_no_end_token(make_tokenizer):
    assert make_tokenizer(eos_token=None).eos_ids == frozenset()


def test_decoding_leaves_special_tokens_out_and_spaces_alone(make_tokenizer):
    tokenizer = make_tokenizer()
    ids = [BOS, *tokenizer.encode_prompt(" a , b .  c\n"), EOS]
    assert tokenizer.decode(ids) == " a , b .  c\n"


def test_a_folder_without_a_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(Unavailable, match="a model folder without a tokenizer"):
        Tokenizer.from_folder(tmp_path)
    assert Unavailable.exit_status == 69


def test_a_broken_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(Unavailable, match="cannot be loaded"):
        Tokenizer.from_folder(tmp_path)


def test_the_real_model(smol):
    tokenizer = load_tokenizer(resolve_model(str(smol)))
    assert tokenizer.eos_ids == {2}
    assert tokenizer.vocab_size == 49152
    ids = tokenizer.encode_prompt(HI)
    assert tokenizer.inner.decode(ids).endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    # No start token of its own: <|im_start|> begins every turn and is not doubled or dropped.
    assert ids.count(1) == 3
    assert tokenizer.encode_prompt("3+4=7\n")[0] != 1


@pytest.mark.parametrize("kind", PLAIN_MODELS)
def test_the_class_without_torch_is_the_one_that_transformers_chooses(smol, tmp_path, kind):
    from transformers import AutoConfig, AutoTokenizer

    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smol / file, tmp_path / file)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    ours = Tokenizer.from_folder(tmp_path).inner
    assert type(ours) is type(theirs)
    for text in ("Hello  world\n", "naïve 日本語 \t<|im_end|>x"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    messages = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(messages, tokenize=False) == theirs.apply_chat_template(messages, tokenize=False)


def test_a_tokenizer_needs_no_torch(smol):
    code = f"""
import sys
from pathlib import Path
from strop.core.models.tokens import Tokenizer
assert Tokenizer.from_folder(Path({str(smol)!r})).encode_prompt("Hi")
print("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
