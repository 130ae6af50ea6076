"""A student's response as a teacher reads it: ids to bytes, bytes to text, text to the teacher's ids and their bytes.

CompassOPD decodes the student's response and encodes it anew with the teacher family's tokenizer (arXiv:2609.10154,
section 3; sheet compass, 2.2 step 4). Our choices where it is silent: special tokens of the student are no text, and
text that spells a special token of the teacher's stays text (a response must not open a turn); bytes that are no UTF-8
become U+FFFD, one a stretch, as a reader of the text would see them, and are left out at the end, where the response
was cut; a space that a tokenizer puts before every text belongs to none. What then differs between the two sides (the
U+FFFD, what the teacher's tokenizer composes or cannot write) is for the alignment to mask.
"""

# ruff: noqa: N815 (axis suffixes, as in arguments and variables)

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from strop.core.errors import DataError, Unavailable
from strop.core.models.token_bytes import TokenBytes, mistral_tokenizer
from strop.core.models.tokens import Tokenizer

# Two spaces, a tab, an empty line, capitals, accents: who changes these cannot carry code, nor texts as they are.
PROBE = "Say  it:\n\tif x:\r\n\n    (\u00c9t\u00e9, \u65e5\u672c) "
_NO_TEXT = re.compile("[\udc80-\udcff]+")


@dataclass(frozen=True, slots=True)
class Retokenized:
    """One response on both sides, ready for `align(student_T, teacher_S, ends=ends)`.

    `student_T`: the bytes of each student token, b"" for those that are no text.   `text`: what the teacher reads.
    `teacher_ids`, `teacher_S`: its tokens of that text and their bytes.   `ends`: the last token of both sides is the
    end of the turn.
    """

    student_T: list[bytes]
    text: str
    teacher_ids: list[int]
    teacher_S: list[bytes]
    ends: bool

    @property
    def is_exact(self) -> bool:
        """Whether both sides spell the same bytes."""
        return b"".join(self.student_T) == b"".join(self.teacher_S)


class Retokenizer:
    """Reads a student's responses for one teacher: `Retokenizer(student, teacher)(response_ids)`.

    Raises Unavailable for a teacher whose tokenizer does not keep texts as they are (WordPiece, lower case, collapsed
    spaces): nothing of use could be aligned.
    """

    def __init__(self, student: Tokenizer, teacher: Tokenizer) -> None:
        self._student, self._teacher = student, teacher
        self._student_bytes, self._teacher_bytes = _TextBytes(student), _TextBytes(teacher)
        self._puts_space = b"".join(map(self._student_bytes.__getitem__, encode_text(student, "a"))) == b" a"
        self._teacher_end = end_of_turn(teacher)
        found = b"".join(self._teacher_pieces(encode_text(teacher, PROBE), PROBE))
        if found != PROBE.encode():
            shown = found.decode("utf-8", "replace")
            raise Unavailable(
                f"{teacher.source}: its tokenizer does not give texts back as they were ({PROBE!r} came back as "
                f"{shown!r}); a teacher needs a tokenizer that keeps every byte, such as byte-level BPE"
            )

    def __call__(self, response_ids: Sequence[int]) -> Retokenized:
        """The response on both sides. Raises DataError for an id outside the student's vocabulary."""
        student_T = list(map(self._student_bytes.__getitem__, response_ids))
        if self._puts_space:
            _drop_first_space(student_T)
        text = readable(b"".join(student_T))
        teacher_ids = encode_text(self._teacher, text)
        teacher_S = self._teacher_pieces(teacher_ids, text)
        if self._teacher_end is None or not response_ids or response_ids[-1] not in self._student.eos_ids:
            return Retokenized(student_T, text, teacher_ids, teacher_S, ends=False)
        return Retokenized(student_T, text, [*teacher_ids, self._teacher_end], [*teacher_S, b""], ends=True)

    def _teacher_pieces(self, ids: Sequence[int], text: str) -> list[bytes]:
        pieces = list(map(self._teacher_bytes.__getitem__, ids))
        # Some tokenizers put a space before every text, some before those only that start without one.
        num_spaces = len(text) - len(text.lstrip(" "))
        start = b"".join(pieces[: num_spaces + 2])
        if len(start) - len(start.lstrip(b" ")) > num_spaces:
            _drop_first_space(pieces)
        return pieces


def readable(data: bytes) -> str:
    """The bytes as text: each stretch that is no UTF-8 becomes one U+FFFD, and at the end nothing.

    >>> readable(b"caf\\xc3\\xa9 \\xff\\xfe!\\xf0\\x9f")
    'café \\ufffd!'
    """
    text = data.decode("utf-8", "surrogateescape")
    last = len(text)
    while last and "\udc80" <= text[last - 1] <= "\udcff":
        last -= 1
    return _NO_TEXT.sub("\ufffd", text[:last])


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text, with nothing before or after it; what spells a special token is encoded as text."""
    # mistral-common never reads special tokens out of text, and refuses the option.
    options: dict[str, Any] = {} if mistral_tokenizer(tokenizer.inner) else {"split_special_tokens": True}
    ids: list[int] = tokenizer.inner(text, add_special_tokens=False, **options)["input_ids"]
    return ids


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """The id that ends an assistant's turn: the last end token of a rendered chat, else the tokenizer's, if any."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        ids: list[int] = tokenizer.inner.apply_chat_template(chat, tokenize=True, return_dict=False)
    except Exception:  # noqa: BLE001 (no template, or one that raises what it likes)
        ids = []
    ends = [id_ for id_ in ids if id_ in tokenizer.eos_ids]
    last: int | None = ends[-1] if ends else tokenizer.inner.eos_token_id
    return last


def same_tokens(first: Tokenizer, second: Tokenizer) -> bool:
    """Whether two tokenizers have one vocabulary, so that both models score the same ids."""
    vocabularies = [one.inner.get_vocab() for one in (first, second)]
    return bool(vocabularies[0] == vocabularies[1])


class _TextBytes(dict[int, bytes]):
    """The bytes of each id that is text, b"" for the others; a table that is filled as ids come up."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer, self._bytes_of = tokenizer, TokenBytes(tokenizer)
        self._no_text = self._bytes_of.special_ids | tokenizer.eos_ids

    def __missing__(self, id_: int) -> bytes:
        size = self._tokenizer.vocab_size
        if not 0 <= id_ < size:
            message = f"token id {id_} is outside the vocabulary of {self._tokenizer.source} ({size} tokens)"
            raise DataError(message, field="token_ids")
        found = self[id_] = b"" if id_ in self._no_text else self._bytes_of(id_)
        return found


def _drop_first_space(pieces: list[bytes]) -> None:
    """Takes one space off the first token that has bytes."""
    for k, piece in enumerate(pieces):
        if piece:
            pieces[k] = piece.removeprefix(b" ")
            return
