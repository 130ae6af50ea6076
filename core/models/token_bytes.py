"""Token ids to the bytes they stand for, one id at a time, so that texts can be compared at byte offsets.

A character may be spread over several tokens and a token may hold half a character: of one token alone only the bytes
are certain. The bytes of a list of ids are those of its members, joined.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strop.core.models.tokens import Tokenizer

SENTENCEPIECE_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Says which bytes a token id stands for: `TokenBytes(tokenizer)(id)`.

    Special and added tokens stand for their own spelling, so that an end token is visible (`special_ids` tells those
    that are no text); an id that the tokenizer does not know (the padding rows of a model's vocabulary) stands for no
    bytes. The space that some tokenizers leave out at the start of a text is kept: here a token always means the same.
    So WordPiece's words come with a space before them, as their decoder puts it, and their continuations without.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._inner = tokenizer.inner
        self._mistral = mistral_tokenizer(self._inner)
        added = {} if self._mistral else getattr(self._inner, "added_tokens_decoder", {})
        self._known: dict[int, bytes] = {
            int(id_): str(getattr(token, "content", token)).encode() for id_, token in added.items()
        }
        special = {id_ for id_, token in added.items() if getattr(token, "special", False)}
        named = {*self._inner.all_special_ids, self._inner.unk_token_id} - {None}
        self.special_ids: frozenset[int] = frozenset(map(int, special | named))
        decoder = _decoder(self._inner)
        self._unicode_bytes = _byte_level_alphabet() if _is_byte_level(self._inner, decoder) else None
        self._continuation: str | None = decoder.get("prefix") if decoder.get("type") == "WordPiece" else None

    def __call__(self, id_: int) -> bytes:
        """The bytes of one id."""
        found = self._known.get(id_)
        if found is None:
            found = self._known[id_] = self._read(id_)
        return found

    def _read(self, id_: int) -> bytes:
        if self._mistral:
            if not 0 <= id_ < self._mistral.n_words:
                return b""
            if hasattr(self._mistral, "id_to_byte_piece") and id_ not in self.special_ids:
                # Tekken: pieces that are shown as text have lost their halves of characters.
                return bytes(self._mistral.id_to_byte_piece(id_))
        piece = self._inner.convert_ids_to_tokens(id_)
        return b"" if piece is None else self._bytes_of(piece)

    def _bytes_of(self, piece: str) -> bytes:
        if self._continuation is not None:
            spaced = piece[len(self._continuation) :] if piece.startswith(self._continuation) else " " + piece
            return spaced.encode()
        if self._unicode_bytes is not None:
            found = [self._unicode_bytes.get(character) for character in piece]
            return bytes(byte for byte in found if byte is not None) if None not in found else piece.encode()
        byte = _BYTE_TOKEN.fullmatch(piece)
        if byte:
            return bytes.fromhex(byte[1])
        return piece.replace(SENTENCEPIECE_SPACE, " ").encode("utf-8", "surrogatepass")


def mistral_tokenizer(inner: Any) -> Any:
    """The tokenizer inside transformers' wrapper of mistral-common, whose interface is another; None for all others."""
    return getattr(getattr(getattr(inner, "tokenizer", None), "instruct_tokenizer", None), "tokenizer", None)


def _decoder(inner: Any) -> dict[str, Any]:
    """How a tokenizer of the package tokenizers puts pieces together; {} for others and where it says nothing."""
    decoder = getattr(getattr(inner, "backend_tokenizer", None), "decoder", None)
    return json.loads(decoder.__getstate__()) if decoder is not None else {}


def _is_byte_level(inner: Any, decoder: dict[str, Any]) -> bool:
    """Whether tokens are spelled in GPT-2's alphabet of one character a byte."""
    return "ByteLevel" in _types(decoder) if decoder else hasattr(inner, "byte_decoder")


def _types(decoder: dict[str, Any]) -> set[str]:
    return {decoder["type"]}.union(*map(_types, decoder.get("decoders", [])))


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: a printable Latin-1 character is its own byte, the rest follow from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
