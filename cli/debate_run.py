"""A run of `strop debate-label`: what comes in is gathered into batches, and what is made of them is put out."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from strop.cli import debate_options as opt
from strop.cli.session import Session
from strop.core.errors import DataError, InputMissing, Unavailable
from strop.core.records import Example, Label, Record, Sampling, Skill
from strop.core.streams import Output, Resumed, WriteGuard, read_records

if TYPE_CHECKING:
    from strop.core.debate.buffer import Buffer
    from strop.core.debate.intake import Humans
    from strop.core.debate.labeller import Labeller, Made
    from strop.core.debate.labels import Grading
    from strop.core.debate.prompts import Prompts
    from strop.core.debate.replies import Store
    from strop.core.debate.rounds import Rules
    from strop.core.debate.skills import Bank


class Run:
    """One run: examples gathered into batches, labels and what is made of them put out."""

    exports: tuple[str, ...] = ()
    trace = "full"
    measures = False

    def __init__(
        self, io: Session, rules: Rules, grading: Grading, prompts: Prompts, bank: Bank, humans: Humans, *, every: int,
        seed: int,
    ) -> None:  # fmt: skip
        from strop.core.debate.intake import Intake
        from strop.core.debate.metrics import Outcome

        self._io, self._rules, self._grading, self._prompts = io, rules, grading, prompts
        self._bank, self._humans, self._every, self._seed = bank, humans, every, seed
        self._intake = Intake()
        self._outcomes: list[Outcome] = []
        self._num_exported = self._num_left_out = self._num_asked = self._num_stored = 0
        self._provenance: dict[str, Any] = {
            "seed": seed, "variant": rules.variant, "rounds": rules.rounds, "k": rules.k, "every": every,
        }  # fmt: skip
        self._labeller: Labeller | None = None

    def plan(self, policy: Any, sampling: Sampling) -> None:
        """--dry-run: one plan record with the replies that would be asked for, and with a model tokens."""
        from strop.core.debate.rounds import Debate

        tokenizer = None
        examples = tokens = 0
        calls = 1 if self._rules.variant == "no-debate" else self._rules.rounds * 2
        calls += self._rules.rounds + 1 if self._rules.variant == "full" else 0
        for record in self._io.records():
            if record.kind != "example":
                continue
            examples += 1
            example = self._intake.read(record)
            if policy is not None:
                if tokenizer is None:
                    from strop.core.engines.open import open_tokenizer

                    tokenizer = open_tokenizer(policy)
                debate = Debate(None, self._prompts, self._bank, self._rules)  # type: ignore[arg-type]
                tokens += calls * len(tokenizer.encode_prompt(debate.first_prompt(record, example)))
        more = {} if policy is None else {
            "prompt_tokens_at_least": tokens, "sampled_tokens_at_most": examples * calls * sampling.max_tokens
        }  # fmt: skip
        self._io.emit(Record.make("plan", {"examples": examples, "replies": examples * calls, **more}))

    def label(
        self, specs: list[str], policy: Any, sampling: Sampling, *, replies: Path | None, buffer: Path | None,
        skills_out: Path | None, is_dynamic: bool,
    ) -> None:  # fmt: skip
        """Labels what comes in, and leaves buffer and bank."""
        from strop.core.debate.buffer import Buffer
        from strop.core.debate.intake import read_buffer
        from strop.core.debate.labeller import Labeller
        from strop.core.debate.rounds import Debate

        kept = Buffer() if buffer is None else read_buffer(buffer)
        with contextlib.ExitStack() as stack:
            cast = _LazyCast(stack, specs, policy, sampling, replies, self._rules.variant)
            debate = Debate(cast, self._prompts, self._bank, self._rules)  # type: ignore[arg-type]
            labeller = self._labeller = Labeller(
                debate, self._bank, kept, self._humans, self._grading, variant=self._rules.variant,
                is_dynamic=is_dynamic, earlier=self._earlier(),
            )  # fmt: skip
            with self._io.progress("labels") as progress:
                for batch in self._batches():
                    self._label_batch(labeller, batch, cast)
                    progress.add(sum(example is not None for _, example in batch))
            self._num_asked, self._num_stored = cast.num_asked, cast.num_stored
        self._leave(kept, buffer, skills_out)
        tally = labeller.tally
        if tally.labels and tally.errors == tally.labels:
            raise Unavailable(f"every debate failed by the machinery: {tally.first_error}")

    def _leave(self, kept: Buffer, buffer: Path | None, skills_out: Path | None) -> None:
        """Both files or, where a signal stops it, none: the buffer says which evidence the bank has used."""
        from strop.core.debate.intake import buffer_records

        bank = (Record.make("skill", asdict(skill)) for skill in self._bank.skills.values())
        with contextlib.ExitStack() as stack:
            stack.enter_context(WriteGuard())
            for path, records in ((buffer, buffer_records(kept)), (skills_out, bank)):
                if path is not None:
                    output = stack.enter_context(Output(path=path))
                    for record in records:
                        output.write(record)

    def _earlier(self) -> dict[str, Record]:
        """The labels that a killed run wrote: they are kept, and teach the bank what they taught it then."""
        if self._io.resumed is None:
            return {}
        path = str(self._io.resumed.path)
        with contextlib.suppress(InputMissing):
            found = read_records([path], sys.stdin.buffer, None, "example")
            return {str(record.get("id")): record for record in found if record.kind == "label"}
        return {}

    def _batches(self) -> Iterator[list[tuple[Record, Example | None]]]:
        """So many examples, and what stood between them."""
        batch: list[tuple[Record, Example | None]] = []
        number = 0
        records = self._io.records()
        while True:
            try:
                record = next(records)
            except StopIteration:
                break
            except DataError:
                # A line that cannot be read ends the run; what came before it is finished first.
                if batch:
                    yield batch
                raise
            example = None
            if record.kind == "example":
                try:
                    example = self._intake.read(record)
                except DataError as error:
                    if batch and not self._io.keep_going:
                        yield batch
                        batch, number = [], 0
                    self._io.reject(error, record)
                    continue
            batch.append((record, example))
            number += example is not None
            if number >= self._every or (number == 0 and len(batch) >= self._every):
                yield batch
                batch, number = [], 0
        if batch:
            yield batch

    def _label_batch(
        self, labeller: Labeller, batch: list[tuple[Record, Example | None]], cast: _LazyCast
    ) -> None:
        from strop.core.debate.rounds import Case

        io = self._io
        made = labeller.label([(record, example) for record, example in batch if example is not None])
        for record, example in batch:
            if example is None:
                if record.kind == "label":
                    self._take_in(record)
                else:
                    io.write(record)
                continue
            found = next(made)
            if isinstance(found, Case):
                io.reject(record.bad(found.error or "bad", None), record)
                continue
            io.write(record)
            if found.earlier is not None:
                io.write(found.earlier)
            else:
                io.emit(Record.make("label", found.label), self._provenance | {"roles": cast.names})
            self._use(found)
        for skill, told in labeller.update():
            io.emit(Record.make("skill", asdict(skill) | {"update": told}), self._provenance)

    def _take_in(self, record: Record) -> None:
        """A label that came in: counted and exported like one made here."""
        try:
            label = self._intake.read_label(record)
        except DataError as error:
            self._io.reject(error, record)
            return
        self._io.write(record)
        try:
            missing = [one["id"] for one in label.trace.get("retrieved", ()) if one["id"] not in self._bank.skills]
            if missing and self.exports:
                raise record.bad(f"skill {missing[0]!r} is not in the bank (--skills)", "trace.retrieved")
            shown = [self._bank.skills[one["id"]] for one in label.trace.get("retrieved", ()) if not missing]
            self._measure(label)
            self._export(label, shown, record)
        except DataError as error:
            self._io.reject(error, record)
        except (KeyError, TypeError):
            self._io.reject(record.bad("not a trace as debate-label writes it", "trace"), record)

    def _use(self, made: Made) -> None:
        self._measure(made.label)
        self._export(made.label, made.case.skills, made.case.record)

    def _gold(self, label: Label) -> int | None:
        known = self._humans.labels.get(label.id)
        known = label.trace.get("y_human") if known is None else known
        return label.y_raw if known is None else known

    def _measure(self, label: Label) -> None:
        from strop.core.debate.metrics import outcome_of

        gold = self._gold(label)
        if self.measures and gold is not None and label.error is None:
            self._outcomes.append(outcome_of(label, gold, self._grading.uncited))

    def _export(self, label: Label, shown: list[Skill], source: Record) -> None:
        from strop.core.debate.export import grpo_task, is_training, sft_record

        if not self.exports:
            return
        if not is_training(label) or label.id in self._humans.labels:
            self._num_left_out += 1
            return
        if self._humans.holds_query(label.query):
            raise source.bad("the same request is in the file of --eval: it must not be trained on", "query")
        self._num_exported += 1
        for kind in self.exports:
            if kind == "sft":
                made = sft_record(label, self._prompts, shown, self.trace, self._grading.sections)
            else:
                gold = self._gold(label)
                made = grpo_task(
                    label, label.verdict if gold is None else gold, self._prompts, shown, self.trace,  # type: ignore[arg-type]
                    self._grading.compare, self._grading.uncited, self._grading.sections,
                )  # fmt: skip
            self._io.emit(made, self._provenance | {"trace": self.trace})

    def report(self) -> None:
        """The summary, and the metric records."""
        from strop.core.debate.metrics import measures

        io, labeller = self._io, self._labeller
        if labeller is not None and labeller.tally.labels:
            tally = labeller.tally
            verdicts = ", ".join(f"{number} x {name}" for name, number in tally.verdicts.items())
            odd = f", {tally.unread} without a verdict" if tally.unread else ""
            odd += f", {tally.errors} failed by the machinery ({tally.first_error})" if tally.errors else ""
            io.note(
                f"{tally.labels} labels ({verdicts}{odd}); the sides differed in {tally.conflicts}; "
                f"{tally.added} skills added, {tally.refined} refined; {self._num_asked} replies asked for, "
                f"{self._num_stored} known"
            )
        if self.exports:
            io.note(f"{self._num_exported} labels exported, {self._num_left_out} not (malformed, or not for training)")
        if not self.measures:
            return
        for found in measures(self._outcomes, self._seed):
            known = {"low": found.low, "high": found.high, "n": found.n, "seeds": [self._seed]}
            fields = {key: value for key, value in known.items() if value is not None}
            io.emit(Record.make("metric", {"name": found.name, "value": found.value, **fields}))


class _LazyCast:
    """The cast, put together when the first question is asked: labels can be exported without any role."""

    def __init__(
        self, stack: contextlib.ExitStack, specs: list[str], policy: Any, sampling: Sampling, replies: Path | None,
        variant: str,
    ) -> None:  # fmt: skip
        self._stack, self._specs, self._policy, self._sampling = stack, specs, policy, sampling
        self._replies, self._variant = replies, variant
        self._cast: Any = None

    def ask(self, questions: Any) -> Any:
        """As `Cast.ask`."""
        return self._open().ask(questions) if questions else []

    @property
    def names(self) -> dict[str, str]:
        """Who speaks for whom."""
        names: dict[str, str] = self._open().names
        return names

    @property
    def num_asked(self) -> int:
        """Questions that went to a back-end."""
        return self._cast.num_asked if self._cast is not None else 0

    @property
    def num_stored(self) -> int:
        """Questions that were answered by --replies."""
        return self._cast.num_stored if self._cast is not None else 0

    def _open(self) -> Any:
        from strop.core.debate.roles import Cast

        if self._cast is None:
            needed = {"no-debate": ("router",), "no-judge": ("support", "objection")}.get(
                self._variant, ("support", "objection", "judge")
            )
            backends = opt.open_backends(self._specs, self._policy, self._sampling, needed)
            store, writer = _open_replies(self._stack, self._replies)
            self._cast = Cast(backends, store, None if writer is None else writer.write)
            self._stack.callback(self._cast.close)
        return self._cast


def _open_replies(stack: contextlib.ExitStack, path: Path | None) -> tuple[Store | None, Output | None]:
    from strop.core.debate.replies import Store

    if path is None:
        return None, None
    store = None
    if path.exists():
        # A killed run may have torn the last line.
        Resumed(path)
        store = Store(read_records([str(path)], sys.stdin.buffer))
    return store, stack.enter_context(Output(path=path, append=True, flush_each=True))
