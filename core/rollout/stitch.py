"""Tokens in, tokens out: the exact token stream of an episode of many turns (T1, section 2.4 of the sheet).

At each turn the chat template renders the whole history anew, and its ids are not always those the policy was fed and
drew: sampled splits need not be the encoder's, templates prune reasoning, tool calls come back with other whitespace.
Let p be the rendered prompt of a turn, a what was sampled after it, and p' the rendered prompt of the next turn. Each
boundary is the first of these four that holds:

1. strict: p + a is a prefix of p'; the rest of p' is appended.
2. normalized: p without its last s ids + a without its last u ids is a prefix of p'; the (s, u) in [0, 96] x [0, 16]
   of least s + u, then of least u. The rest of p' is appended.
3. retokenized: the bytes of a stand in p' where p ends, in other tokens; the sampled ids are kept, never the copy, and
   what follows the copy in p' is appended.
4. split: p' opens a new chunk of the same rollout.

Positions that were sampled carry the loss, all others are context. The engine is fed our stream and not the rendered
copy, so that a chunk before a sampled span is, id for id, what the policy saw. What follows from that, and the rest of
what is our choice, the paper being silent:

- The u ids at the end of a leave the stream, and with it the loss. The s ids at the end of p stay: the policy saw them.
- A sampled turn is never dropped whole: u < len(a), or the turn would vanish where case 4 keeps it.
- With s > 0 (cases 2 and 3), what is appended begins past all that our text and the rendered one share; else a short
  answer could match inside the prompt by chance, or at tokens that merged at the junction, and text would stand twice.
- Case 3 looks for a only where p ends, or up to 96 ids before (as s): a short answer also occurs by chance in a tool's
  output. The copy may begin inside a token that holds the end of p as well; it has to end where a token ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from strop.core.records import Chunk, Span

CASES = ("strict", "normalized", "retokenized", "split")
# T1's grid: 96 covers the longest suffix that a chat template adds to open the answer, 16 the tokens that end one.
MAX_S = 96
MAX_U = 16

# The bytes of one token id (see core/models/token_bytes.py).
Decoder = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Boundary:
    """How a rendered prompt goes on from the turn before: its case, s and u, and where in it the new context begins."""

    case: str
    s: int = 0
    u: int = 0
    resume: int = 0


def find_boundary(
    prompt_ids: list[int],
    sampled_ids: list[int],
    next_ids: list[int],
    decode: Decoder,
    *,
    keep_sampled: bool = False,
) -> Boundary:
    """The boundary between a turn (rendered prompt and sampled ids) and the rendered prompt of the next one.

    The four cases are tried in the paper's order; `keep_sampled` tries case 3 before a case 2 that drops sampled ids
    (u > 0), which otherwise takes answers of which only the last tokens were split in another way. The time is linear
    in the ids; over the history nothing runs but comparisons of slices.
    """
    start, end = len(prompt_ids), len(prompt_ids) + len(sampled_ids)
    if next_ids[start:end] == sampled_ids and next_ids[:start] == prompt_ids:
        return Boundary("strict", resume=end)
    num_shared = shared_prefix(prompt_ids, next_ids)
    if start - num_shared > MAX_S:
        return Boundary("split")
    normalized = _normalized(prompt_ids, sampled_ids, next_ids, num_shared, decode)
    if normalized is not None and not (keep_sampled and normalized.u):
        return normalized
    return _retokenized(prompt_ids, sampled_ids, next_ids, decode) or normalized or Boundary("split")


def shared_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many items two sequences of one type (lists, or bytes) share at their start; linear, by slices."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _normalized(
    prompt: list[int], sampled: list[int], following: list[int], num_shared: int, decode: Decoder
) -> Boundary | None:
    """Case 2: the admissible (s, u) of least s + u, ties to the smaller u."""
    best: Boundary | None = None
    for s in range(len(prompt) - num_shared, min(MAX_S, len(prompt)) + 1):
        if best is not None and s > best.s + best.u:
            break
        start = len(prompt) - s
        # Nothing fits, or only with all of the answer dropped.
        if sampled and following[start : start + 1] != sampled[:1]:
            continue
        num_kept = shared_prefix(sampled, following[start : start + len(sampled)])
        u = len(sampled) - num_kept
        # As s grows, an equal sum has a smaller u.
        if u > MAX_U or (best is not None and s + u > best.s + best.u):
            continue
        if s:
            copy = _join(sampled[:num_kept], decode)
            ours = _join(prompt[start:], decode) + copy
            rendered, _ = _join_until(following, start, len(ours), decode)
            if shared_prefix(ours, rendered) > len(copy):
                continue
        best = Boundary("normalized", s, u, start + num_kept)
    return best


def _retokenized(prompt: list[int], sampled: list[int], following: list[int], decode: Decoder) -> Boundary | None:
    """Case 3: the bytes of `sampled` stand in `following` after `prompt` without its last s ids; the least such s.

    All of `prompt` but its last 96 ids is known to be a prefix of `following`.
    """
    base = max(0, len(prompt) - MAX_S)
    pieces = [decode(id_) for id_ in prompt[base:]]
    answer = _join(sampled, decode)
    ours = b"".join(pieces) + answer
    rendered, ends = _join_until(following, base, len(ours), decode)
    num_common = shared_prefix(ours, rendered)
    start = len(ours) - len(answer)
    for s in range(len(pieces) + 1):
        start -= len(pieces[-s]) if s else 0
        stop = start + len(answer)
        if start <= num_common <= stop and stop in ends and rendered.startswith(answer, start):
            return Boundary("retokenized", s=s, resume=ends[stop])
    return None


def _join(ids: Sequence[int], decode: Decoder) -> bytes:
    return b"".join(map(decode, ids))


def _join_until(ids: list[int], start: int, num_bytes: int, decode: Decoder) -> tuple[bytes, dict[int, int]]:
    """The bytes of ids[start:], of no more tokens than give `num_bytes`; byte offset to position where tokens end."""
    pieces: list[bytes] = []
    ends = {0: start}
    offset = 0
    for position in range(start, len(ids)):
        if offset >= num_bytes:
            break
        pieces.append(decode(ids[position]))
        offset += len(pieces[-1])
        ends.setdefault(offset, position + 1)
    return b"".join(pieces), ends


@dataclass(frozen=True, slots=True)
class Place:
    """Where a turn's sampled ids ended up.

    Number of the chunk, span in it (None where nothing was sampled), and how the turn's prompt was tied to the turn
    before (None for the first turn).
    """

    chunk: int
    span: Span | None
    boundary: Boundary | None


@dataclass(slots=True)
class _Growing:
    """A chunk that is still being written; only its last span may still be shortened."""

    token_ids: list[int]
    spans: list[Span] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Stitcher:
    """Builds the chunks of one episode, turn by turn.

    For each turn: `next_prompt(rendered_ids)` gives the ids to feed, and `take(sampled_ids, logprobs)` says what came
    back. Only `take` changes the stream: a prompt that was asked for but never fed (the context was full, the episode
    over) leaves no trace, and asking again replaces it. `counts` holds how often each case occurred, over boundaries
    between turns that were taken.
    """

    def __init__(self, decode: Decoder, *, keep_sampled: bool = False) -> None:
        self.counts = dict.fromkeys(CASES, 0)
        self._decode = decode
        self._keep_sampled = keep_sampled
        self._chunks: list[_Growing] = []
        # Of each turn: its chunk, the number of its span there (None: nothing sampled), its boundary.
        self._turns: list[tuple[int, int | None, Boundary | None]] = []
        self._rendered: list[int] = []
        self._sampled: list[int] = []
        self._asked: tuple[list[int], Boundary | None, list[int]] | None = None

    def next_prompt(self, rendered_ids: Sequence[int], *, new_chunk: bool = False) -> list[int]:
        """The ids to feed where the chat template rendered the history as `rendered_ids`.

        That is the stream so far, without dropped ids, and the new context; after a split, the rendered ids. With
        `new_chunk` it is a split: the history was replaced. Raises ValueError where there are no ids.
        """
        rendered = list(rendered_ids)
        if not rendered:
            raise ValueError("the rendered prompt has no tokens")
        boundary = None
        fed = rendered
        if self._turns:
            boundary = Boundary("split") if new_chunk else find_boundary(
                self._rendered, self._sampled, rendered, self._decode, keep_sampled=self._keep_sampled
            )  # fmt: skip
            if boundary.case != "split":
                stream = self._chunks[-1].token_ids
                fed = stream[: len(stream) - boundary.u] + rendered[boundary.resume :]
        self._asked = (rendered, boundary, fed)
        return list(fed)

    def take(self, sampled_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Takes what was sampled after the last `next_prompt`: ids, end token included, and a log-probability (nats)
        each. Raises ValueError where these differ in number, or no prompt was asked for."""
        if self._asked is None:
            raise ValueError("sampled tokens without a prompt: next_prompt comes first")
        if len(sampled_ids) != len(logprobs):
            raise ValueError(f"{len(logprobs)} log-probabilities for {len(sampled_ids)} sampled tokens")
        rendered, boundary, fed = self._asked
        if boundary is None or boundary.case == "split":
            self._chunks.append(_Growing(list(fed)))
        else:
            self._drop(boundary.u)
            self._chunks[-1].token_ids = fed
        if boundary is not None:
            self.counts[boundary.case] += 1
        chunk = self._chunks[-1]
        start = len(chunk.token_ids)
        chunk.token_ids.extend(sampled_ids)
        chunk.logprobs.extend(logprobs)
        if sampled_ids:
            chunk.spans.append(Span(start, len(chunk.token_ids)))
        self._turns.append((len(self._chunks) - 1, len(chunk.spans) - 1 if sampled_ids else None, boundary))
        self._rendered, self._sampled, self._asked = rendered, list(sampled_ids), None

    def chunks(self) -> list[Chunk]:
        """The chunks so far: ids as fed and drawn, a span for each turn, the log-probabilities of the spans' ids."""
        return [Chunk(list(chunk.token_ids), list(chunk.spans), list(chunk.logprobs)) for chunk in self._chunks]

    @property
    def num_dropped(self) -> int:
        """How many sampled ids left the stream (the sum of u): they are in no chunk and in no loss."""
        return sum(boundary.u for _, _, boundary in self._turns if boundary is not None)

    def places(self) -> list[Place]:
        """Where each turn's sampled ids are now, in order of turns."""
        return [
            Place(chunk, None if number is None else self._chunks[chunk].spans[number], boundary)
            for chunk, number, boundary in self._turns
        ]

    def _drop(self, u: int) -> None:
        """The last turn's last u ids lose span and log-probability; `next_prompt` has left them out of the ids."""
        if u:
            chunk = self._chunks[-1]
            last = chunk.spans[-1]
            chunk.spans[-1] = Span(last.start, last.end - u)
            del chunk.logprobs[len(chunk.logprobs) - u :]


@dataclass(frozen=True, slots=True)
class Turn:
    """What an engine logged of a turn: the ids it was fed, those it drew, and their log-probabilities (nats).

    For `audit`, `fed_ids` may be None: then only the sampled positions of the turn are compared.
    """

    fed_ids: Sequence[int] | None
    sampled_ids: Sequence[int]
    logprobs: Sequence[float] = ()


def stitch(turns: Iterable[Turn], decode: Decoder, *, keep_sampled: bool = False) -> Stitcher:
    """Stitches turns that another harness has logged, where each was fed the rendered prompt itself.

    There the policy saw a rendered copy of its own words, and after cases 2 and 3 the stream is not what it saw:
    `audit` counts these positions as `other_history`.
    """
    stitcher = Stitcher(decode, keep_sampled=keep_sampled)
    for turn in turns:
        stitcher.next_prompt(turn.fed_ids or [])
        stitcher.take(turn.sampled_ids, turn.logprobs)
    return stitcher


@dataclass(slots=True)
class Audit:
    """How the positions of an episode's chunks compare with what the engine logged; counts of positions.

    `aligned`: the id that the engine was fed or drew there. `retokenized`: other ids, but their bytes are the text at
    that place. `placeholder`: neither. `drifted` counts the sampled positions (of `sampled`) that are not aligned;
    `other_history` those before which the chunk holds other ids than the engine was fed.
    """

    aligned: int = 0
    retokenized: int = 0
    placeholder: int = 0
    sampled: int = 0
    drifted: int = 0
    other_history: int = 0

    @property
    def drift_rate(self) -> float | None:
        """Share of the sampled positions that are re-tokenized or placeholders (T1: 0.0000 %); None without any."""
        return self.drifted / self.sampled if self.sampled else None


def audit(chunks: Sequence[Chunk], turns: Iterable[Turn], decode: Decoder) -> Audit:
    """Compares chunks with the engine's own log, position by position, by span of bytes and by text.

    Spans and turns that sampled something belong together in order; a span may be shorter than what was drawn (ids
    dropped at its end). Raises ValueError where their numbers differ. How positions are told apart is our choice: the
    paper names the three kinds only.
    """
    found = Audit()
    places = [(chunk, number) for chunk in chunks for number in range(len(chunk.sampled))]
    logged = [turn for turn in turns if turn.sampled_ids]
    if len(places) != len(logged):
        raise ValueError(f"{len(places)} sampled spans for {len(logged)} turns that sampled something")
    for (chunk, number), turn in zip(places, logged, strict=True):
        span = chunk.sampled[number]
        kinds = _compare(chunk.token_ids[span.start : span.end], turn.sampled_ids, decode)
        found.sampled += sum(kinds)
        found.drifted += kinds[1] + kinds[2]
        _add(found, kinds)
        if turn.fed_ids is None:
            continue
        before = chunk.sampled[number - 1].end if number else 0
        _add(found, _compare_ends(chunk.token_ids[before : span.start], turn.fed_ids, decode))
        if chunk.token_ids[: span.start] != list(turn.fed_ids):
            found.other_history += sum(kinds)
    return found


def _add(found: Audit, kinds: tuple[int, int, int]) -> None:
    found.aligned += kinds[0]
    found.retokenized += kinds[1]
    found.placeholder += kinds[2]


def _compare_ends(ours: list[int], theirs: Sequence[int], decode: Decoder) -> tuple[int, int, int]:
    """As `_compare`, from the end backwards: context is the tail of what was fed."""
    tail = list(theirs[len(theirs) - len(ours) :]) if len(ours) <= len(theirs) else list(theirs)
    if ours == tail:
        return len(ours), 0, 0
    return _compare(ours[::-1], theirs[::-1], lambda id_: decode(id_)[::-1])


def _compare(ours: list[int], theirs: Sequence[int], decode: Decoder) -> tuple[int, int, int]:
    """How many of `ours` are aligned, re-tokenized, placeholders beside `theirs`; both start at the same byte."""
    if ours == list(theirs[: len(ours)]):
        return len(ours), 0, 0
    at: dict[int, set[int]] = {}
    offset = 0
    for id_ in theirs:
        at.setdefault(offset, set()).add(id_)
        offset += len(decode(id_))
    text = _join(theirs, decode)
    aligned = retokenized = offset = 0
    for id_ in ours:
        piece = decode(id_)
        if id_ in at.get(offset, ()):
            aligned += 1
        elif piece and text.startswith(piece, offset):
            retokenized += 1
        offset += len(piece)
    return aligned, retokenized, len(ours) - aligned - retokenized
