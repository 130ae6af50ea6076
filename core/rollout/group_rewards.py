"""Rewards without labels for stored rollouts: what their group agrees on, or how sure the policy is.

`majority` is TTRL's (arXiv:2504.16084): the answer that most members give stands in for the label, and a member is
worth 1 where its answer is that one, else 0. `self-certainty` is Intuitor's (arXiv:2505.19590): the mean over the
response's tokens of KL(U || p), U uniform over the vocabulary and p the policy's next-token distribution. Both are
baselines of NSD (arXiv:2609.11699), whose settings for them are n = 8 a task.

`success` stays what the verifier said, so that a run can be measured by labels that it is not trained on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec import Raw

from strop.core.credit.views import Head
from strop.core.engines.open import EngineOptions, choose_engine, resolve_policy
from strop.core.errors import DataError, UsageError
from strop.core.groups import Group, GroupBuffer
from strop.core.models.memory import memory_told
from strop.core.models.score import TokenSequence
from strop.core.records import Chunk, Record, check_chunks
from strop.core.rollout.grading import set_reward
from strop.core.rollout.rescore import KnownTasks
from strop.core.tasks.verifiers.verdict import shown

if TYPE_CHECKING:
    from strop.core.tasks.verifiers import Verifiers


class _Stored(Head, kw_only=True):
    """What these rewards need of a rollout."""

    response: str | None = None
    chunks: list[Chunk] = msgspec.field(default_factory=list)
    policy: dict[str, Any] | None = None
    steps: list[dict[str, Raw]] = msgspec.field(default_factory=list)


@dataclass(slots=True)
class Member:
    """What was read of a rollout: whether the machine failed, and the rule's own part of it."""

    failed: bool
    steps: list[dict[str, Raw]]
    answer: str | None = None
    sequences: Sequence[TokenSequence] = ()


class GroupRule(Protocol):
    """A reward that is given to the members of a group together."""

    name: str

    def read(self, record: Record, stored: _Stored) -> Member:
        """What the rule wants to know of a rollout that did not fail. Raises DataError."""
        ...

    def rewards(self, members: Sequence[Member]) -> list[tuple[float, dict[str, Any]]]:
        """The reward of each member, none of which failed, and what `grading` says of it."""
        ...

    def lines(self) -> list[str]:
        """What the run's summary says besides its counts."""
        ...


def majority_rewards(answers: Sequence[str | None]) -> tuple[str | None, list[float]]:
    """TTRL's pseudo-label, and 1.0 for each answer that is it, else 0.0; None is no answer and no vote.

    Of answers with as many votes the one that came first is taken (our choice: the paper is silent).

    >>> majority_rewards(["7", "8", None, "8"]), majority_rewards([None])
    (('8', [0.0, 1.0, 0.0, 1.0]), (None, [0.0]))
    """
    # `most_common` keeps the order in which answers came first.
    votes = Counter(answer for answer in answers if answer is not None).most_common(1)
    label = votes[0][0] if votes else None
    return label, [float(answer is not None and answer == label) for answer in answers]


class Majority:
    """The group's majority answer, as the verifier of its task reads answers, in place of a label."""

    name = "majority"

    def __init__(self, verifiers: Verifiers, tasks: KnownTasks) -> None:
        self._verifiers = verifiers
        self._tasks = tasks
        self._without_vote = 0

    def read(self, record: Record, stored: _Stored) -> Member:
        """The answer; the task's reference is not looked at. Raises DataError without a task or a response."""
        if stored.response is None:
            raise record.bad("missing; an answer is read from the response", "response")
        _, task = self._tasks.of(record, stored.task, stored.statement_version)
        return Member(False, stored.steps, answer=self._verifiers.answer(stored.response, record, task))

    def rewards(self, members: Sequence[Member]) -> list[tuple[float, dict[str, Any]]]:
        """1 for the majority's answer, 0 for another or none."""
        label, rewards = majority_rewards([member.answer for member in members])
        self._without_vote += label is None
        votes = sum(member.answer is not None for member in members)
        told: dict[str, Any] = {"source": "group", "votes": votes, "agreed": int(sum(rewards))}
        if label is not None:
            told["label"] = shown(label)
        return [(reward, told) for reward in rewards]

    def lines(self) -> list[str]:
        """Groups in which nobody gave an answer."""
        return [f"{self._without_vote} groups without any answer"] if self._without_vote else []


class SelfCertainty:
    """The policy's own certainty: the mean of KL(U || p) over all tokens that it sampled, at temperature 1.

    The model is loaded for the first group. A response without tokens is worth 0 (our choice: the paper is silent).
    """

    name = "self-certainty"

    def __init__(self, options: EngineOptions) -> None:
        """Raises UsageError for another engine than transformers, which alone gives whole distributions."""
        from strop.core.engines.scorers import Weights
        from strop.core.models.adapters import model_info
        from strop.core.models.load import context_length, vocab_size

        if choose_engine(options) not in ("transformers", "vllm") or options.engine == "vllm":
            raise UsageError("--reward self-certainty needs whole distributions: --engine transformers, no --endpoint")
        model, adapter = resolve_policy(options)
        self._info = model_info(model, adapter, options.adapter)
        self._limits = {"vocab_size": vocab_size(model), "context_length": context_length(model, options.max_context)}
        self._weights = Weights(model, adapter, options.device, options.dtype)
        self._model: Any = None
        self._others = 0

    def read(self, record: Record, stored: _Stored) -> Member:
        """The tokens. Raises DataError for those that are missing or that this model cannot have produced."""
        from strop.core.engines.scorers import find_sequence_fault

        if not stored.chunks:
            raise record.bad("missing; certainty is computed of the sampled tokens", "chunks")
        check_chunks(record, stored.chunks)
        sequences = []
        for i, chunk in enumerate(stored.chunks):
            spans = [(span.start, span.end) for span in chunk.sampled if span.start < span.end]
            sequence = TokenSequence(chunk.token_ids, spans)
            fault = find_sequence_fault(sequence, **self._limits)
            if fault is not None:
                raise record.bad(fault, f"chunks[{i}]")
            sequences.append(sequence)
        policy = stored.policy or {}
        self._others += (policy.get("revision"), _hash(policy.get("adapter"))) != (
            self._info.revision, _hash(self._info.adapter)
        )  # fmt: skip
        return Member(False, stored.steps, sequences=sequences)

    def rewards(self, members: Sequence[Member]) -> list[tuple[float, dict[str, Any]]]:
        """The mean certainty (nats) of each; `tokens` says over how many. Raises DataError where it is no number."""
        from strop.core.models.score import token_certainties

        if self._model is None:
            self._model = self._weights.take()
        sequences = [sequence for member in members for sequence in member.sequences]
        with memory_told("computing self-certainty"):
            values = iter(token_certainties(self._model, sequences))
        given: list[tuple[float, dict[str, Any]]] = []
        for member in members:
            tokens = [value for _ in member.sequences for value in next(values)]
            mean = math.fsum(tokens) / len(tokens) if tokens else 0.0
            if not math.isfinite(mean):
                raise DataError(f"the model {self._info.model} computes {mean} as the certainty of a response")
            given.append((mean, {"source": "policy", "tokens": len(tokens)}))
        return given

    def lines(self) -> list[str]:
        """Rollouts of another policy."""
        told = f"{self._others} rollouts were sampled by another policy than --model and --adapter"
        return [told] if self._others else []


def _hash(adapter: str | None) -> str | None:
    """Of "NAME@HASH": the same adapter may have another name here."""
    return None if adapter is None else adapter.rpartition("@")[2]


class GroupGrader:
    """Sets the reward of each rollout by a rule of its group, when the group is complete or the input ends.

    `run` yields all records in input order. Rollouts with `error` count as members of their group, and stay as they
    are. `on_bad` gets a bad rollout (and raises, or sets it aside). Memory: the largest group, and the tasks seen.
    """

    def __init__(self, rule: GroupRule, tasks: KnownTasks, *, on_bad: Callable[[DataError, Record], None]) -> None:
        self._rule = rule
        self._tasks = tasks
        self._on_bad = on_bad
        self._buffer: GroupBuffer[Member] = GroupBuffer()
        self._rewards: list[float] = []
        self._num_groups = self._num_failed = self._num_incomplete = 0

    def run(self, records: Iterable[Record]) -> Iterator[Record]:
        """The records, graded."""
        for record in records:
            if record.kind == "rollout":
                self._take(record)
            elif record.kind != "task" or self._know(record):
                self._buffer.pass_on(record)
            yield from self._buffer.ready()
        for group in self._buffer.rest():
            self._num_incomplete += group.size is not None
            self._grade(group)
        yield from self._buffer.ready()

    def lines(self) -> list[str]:
        """The summary for people."""
        told = f"reward {self._rule.name} of {len(self._rewards)} rollouts in {self._num_groups} groups"
        if self._rewards:
            told += f": mean {math.fsum(self._rewards) / len(self._rewards):.4g}"
        told += f", {self._num_failed} failed ones left as they were" if self._num_failed else ""
        incomplete = f"{self._num_incomplete} groups were incomplete at the end of the input"
        return [told, *([incomplete] if self._num_incomplete else []), *self._rule.lines()]

    def _know(self, record: Record) -> bool:
        try:
            self._tasks.add(record)
        except DataError as error:
            self._on_bad(error, record)
            return False
        return True

    def _take(self, record: Record) -> None:
        try:
            stored = record.view(_Stored)
        except DataError as error:
            # It tells no group: its own stays open to the end of the input.
            self._on_bad(error, record)
            return
        try:
            failed = stored.error is not None
            member = Member(True, stored.steps) if failed else self._rule.read(record, stored)
        except DataError as error:
            self._on_bad(error, record)
            group = self._buffer.lost(stored.group_key, stored.group_size)
        else:
            try:
                group = self._buffer.add(
                    record, member, stored.group_key, size=stored.group_size, id=stored.id, sample=stored.sample,
                    about=(stored.task, stored.statement_version or 1),
                )  # fmt: skip
            except DataError as error:
                # A second copy of a member is no member: the group goes on waiting for the true ones.
                self._on_bad(error, record)
                return
        if group is not None:
            self._grade(group)

    def _grade(self, group: Group[Member]) -> None:
        held = [one for one in group.members if one.item is not None and not one.item.failed]
        given = self._rule.rewards([one.item for one in held if one.item is not None]) if held else []
        for one, (reward, told) in zip(held, given, strict=True):
            assert one.item is not None
            set_reward(one.record, reward, {"rule": self._rule.name, **told}, one.item.steps)
            self._rewards.append(reward)
        self._num_groups += bool(held)
        self._num_failed += len(group.members) - len(held)
        self._buffer.finish(group)
