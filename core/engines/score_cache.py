"""Scores that are known already: a file of log-probabilities by content, so that a resumed run scores nothing twice.

The file is an SQLite database, whose write-ahead log outlives a kill: what `put` has returned from is there at the next
opening, and what it was in the middle of is not. Its two companions (FILE-wal, and a lock held by the operating system)
are gone after `close`; a log that a kill left is taken in by the next opening.

A key is a hash of the weights (revision, adapter), the experts a token is given, what computes (a server's answer to a
probe, too, since its weights cannot be seen), the tokens and the scored positions. Another model is another key.
"""

from __future__ import annotations

import json
import math
import sqlite3
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from strop.core.engines.scorers import BadSequence, Scorer, check_sequences, needed_tokens
from strop.core.errors import DataError, OutputFailed

if TYPE_CHECKING:
    from strop.core.models.score import TokenSequence

# Says that the database is one of ours: "strs" in ASCII.
APPLICATION_ID = 0x73747273
# Raised when keys are made of something else, so that no old score is found under a new meaning.
KEY_VERSION = 1
# Scores of about so many tokens are kept at a time: what a kill can cost.
CHUNK_TOKENS = 1 << 16


class ScoreCache:
    """The file at `path`, made where there is none; one process at a time, and any number of scorers of any models.

    Memory: SQLite's pages, whatever the size of the file. Raises DataError for a file that is something else,
    OutputFailed where it cannot be written or another run is using it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: sqlite3.Connection | None = None
        with self._errors():
            # The lock of another run is not waited for, and what is written is committed by `put` alone.
            self._file = sqlite3.connect(path, timeout=0, isolation_level=None)
        try:
            self._open()
        except BaseException:
            self._file.close()
            raise

    def _open(self) -> None:
        with self._errors():
            # Before the first read, so that the lock is taken then and kept, and no index is shared in a file.
            self._run("PRAGMA locking_mode = EXCLUSIVE")
            known = self._run("PRAGMA application_id").fetchone()[0]
            if known != APPLICATION_ID and self._run("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise DataError(f"{self.path}: a database, but none of scores")
            self._run("PRAGMA journal_mode = WAL")
            # A loss of power may cost the last scores; a kill costs none of them.
            self._run("PRAGMA synchronous = NORMAL")
            self._run("BEGIN IMMEDIATE")
            self._run(f"PRAGMA application_id = {APPLICATION_ID}")
            self._run("CREATE TABLE IF NOT EXISTS scores (key BLOB PRIMARY KEY, nats BLOB NOT NULL) WITHOUT ROWID")
            self._run("COMMIT")

    def get(self, key: bytes) -> list[float] | None:
        """The log-probabilities (nats) under `key`, bit for bit as they were put; None where there are none.

        Raises DataError where the file holds something that is no row of numbers.
        """
        with self._errors():
            found = self._run("SELECT nats FROM scores WHERE key = ?", key).fetchone()
        if found is None:
            return None
        data = found[0]
        values = list(struct.unpack(f"<{len(data) // 8}d", data[: len(data) // 8 * 8]))
        if len(data) % 8 or not all(map(math.isfinite, values)):
            raise DataError(f"{self.path}: damaged (a score is no number); move it away")
        return values

    def put(self, rows: Iterable[tuple[bytes, list[float]]]) -> None:
        """Keeps all the rows or, where it is killed meanwhile, none. Raises OutputFailed."""
        with self._errors():
            self._run("BEGIN IMMEDIATE")
            try:
                for key, values in rows:
                    data = struct.pack(f"<{len(values)}d", *values)
                    self._run("INSERT OR IGNORE INTO scores VALUES (?, ?)", key, data)
            except BaseException:
                self._run("ROLLBACK")
                raise
            self._run("COMMIT")

    def __len__(self) -> int:
        """How many sequences have scores."""
        with self._errors():
            return int(self._run("SELECT count(*) FROM scores").fetchone()[0])

    def close(self) -> None:
        """Puts everything into the one file and lets others use it."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()

    def _run(self, statement: str, *values: bytes) -> sqlite3.Cursor:
        assert self._file is not None
        return self._file.execute(statement, values)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """SQLite's errors as ours."""
        try:
            yield
        except sqlite3.Error as error:
            code = (getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise OutputFailed(f"{self.path}: another run is using it") from None
            if code == sqlite3.SQLITE_NOTADB:
                raise DataError(f"{self.path}: not a file of scores") from None
            if code == sqlite3.SQLITE_CORRUPT:
                raise DataError(f"{self.path}: damaged ({error}); move it away") from None
            raise OutputFailed(f"{self.path}: {error}") from None


def score_key(scorer: Scorer, sequence: TokenSequence) -> bytes:
    """16 bytes for the scores of `sequence` under the scorer's model; the model's name is no part of them."""
    adapter = scorer.info.adapter
    # "NAME@HASH" of an adapter that is here, whatever it is called; a server's is known by its name.
    known = None if adapter is None else adapter.rpartition("@")[2]
    model = [KEY_VERSION, scorer.info.revision, known, scorer.experts, scorer.arithmetic]
    digest = blake2b(json.dumps(model).encode(), digest_size=16)
    for numbers in (needed_tokens(sequence), sequence.positions):
        digest.update(struct.pack("<q", len(numbers)))
        digest.update(array("q", numbers).tobytes())
    return digest.digest()


class CachedScorer:
    """A scorer that asks `inner` only for what `cache` does not hold (see Scorer for the methods).

    `inner` must stay what its `info` says: a model in training is no such one. What is asked goes in parts of about
    `chunk_tokens` tokens, each kept before the next is asked. `num_hits` and `num_misses` count sequences; one that
    comes twice in a call is asked once, and the second is a hit. Closing it closes `inner`, and not the cache.
    """

    def __init__(self, inner: Scorer, cache: ScoreCache, *, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self.info = inner.info
        self.experts = inner.experts
        self.arithmetic = inner.arithmetic
        self.vocab_size = inner.vocab_size
        self.inner = inner
        self.num_hits = 0
        self.num_misses = 0
        self._cache = cache
        self._chunk_tokens = chunk_tokens

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence."""
        return self.inner.context_length

    def score(self, sequences: Sequence[TokenSequence]) -> list[list[float]]:
        """See Scorer. Raises DataError and OutputFailed for the cache's file, too."""
        check_sequences(self, sequences)
        keys = [score_key(self, sequence) if sequence.positions else b"" for sequence in sequences]
        known: dict[bytes, list[float]] = {b"": []}
        missing: dict[bytes, int] = {}
        for index, key in enumerate(keys):
            if key not in known and key not in missing:
                values = self._cache.get(key)
                if values is None:
                    missing[key] = index
                elif len(values) != len(sequences[index].positions):
                    raise DataError(f"{self._cache.path}: damaged (a row has another length); move it away")
                else:
                    known[key] = values
        for chunk in self._chunks(sequences, list(missing.values())):
            try:
                scores = self.inner.score([sequences[index] for index in chunk])
            except BadSequence as fault:
                raise BadSequence(chunk[fault.index], fault.reason) from None
            rows = [(keys[index], values) for index, values in zip(chunk, scores, strict=True)]
            self._cache.put(rows)
            known |= rows
        self.num_misses += len(missing)
        self.num_hits += sum(key != b"" for key in keys) - len(missing)
        return [list(known[key]) for key in keys]

    def _chunks(self, sequences: Sequence[TokenSequence], indices: list[int]) -> Iterator[list[int]]:
        chunk: list[int] = []
        num_tokens = 0
        for index in indices:
            length = len(needed_tokens(sequences[index]))
            if chunk and num_tokens + length > self._chunk_tokens:
                yield chunk
                chunk, num_tokens = [], 0
            chunk.append(index)
            num_tokens += length
        if chunk:
            yield chunk

    def close(self) -> None:
        """Closes the scorer that is asked."""
        self.inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()
