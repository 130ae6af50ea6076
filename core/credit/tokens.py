"""Credit for tokens, rollout by rollout: `values` of a critic in, `advantages` and `returns` beside them out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from strop.core.credit.diagnose import Moments
from strop.core.credit.gae import GaeOptions, advantages_and_targets
from strop.core.credit.groups import clear_credit
from strop.core.credit.views import Value, missing_reward
from strop.core.records import Metric, Record, Span

if TYPE_CHECKING:
    from collections.abc import Iterable

_chunks = msgspec.json.Decoder(list[dict[str, Raw]])
_encoder = msgspec.json.Encoder()


class ValuedChunk(Struct):
    """The spans of a chunk and the critic's value (before its update) of each sampled token; the tokens stay unread."""

    sampled: list[Span]
    values: list[Value] | UnsetType = UNSET


class ValuedRollout(Struct, kw_only=True):
    """What estimating from values needs of a rollout."""

    id: str
    reward: Value | None = None
    error: str | None = None
    chunks: list[ValuedChunk] = []


class GaeCredit:
    """Gives each sampled token its advantage and the critic its targets (core/credit/gae.py).

    Every chunk is a trajectory of its own and gets the rollout's whole reward with its last sampled token (T1, section
    2.2, rules 3 and 5). No group is needed and nothing is normalised (rule 4).
    """

    def __init__(self, options: GaeOptions, stamp: dict[str, Any]) -> None:
        self.num_rollouts = 0
        self.num_errors = 0
        self.num_empty = 0
        self._options = options
        self._stamp = Raw(_encoder.encode(stamp))
        self._targets = Moments()
        self._residuals = Moments()

    def credit(self, record: Record) -> None:
        """Sets `advantages` and `returns` of the chunks of a rollout. Raises DataError.

        A rollout with `error` is left without; one in which nothing was sampled passes as it is.
        """
        rollout = record.view(ValuedRollout)
        self.num_rollouts += 1
        if rollout.error is not None:
            self.num_errors += 1
            clear_credit(record)
            return
        if rollout.reward is None:
            raise missing_reward(record)
        lengths = [_num_sampled(record, i, chunk) for i, chunk in enumerate(rollout.chunks)]
        if not any(lengths):
            self.num_empty += 1
            return
        advantages, returns = self._estimate(rollout, lengths)
        clear_credit(record)
        chunks = _chunks.decode(record.fields["chunks"])
        start = 0
        for chunk, length in zip(chunks, lengths, strict=True):
            if length:
                chunk["advantages"] = _raw(advantages[start : start + length])
                chunk["returns"] = _raw(returns[start : start + length])
            start += length
        record.set(chunks=chunks, credit=self._stamp)

    @property
    def explained_variance(self) -> float | None:
        """1 - Var[R - V] / Var[R] over all tokens seen (T1, section 2.3); None where the targets do not vary."""
        spread, rest = self._targets.std, self._residuals.std
        return None if not spread or rest is None else 1 - (rest / spread) ** 2

    def metrics(self) -> list[Metric]:
        """What --diagnose reports."""
        tokens = self._targets.n
        return [
            Metric(name="explained_variance", value=self.explained_variance, n=tokens),
            Metric(name="return_mean", value=self._targets.mean, n=tokens),
            Metric(name="return_std", value=self._targets.std, n=tokens),
            Metric(name="failed_rollouts", value=self.num_errors, n=self.num_rollouts),
        ]

    def _estimate(self, rollout: ValuedRollout, lengths: list[int]) -> tuple[list[float], list[float]]:
        import numpy as np

        kept = [length for length in lengths if length]
        value_T = np.concatenate([np.array(chunk.values, float) for chunk in rollout.chunks if chunk.values])
        reward_N = np.full(len(kept), rollout.reward)
        advantage_T, target_T = advantages_and_targets(value_T, reward_N, np.array(kept), self._options)
        self._targets.add(target_T)
        self._residuals.add(target_T - value_T)
        return advantage_T.tolist(), target_T.tolist()


def _num_sampled(record: Record, i: int, chunk: ValuedChunk) -> int:
    num = sum(span.end - span.start for span in chunk.sampled)
    if chunk.values is UNSET:
        if num:
            raise record.bad("missing; --gae needs a critic's value of each sampled token", f"chunks[{i}].values")
        return 0
    if len(chunk.values) != num:
        raise record.bad(f"{len(chunk.values)} values for {num} sampled tokens", f"chunks[{i}].values")
    return num


def _raw(values: Iterable[float]) -> Raw:
    # Seven digits, as log-probabilities have: a critic in bfloat16 knows three.
    return Raw(_encoder.encode([round(value, 7) for value in values]))
