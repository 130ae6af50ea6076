"""Groups of attempts as arrays, and credit written back into their records.

Grouping itself is core/groups.py: by id, never by position. Here the attempts of whole groups become one `StepBatch`,
and per-step results are spliced into the raw JSON of each step, so that what nobody asked about passes byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
from msgspec import Raw

from strop.core.credit.gigpo import StepBatch, anchor_labels, similar_labels
from strop.core.credit.views import Trajectory
from strop.core.records import Record

# What any estimator adds to a step; an earlier run's values are replaced, never doubled, and never left behind.
STEP_FIELDS = (
    "return", "episode_advantage", "step_advantage", "anchor_size", "nll_score", "weight", "action_nll", "advantage",
)  # fmt: skip

_steps = msgspec.json.Decoder(list[Raw])
_fields = msgspec.json.Decoder(dict[str, Raw])
_encoder = msgspec.json.Encoder()


def build_batch(groups: Sequence[Sequence[Trajectory]], similarity: float | None = None) -> StepBatch:
    """The arrays of some whole groups; `similarity` groups observations that are alike instead of equal anchors."""
    import numpy as np

    attempts = list(chain.from_iterable(groups))
    lengths = [len(attempt.rewards) for attempt in attempts]
    length_N = np.array(lengths, np.int64)
    group_N = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    group_R = np.repeat(group_N, length_N)
    num = int(length_N.sum())

    def flat(name: str, kind: Any = float) -> Any:
        return np.fromiter(chain.from_iterable(getattr(attempt, name) for attempt in attempts), kind)

    if similarity is None:
        anchor_R = anchor_labels(group_R, list(chain.from_iterable(attempt.anchors for attempt in attempts)))
    else:
        anchor_R = similar_labels(group_R, list(chain.from_iterable(attempt.texts for attempt in attempts)), similarity)
    nll_R = flat("nll") if any(attempt.nll for attempt in attempts) else np.full(num, np.nan)
    reward_N = np.array([attempt.reward for attempt in attempts], float)
    return StepBatch(group_N, reward_N, length_N, flat("rewards"), flat("valid", bool), anchor_R, nll_R)


def write_steps(record: Record, columns: Mapping[str, Sequence[Any]], *, replace: bool) -> None:
    """Adds one value of each column to each step of `record`; None leaves the field out.

    `replace`: steps may hold fields of these names or of an earlier run, which go first. Without it the new fields are
    spliced before the step's last brace, and the step's own bytes stay as they are.
    """
    raws = _steps.decode(record.fields["steps"])
    names = tuple(columns)
    rows = zip(*columns.values(), strict=True) if columns else [()] * len(raws)
    parts: list[bytes] = []
    for raw, values in zip(raws, rows, strict=True):
        added = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        if replace:
            kept = {name: value for name, value in _fields.decode(raw).items() if name not in STEP_FIELDS}
            parts.append(_encoder.encode({**kept, **added}))
        else:
            parts.append(_spliced(bytes(raw), _encoder.encode(added)))
    record.set(steps=Raw(b"[" + b",".join(parts) + b"]"))


def _spliced(step: bytes, added: bytes) -> bytes:
    """Two objects as one, whose names differ."""
    if added == b"{}":
        return step
    head = step[: step.rindex(b"}")].rstrip()
    return head + (b"" if head == b"{" else b",") + added[1:]


def clear_credit(record: Record) -> None:
    """Takes an earlier run's credit off a record, from its steps too, so that no reader mistakes it for the new."""
    if "advantage" not in record.fields and "credit" not in record.fields:
        return
    record.fields.pop("advantage", None)
    had_credit = record.fields.pop("credit", None) is not None
    if had_credit and record.get("steps", list[dict[str, Raw]] | None):
        write_steps(record, {}, replace=True)
    record.set()
