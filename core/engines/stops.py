"""Stop strings, found while tokens arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strop.core.models.tokens import Tokenizer

# Bytes of a character may be spread over up to four tokens; decoding starts this many tokens before the news.
OVERLAP_TOKENS = 4
UNFINISHED = "\ufffd"


class StopFinder:
    """Says when the text of the tokens so far holds one of the stop strings.

    Only the end of the text is decoded again, from a few tokens before the point up to which it is settled, so the work
    for each token does not grow with the text. A stop string may lie across tokens, or end inside one.
    """

    def __init__(self, tokenizer: Tokenizer, stops: list[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._ids: list[int] = []
        self._settled = 0
        self._tail = ""

    def found(self, token: int) -> bool:
        """Takes the next token; True once a stop string is there."""
        if not self._stops:
            return False
        self._ids.append(token)
        start = max(0, self._settled - OVERLAP_TOKENS)
        text = self._tokenizer.decode(self._ids[start:])
        before = self._tokenizer.decode(self._ids[start : self._settled]).rstrip(UNFINISHED)
        if text.endswith(UNFINISHED) and len(self._ids) - self._settled < OVERLAP_TOKENS:
            # The rest of a character comes with the next tokens; what stands before it may hold a stop string already.
            return self._has_stop(self._tail + text[len(before) :].rstrip(UNFINISHED))
        self._settled = len(self._ids)
        seen = self._tail + text[len(before) :]
        self._tail = seen.rstrip(UNFINISHED)[-(self._longest - 1) :] if self._longest > 1 else ""
        return self._has_stop(seen)

    def _has_stop(self, text: str) -> bool:
        return any(stop in text for stop in self._stops)
