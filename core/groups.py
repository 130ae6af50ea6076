"""Groups of records that arrive interleaved: found by id, complete when all members were seen, written in input order.

A tool adds each member under its group's key and gets the group back the moment it is complete. Records leave through
`ready`: in the order they came (a record waits behind an earlier one that is still undecided), or as soon as they are
decided. Memory is bounded by what waits, never by what has left.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Generic, TypeVar

from strop.core.errors import DataError, Where
from strop.core.records import Record

T = TypeVar("T")

# A member that turns up after its group has left is an error, told from a digest of the group's key. An endless stream
# must not grow this memory, so the oldest keys go: 65,536 groups back, a straggler would count as a new group.
REMEMBERED_GROUPS = 1 << 16


@dataclass(slots=True, eq=False)
class Held(Generic[T]):
    """A record in its place in the output, with what the tool read from it.

    A place without an `item` is a record that only passes through. Set `leaves` to False to drop the record.
    """

    record: Record
    item: T | None = None
    decided: bool = False
    leaves: bool = True


@dataclass(slots=True, eq=False)
class Group(Generic[T]):
    """The members of one group that were seen, in input order. `num_seen` also counts members that were set aside.

    `about` is the task and the statement version that all members attempted.
    """

    key: str
    size: int | None
    about: tuple[str, int] | None = None
    members: list[Held[T]] = field(default_factory=list)
    num_seen: int = 0
    _ids: dict[str, Where | None] = field(default_factory=dict)
    _samples: dict[int, Where | None] = field(default_factory=dict)

    @property
    def items(self) -> list[T]:
        """What the tool read from each member."""
        return [held.item for held in self.members if held.item is not None]

    @property
    def is_complete(self) -> bool:
        """Whether all `size` members were seen; never, where no member told the size."""
        return self.size is not None and self.num_seen >= self.size

    def admit(
        self, record: Record, *, size: int | None, id: str, sample: int | None, about: tuple[str, int] | None = None
    ) -> None:
        """Notes a member. Raises DataError for a second one of its id or sample, and for another size or task."""
        if id in self._ids:
            raise record.bad(f"{id!r} came before in group {self.key!r}{_at(self._ids[id])}", "id")
        if sample is not None and sample in self._samples:
            raise record.bad(f"sample {sample} came before in group {self.key!r}{_at(self._samples[sample])}", "sample")
        if size is not None and self.size is not None and size != self.size:
            raise record.bad(f"{size}, but earlier members of group {self.key!r} say {self.size}", "group_size")
        if size is not None and self.size is None and self.num_seen >= size:
            raise record.bad(f"{size}, but group {self.key!r} already has {self.num_seen} members", "group_size")
        if about is not None and self.about is not None and about != self.about:
            part = 0 if about[0] != self.about[0] else 1
            message = f"{about[part]!r}, but earlier members of group {self.key!r} attempted {self.about[part]!r}"
            raise record.bad(message, ("task", "statement_version")[part])
        self.about = self.about if about is None else about
        self.size = self.size if size is None else size
        self._ids[id] = record.where
        if sample is not None:
            self._samples[sample] = record.where


class GroupBuffer(Generic[T]):
    """Collects groups from a stream and gives records back in order.

    The tool's loop: `pass_on` records of other kinds, `add` members, compute on a group that comes back and `finish`
    it, write what is `ready`; at the end of the input do the same with the groups of `rest`.
    """

    def __init__(self, *, ordered: bool = True) -> None:
        self._ordered = ordered
        self._queue: deque[Held[T]] = deque()
        self._open: dict[str, Group[T]] = {}
        self._left: OrderedDict[bytes, None] = OrderedDict()

    def pass_on(self, record: Record) -> None:
        """A record that is nobody's member leaves in its place."""
        self._queue.append(Held(record, decided=True))

    def add(
        self, record: Record, item: T, key: str, *,
        size: int | None, id: str, sample: int | None = None, about: tuple[str, int] | None = None,
    ) -> Group[T] | None:  # fmt: skip
        """Adds a member, and returns its group if it is now complete. Raises DataError for a member of no use."""
        group = self._group(key)
        if group is None:
            raise record.bad(f"group {key!r} was complete before this record came", "group")
        try:
            group.admit(record, size=size, id=id, sample=sample, about=about)
        except DataError:
            if not group.num_seen:
                del self._open[key]
            raise
        held = Held(record, item)
        group.members.append(held)
        if self._ordered:
            self._queue.append(held)
        return self._count(group)

    def lost(self, key: str, size: int | None = None) -> Group[T] | None:
        """A member that was set aside still counts as seen; returns the group if that completes it."""
        group = self._group(key)
        if group is None:
            return None
        group.size = group.size if group.size is not None else size
        return self._count(group)

    def finish(self, group: Group[T]) -> None:
        """The group's records are as they shall leave."""
        for held in group.members:
            held.decided = True
            if not self._ordered:
                self._queue.append(held)

    def rest(self) -> list[Group[T]]:
        """The groups still open at the end of the input, in the order of their first members."""
        groups = list(self._open.values())
        self._open.clear()
        return groups

    def ready(self) -> Iterator[Record]:
        """The records that may leave now."""
        while self._queue and self._queue[0].decided:
            held = self._queue.popleft()
            if held.leaves:
                yield held.record

    @property
    def num_waiting(self) -> int:
        """Records held back at the moment, by their own group or by an earlier one."""
        return len(self._queue) if self._ordered else sum(len(group.members) for group in self._open.values())

    def _group(self, key: str) -> Group[T] | None:
        """The open group of this key, opened if need be; None if it has left."""
        group = self._open.get(key)
        if group is None:
            if _digest(key) in self._left:
                return None
            group = self._open[key] = Group(key, None)
        return group

    def _count(self, group: Group[T]) -> Group[T] | None:
        group.num_seen += 1
        if not group.is_complete:
            return None
        del self._open[group.key]
        self._left[_digest(group.key)] = None
        if len(self._left) > REMEMBERED_GROUPS:
            self._left.popitem(last=False)
        return group


def _digest(key: str) -> bytes:
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _at(where: Where | None) -> str:
    return "" if where is None else f" ({where})"
