"""A response on both sides: real tokenizers of five families against one another, and the traps of each."""

import functools
import unicodedata

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.core.distill.alignment import align
from strop.core.distill.retokenize import Retokenizer, encode_text, end_of_turn, readable, same_tokens
from strop.core.errors import DataError, Unavailable
from strop.core.models.token_bytes import TokenBytes

STUDENTS = ["byte_level", "sentencepiece", "sentencepiece_itself", "tekken", "composing", "metaspace"]
TEACHERS = STUDENTS
PARTS = [
    "Hello", " world", "  two", "\n", "\r\n", "\t", " ", "1234", "def f(x):\n    ", "\u00e9t\u00e9", "e\u0301",
    "o\u0308\u0301", "\u65e5\u672c", "\U0001f642", "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\U0001f44d\U0001f3fd", "</s>", "<|im_end|>", "[INST]", "<s>", "<|turn|>", "<unk>", "\ufffd", "\u2581", "<0x41>",
    "\u0915\u094d\u0937", "\ufeff", "##ing", "\x01",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)


@functools.cache
def letters(tokenizer):
    """The bytes that have a token of their own."""
    return {piece[0] for piece in map(TokenBytes(tokenizer), range(tokenizer.vocab_size)) if len(piece) == 1}


def keeps(name, text, tokenizer):
    """Whether this tokenizer, as a teacher, can write the text."""
    if name == "byte_level":
        return letters(tokenizer).issuperset(text.encode())
    if name == "composing":
        return unicodedata.normalize("NFC", text) == text
    if name == "sentencepiece":
        # A few of its special tokens are also words of its vocabulary, which no option keeps it from reading.
        return "\u2581" not in text and not {*encode_text(tokenizer, text)} & TokenBytes(tokenizer).special_ids
    return name == "tekken" or "\u2581" not in text


def offsets(pieces):
    return {0, *np.cumsum([len(piece) for piece in pieces]).tolist()}


@pytest.fixture(scope="module")
def tokenizers(request):
    return {name: request.getfixturevalue(name) for name in STUDENTS}


@pytest.mark.parametrize("teacher", TEACHERS)
@pytest.mark.parametrize("student", STUDENTS)
def test_any_student_with_any_teacher(tokenizers, student, teacher):
    """Partition, equal bytes, exactly the common boundaries, everything masked or in a unit; whatever was sampled."""
    source = tokenizers[student]
    reader = Retokenizer(source, tokenizers[teacher])
    bytes_of = TokenBytes(source)
    (end,) = source.eos_ids

    @settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
    @given(TEXTS, st.integers(0, 40), st.lists(st.integers(0, source.vocab_size - 1), max_size=3), st.booleans())
    def run(text, cut, sampled, stops):
        # A response that was cut anywhere, also inside a character, or went on with any tokens at all.
        ids = [*encode_text(source, text)[:cut], *sampled, *([end] if stops else [])]
        both = reader(ids)
        assert len(both.student_T) == len(ids)
        assert len(both.teacher_S) == len(both.teacher_ids)
        is_ended = ids[-1:] == [end]
        assert both.ends == is_ended
        assert both.text == readable(b"".join(both.student_T))
        found = align(both.student_T, both.teacher_S, ends=both.ends)
        for unit in (found.unit_T, found.unit_S):
            assert sorted(set(unit[unit >= 0].tolist())) == list(range(found.num_units))
            assert (np.diff(unit[unit >= 0]) >= 0).all()
        for a, b, c, d in found.spans_U.tolist():
            assert b"".join(both.student_T[a:b]) == b"".join(both.teacher_S[c:d])
        assert found.mask_T.sum() + (found.unit_T < 0).sum() == len(ids)
        data = b"".join(both.student_T)
        is_text = data.decode("utf-8", "replace").encode() == data
        assert both.is_exact == (b"".join(both.teacher_S) == data)
        if is_text and keeps(teacher, both.text, tokenizers[teacher]):
            assert both.is_exact
            # All of it is aligned but tokens without bytes, and the boundaries are the common ones.
            masked = [not piece for piece in both.student_T]
            if is_ended:
                masked[-1] = False
            assert (found.unit_T < 0).tolist() == masked
            common = offsets(both.student_T) & offsets(both.teacher_S)
            assert found.num_units == len(common) - 1 + is_ended
        if is_ended:
            assert found.unit_T[-1] == found.unit_S[-1] == found.num_units - 1
        texts = [(piece, bytes_of(id_)) for id_, piece in zip(ids, both.student_T, strict=True) if piece]
        assert all(piece == own for piece, own in texts[1:])

    run()


@pytest.mark.parametrize("teacher", TEACHERS)
def test_bytes_that_are_no_text_leave_their_neighbours(tokenizers, teacher):
    """Half a character in the middle: the teacher reads U+FFFD there; words away from it are aligned as ever."""
    source = tokenizers["tekken"]
    half = [id_ for id_ in encode_text(source, "\U0001f642") if TokenBytes(source)(id_)][:1]
    assert TokenBytes(source)(half[0]) == b"\xf0"
    ids = [*encode_text(source, "one two"), *half, *encode_text(source, " three four")]
    both = Retokenizer(source, tokenizers[teacher])(ids)
    assert both.text == "one two\ufffd three four"
    found = align(both.student_T, both.teacher_S)
    kept = b"".join(piece for piece, unit in zip(both.student_T, found.unit_T, strict=True) if unit >= 0)
    assert kept.startswith(b"one")
    assert kept.endswith(b" four")
    assert found.unit_T[len(encode_text(source, "one two"))] == -1
    # At the end, where the response was cut, nothing stands for it, and nothing else is lost.
    both = Retokenizer(source, tokenizers[teacher])([*encode_text(source, "one two"), *half])
    assert both.text == "one two"
    assert (align(both.student_T, both.teacher_S).unit_T < 0).tolist() == [False] * (len(both.student_T) - 1) + [True]


def test_an_emoji_over_several_tokens_on_both_sides(tokenizers):
    source = tokenizers["byte_level"]
    both = Retokenizer(source, tokenizers["tekken"])(encode_text(source, "ok \U0001faa4!"))
    assert both.is_exact
    halves = [sum(piece[-1] >= 0x80 for piece in pieces if piece) for pieces in (both.student_T, both.teacher_S)]
    assert min(halves) > 1
    assert align(both.student_T, both.teacher_S).mask_T.all()


def test_only_what_was_composed_is_masked(tokenizers):
    source = tokenizers["byte_level"]
    text = "a cafe\u0301 and then a na\u00efve one"
    both = Retokenizer(source, tokenizers["composing"])(encode_text(source, text))
    assert not both.is_exact
    assert both.text == text
    found = align(both.student_T, both.teacher_S)
    masked = b"".join(piece for piece, unit in zip(both.student_T, found.unit_T, strict=True) if unit < 0).decode()
    assert "e\u0301" in masked
    assert masked in " cafe\u0301"


def test_special_tokens_of_the_student_are_no_text_and_those_of_the_teacher_are_not_made(tokenizers):
    source, teacher = tokenizers["byte_level"], tokenizers["composing"]
    start = source.inner.convert_tokens_to_ids("<|im_start|>")
    ids = [*encode_text(source, "a"), start, *encode_text(source, " <|turn|></s> b")]
    both = Retokenizer(source, teacher)(ids)
    assert both.text == "a <|turn|></s> b"
    assert both.is_exact
    assert not {*both.teacher_ids} & {teacher.inner.convert_tokens_to_ids(name) for name in ("<|turn|>", "</s>", "<s>")}
    found = align(both.student_T, both.teacher_S)
    assert [k for k, unit in enumerate(found.unit_T) if unit < 0] == [1]
    # The option is one call's: prompts are read as before.
    assert teacher.inner("</s>", add_special_tokens=False)["input_ids"] == list(teacher.eos_ids)


def test_a_tag_that_is_an_added_token_but_not_special_is_text(tokenizers):
    import copy

    source = tokenizers["composing"]
    inner = copy.deepcopy(source.inner)
    inner.add_tokens(["<think>"])
    thinking = type(source)(inner, eos_ids=source.eos_ids, vocab_size=len(inner), source="thinking")
    ids = encode_text(thinking, "<think>so")
    assert ids[0] == len(inner) - 1
    both = Retokenizer(thinking, tokenizers["tekken"])(ids)
    assert both.text == "<think>so"
    assert both.student_T[0] == b"<think>"
    assert align(both.student_T, both.teacher_S).mask_T.all()
    # And as a teacher.
    both = Retokenizer(tokenizers["tekken"], thinking)(encode_text(tokenizers["tekken"], "<think>so"))
    assert both.teacher_ids[0] == len(inner) - 1


@pytest.mark.parametrize("name", ["sentencepiece_itself", "metaspace"])
def test_the_space_before_every_text_belongs_to_none(tokenizers, name):
    put, other = tokenizers[name], tokenizers["byte_level"]
    for text in ("Hello", " Hello", "  Hello", "", " ", "\nHello", "\U0001f642"):
        # As a teacher: the text is the student's, with as many spaces.
        both = Retokenizer(other, put)(encode_text(other, text))
        assert both.text == text
        assert both.is_exact
        assert align(both.student_T, both.teacher_S).mask_T.all()
        # As a student: what its own decoder shows.
        ids = encode_text(put, text)
        assert Retokenizer(put, other)(ids).text == put.inner.decode(ids, skip_special_tokens=True)
    # Only the first text token loses it, also behind a special one, which no text ever gets before it.
    ids = [*put.eos_ids, *encode_text(put, "a a")]
    assert Retokenizer(put, other)(ids).text == "a a"


def test_a_teacher_that_does_not_keep_texts_is_refused(tokenizers, wordpiece):
    with pytest.raises(Unavailable, match="does not give texts back as they were"):
        Retokenizer(tokenizers["byte_level"], wordpiece)
    # As a student it is read as its decoder writes it.
    ids = encode_text(wordpiece, "Tokenization, of \u00c9t\u00e9")
    both = Retokenizer(wordpiece, tokenizers["tekken"])(ids)
    assert both.text == "tokenization , of ete"
    assert both.is_exact


def test_ids_of_another_vocabulary(tokenizers):
    reader = Retokenizer(tokenizers["composing"], tokenizers["metaspace"])
    for bad in (-1, tokenizers["composing"].vocab_size):
        with pytest.raises(DataError, match=f"token_ids: token id {bad} is outside the vocabulary of trained"):
            reader([5, bad])
    empty = reader([])
    assert (empty.student_T, empty.text, empty.teacher_ids, empty.ends) == ([], "", [], False)


def test_end_of_turn_is_that_of_the_chat(tokenizers, make_chat):
    """Gemma's way: the tokenizer's own end token ends texts, another one ends turns."""
    chatty = make_chat("{% for m in messages %}{{ m['content'] }}<|turn|>\n{% endfor %}")
    assert end_of_turn(chatty) == chatty.inner.convert_tokens_to_ids("<|turn|>")
    assert end_of_turn(make_chat("{{ raise_exception('no') }}")) == chatty.inner.eos_token_id
    assert end_of_turn(tokenizers["composing"]) == chatty.inner.eos_token_id
    assert end_of_turn(tokenizers["byte_level"]) == tokenizers["byte_level"].inner.convert_tokens_to_ids("<|im_end|>")
    assert end_of_turn(tokenizers["tekken"]) == 2
    (end,) = tokenizers["tekken"].eos_ids
    both = Retokenizer(tokenizers["tekken"], chatty)([*encode_text(tokenizers["tekken"], "a"), end])
    assert both.teacher_ids[-1] == end_of_turn(chatty)
    assert align(both.student_T, both.teacher_S, ends=both.ends).one_to_one_U.all()


@pytest.fixture
def make_chat(composing):
    import copy

    def make(template):
        inner = copy.deepcopy(composing.inner)
        inner.chat_template = template
        ends = {inner.eos_token_id, inner.convert_tokens_to_ids("<|turn|>")}
        return type(composing)(inner, eos_ids=frozenset(ends), vocab_size=len(inner), source="chatty")

    return make


def test_a_teacher_without_an_end_token_leaves_the_students_end_masked(tokenizers, composing):
    endless = type(composing)(composing.inner.__class__(tokenizer_object=composing.inner.backend_tokenizer),
                              eos_ids=frozenset(), vocab_size=composing.vocab_size, source="endless")  # fmt: skip
    (end,) = tokenizers["tekken"].eos_ids
    both = Retokenizer(tokenizers["tekken"], endless)([*encode_text(tokenizers["tekken"], "a"), end])
    assert not both.ends
    assert align(both.student_T, both.teacher_S).unit_T.tolist() == [0, -1]


def test_same_tokens(tokenizers):
    assert same_tokens(tokenizers["sentencepiece"], tokenizers["sentencepiece_itself"])
    assert not same_tokens(tokenizers["sentencepiece"], tokenizers["tekken"])


@given(st.binary(max_size=12))
def test_readable_is_text_and_changes_no_text(data):
    text = readable(data)
    text.encode()
    assert readable(text.encode()) == text
    if data.decode("utf-8", "replace").encode() == data:
        assert text.encode() == data
