"""Which experts a policy is trained under: as the rollout recorded them (R3; T1, section 2.5 of the sheet), or free.

The update replays the record, with a gradient through the gates. The reference of a KL penalty and the critic choose
freely, as T1's do. There is no pass for old log-probabilities here: they are the rollout's own, made under this very
routing (T1 computes them again in the trainer).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from strop.core.rollout.routing_file import RoutingFault, RoutingReader

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strop.core.models.routing import RoutingShape
    from strop.core.records import Chunk, Record

MODES = ("auto", "on", "off")


class RoutingReading:
    """Finds the routing of chunks that are trained on.

    "on": every such chunk has it; "off": none is read; "auto": the first one decides for all of the input, since a
    batch of which a part is replayed mixes two policies. `shape` is asked for when the first chunk has routing, and
    None from it says that the model is no mixture of experts.
    """

    def __init__(self, mode: str, shape: Callable[[], RoutingShape | None]) -> None:
        self.is_wanted = {"on": True, "off": False, "auto": None}[mode]
        self._is_off = mode == "off"
        self._mode = mode
        self._open_shape = shape
        self._shape: RoutingShape | None = None
        self._reader = RoutingReader()

    def of_chunk(self, record: Record, index: int, chunk: Chunk) -> NDArray[Any] | None:
        """The routing [N - 1, L, K] of a chunk of N tokens, or None where training runs free. Raises RoutingFault."""
        if self._is_off:
            return None
        field = f"chunks[{index}].routing"
        is_there = chunk.routing is not UNSET
        if self.is_wanted is None:
            self.is_wanted = is_there
        if is_there != self.is_wanted:
            raise RoutingFault(self._says(is_there=is_there), where=record.where, field=field)
        if chunk.routing is UNSET:
            return None
        if self._shape is None:
            self._shape = self._open_shape()
        if self._shape is None:
            message = "the model is not a mixture of experts (--routing-replay off trains on the tokens alone)"
            raise RoutingFault(message, where=record.where, field=field)
        return self._reader.read(record, index, chunk.routing, len(chunk.token_ids), self._shape)

    def _says(self, *, is_there: bool) -> str:
        if self._mode == "on":
            return "missing; --routing-replay on needs it of every rollout, and leaving one out would bias the batch"
        what = "there, but rollouts before it have none" if is_there else "missing, but rollouts before it have one"
        return f"{what}; replaying a part would mix two policies, and leaving one out would bias the batch"
