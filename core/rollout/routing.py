"""The routing of an episode: what the engine said of each turn becomes one array for each chunk (T1, section 2.5).

For turn i with the ids T_i (fed, then sampled) an engine returns R_i, [|T_i| - 1, L, K]: row j holds the experts that
were used to predict token j + 1. A chunk of N tokens gets N - 1 rows:

- where token j + 1 was sampled, the row of the turn that sampled it, and no other one;
- where it is context, the row of the last turn that was fed it behind the same tokens;
- where no turn has one (a tool's last answer that was never fed), R[j] <- R[j - 1]: the gap rule, for context alone.

A sampled token without its row ends the run: to drop the rollout instead would bias the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import msgspec
from msgspec import Raw

from strop.core.errors import Unavailable
from strop.core.records import Span
from strop.core.rollout.routing_file import RoutingWriter
from strop.core.rollout.stitch import shared_prefix

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from strop.core.engines.protocol import Completion, Engine, Request
    from strop.core.records import Record, Sampling

_chunks = msgspec.json.Decoder(list[dict[str, Raw]])


@dataclass(frozen=True, slots=True)
class TurnRouting:
    """One turn as the engine saw it: ids fed and sampled, and the rows from `first_row` on (None: it gave none)."""

    fed_ids: list[int]
    sampled_ids: list[int]
    rows_TLK: NDArray[Any] | None  # noqa: N815
    first_row: int = 0

    def without_context(self) -> TurnRouting:
        """Only the rows of the sampled tokens."""
        first = len(self.fed_ids) - 1
        rows = None if self.rows_TLK is None else self.rows_TLK[first - self.first_row :].copy()
        return TurnRouting(self.fed_ids, self.sampled_ids, rows, first)


def chunk_routing(token_ids: list[int], sampled: Sequence[Span], turns: Sequence[TurnRouting]) -> NDArray[Any]:
    """The rows [N - 1, L, K] of a chunk of N tokens, from the turns of its episode, in order.

    Raises Unavailable where a sampled token has no row, or the first token has none (the gap rule has nothing to copy).
    """
    import numpy as np

    given = next((turn.rows_TLK for turn in turns if turn.rows_TLK is not None), None)
    if given is None:
        raise Unavailable("the engine returned no routing")
    num_rows = len(token_ids) - 1
    rows_TLK = np.zeros((num_rows, *given.shape[1:]), given.dtype)
    known_T = np.zeros(num_rows, bool)
    sampled_T = np.zeros(num_rows, bool)
    for span in sampled:
        sampled_T[max(span.start - 1, 0) : span.end - 1] = True
    # The chunk's own turns last: those of others saw a part of the same context, and know the rows of that part.
    for turn in sorted(turns, key=lambda turn: turn.fed_ids == token_ids[: len(turn.fed_ids)]):
        if turn.rows_TLK is None:
            continue
        # Row j is a function of the tokens up to j.
        num_shared = shared_prefix(token_ids, turn.fed_ids + turn.sampled_ids)
        place_T = np.arange(turn.first_row, min(num_shared, turn.first_row + len(turn.rows_TLK), num_rows))
        # A later turn's row of a sampled token, which is context by then, is not the one under which it was drawn.
        drawn = place_T >= len(turn.fed_ids) - 1
        place_T = place_T[drawn == sampled_T[place_T]]
        rows_TLK[place_T] = turn.rows_TLK[place_T - turn.first_row]
        known_T[place_T] = True
    for j in np.flatnonzero(~known_T):
        if sampled_T[j]:
            raise Unavailable(f"the engine returned no routing for the sampled token {j + 1}")
        if j == 0:
            raise Unavailable("the engine returned no routing for the first token")
        rows_TLK[j] = rows_TLK[j - 1]
    return rows_TLK


class RoutingLog:
    """An engine that notes what another one returns of routing, until the rollout's record is there to take it.

    It stands between the episode loop and the engine, so that no env need know of routing. `attach` is called in the
    order of output, which makes the file's bytes depend on the input and not on who finished first.
    """

    def __init__(self, engine: Engine, writer: RoutingWriter) -> None:
        self.name = engine.name
        self.info = engine.info
        self.context_length = engine.context_length
        self.concurrency = engine.concurrency
        self._engine = engine
        self._writer = writer
        self._fed: dict[Any, list[int]] = {}
        self._turns: dict[Any, list[TurnRouting]] = {}

    def submit(self, request: Request) -> None:
        """Passes the request on."""
        self._fed[request.key] = list(request.prompt_ids)
        self._engine.submit(request)

    def collect(self, patience_s: float | None = None) -> list[Completion]:
        """Passes the completions on; their routing stays here. Raises Unavailable where it is not that of the ids."""
        done = self._engine.collect(patience_s)
        for completion in done:
            fed = self._fed.pop(completion.key)
            if completion.error is None:
                self._note(completion, fed)
                completion.routing = None
        return done

    def _note(self, completion: Completion, fed: list[int]) -> None:
        rows = completion.routing
        num_rows = len(fed) + len(completion.token_ids) - 1
        if rows is not None and len(rows) != num_rows:
            raise Unavailable(f"{completion.key}: the engine returned {len(rows)} rows of routing, not {num_rows}")
        turns = self._turns.setdefault(completion.key, [])
        if turns and fed[: len(turns[-1].fed_ids)] == turns[-1].fed_ids:
            # The new turn was fed all the context of the one before, which would otherwise be held once a turn.
            turns[-1] = turns[-1].without_context()
        turns.append(TurnRouting(fed, list(completion.token_ids), rows))

    def attach(self, record: Record) -> None:
        """Writes the routing of a rollout's chunks and sets their `routing`; of those without a sampled token none is
        needed, nor of a rollout that the machine failed. Raises Unavailable where it is missing, OutputFailed."""
        name = record.get("id", str)
        turns = self._turns.pop(name, [])
        if record.get("error") is not None:
            return
        chunks = _chunks.decode(record.fields["chunks"])
        for chunk in chunks:
            sampled = msgspec.json.decode(chunk["sampled"], type=list[Span])
            if not sampled:
                continue
            try:
                rows = chunk_routing(msgspec.json.decode(chunk["token_ids"], type=list[int]), sampled, turns)
            except Unavailable as error:
                message = "without it the rollout cannot be replayed, and dropping it would bias the batch"
                raise Unavailable(f"{name}: {error}; {message}") from None
            chunk["routing"] = Raw(msgspec.json.encode(self._writer.append(rows)))
        record.set(chunks=chunks)

    def cancel(self, key: Any) -> None:
        """The engine's."""
        self._engine.cancel(key)

    @property
    def pending(self) -> int:
        """Requests submitted and not yet collected."""
        return self._engine.pending

    def logprobs_mode(self, sampling: Sampling) -> str:
        """The engine's."""
        return self._engine.logprobs_mode(sampling)

    def close(self) -> None:
        """Forgets what was noted; the engine and the file belong to whoever opened them."""
        self._turns.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()


@contextmanager
def open_log(engine: Engine, path: Path | None) -> Iterator[RoutingLog | None]:
    """The log between `engine` and the file at `path`; None where no routing is asked for."""
    if path is None:
        yield None
        return
    with RoutingWriter(path) as writer, RoutingLog(engine, writer) as log:
        yield log
