"""A run of `strop distill`: models are opened, and records go through a method, as a filter or in a loop on policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop import __version__
from strop.cli.distill_files import articles, stored_conditions, task_book
from strop.cli.session import Session
from strop.cli.updates import emit_update, update_line
from strop.core.distill.attempts import Stream
from strop.core.errors import DataError, UsageError
from strop.core.records import Record, Task
from strop.core.streams import Output
from strop.core.train.run import Run as TrainRun
from strop.core.train.run import RunOptions, Update, find_start

if TYPE_CHECKING:
    from strop.core.distill.conditions import ConditionRule, Prompts, StoredCondition
    from strop.core.distill.negative import NegativeTeacher
    from strop.core.distill.onpolicy import OnPolicy, Plan
    from strop.core.distill.teachers import TeacherRule, Teachers
    from strop.core.engines.open import EngineOptions
    from strop.core.engines.protocol import Engine
    from strop.core.engines.score_cache import CachedScorer, ScoreCache
    from strop.core.engines.scorers import Scorer
    from strop.core.models.tokens import Tokenizer
    from strop.core.train.loop import OptimOptions
    from strop.core.train.losses import LossOptions
    from strop.core.train.policy import LoraOptions
    from strop.core.train.setup import Setup


@dataclass(frozen=True, slots=True)
class Models:
    """Who takes part: the frozen start, the policy as it is now, teacher and reference; `scores` remembers scores."""

    frozen: EngineOptions
    student: EngineOptions
    teacher: EngineOptions | None
    reference: EngineOptions | None
    experts: int | None
    scores: Path | None


@dataclass(frozen=True, slots=True)
class NsdWish:
    """How negative conditions are come by, and what the gate is."""

    rule: ConditionRule
    writer: str
    conditions: Path | None
    articles: Path | None
    gate: str


@dataclass(frozen=True, slots=True)
class LoopWish:
    """The loop on policy: where to, how far, and what `train` would be told."""

    out: Path
    go_on: bool
    plan: Plan
    loss: LossOptions
    optim: OptimOptions
    lora: LoraOptions | None
    lora_given: bool
    save_every: int
    keep: int
    rollouts: Path | None


class Run:
    """One run of one method."""

    def __init__(
        self, io: Session, method: str, models: Models, prompts: Prompts, nsd: NsdWish, rule: TeacherRule, *,
        metrics: bool,
    ) -> None:  # fmt: skip
        self._io = io
        self._name = method
        self._models = models
        self._prompts = prompts
        self._nsd = nsd
        self._rule = rule
        self._metrics = metrics
        self._frozen: Scorer | None = None
        self._cache: ScoreCache | None = None
        self._cached: list[CachedScorer] = []
        self._stack = ExitStack()

    def stream(self, tasks: Path | None, batch: int) -> None:
        """As a filter: rollouts in, rollouts with signals out."""
        from strop.core.engines.open import open_tokenizer, policy_info

        io = self._io
        with self._stack:
            tokenizer = open_tokenizer(self._models.frozen)
            method = self._method(tokenizer, lambda: self._scorer(self._models.frozen), self._open_writer)
            stream = Stream(
                method, task_book(tasks), size=batch, vocabulary=tokenizer.vocab_size,
                done=lambda name: io.resumed is not None and ("rollout", name) in io.resumed.ids, on_bad=io.reject,
                revision=policy_info(self._models.frozen).revision,
            )  # fmt: skip
            if io.dry_run:
                self._plan(stream, io.records())
                return
            with io.progress("rollouts") as progress:
                for record in stream.run(io.records()):
                    io.write(record)
                    progress.add(record.kind == "rollout")
        self._say(method, stream)

    def loop(self, wish: LoopWish) -> None:
        """On policy: tasks in, updates and checkpoints out."""
        from strop.core.distill.onpolicy import OnPolicy
        from strop.core.tasks.verifiers import open_verifiers
        from strop.core.train.examples import Reading
        from strop.core.train.loop import Trainer
        from strop.core.train.setup import Opener, SetupOptions

        frozen = self._models.frozen
        if frozen.endpoints or frozen.engine not in ("auto", "transformers"):
            raise UsageError("--out trains and samples one model in this process: the engine is transformers")
        if not frozen.model:
            raise UsageError("--model is missing: a folder, a hub id or a .gguf file")
        if wish.loss.divergence is not None and frozen.adapter is not None:
            message = "--adapter: over the whole vocabulary the frozen side is --model without any; merge the adapter"
            raise UsageError(f"{message}, or choose --opsd-form sampled (--opsd) or another --anchor (--nsd)")
        same = self._same(wish)
        start = find_start(wish.out, go_on_from=None, resume=wish.go_on, options=same)
        opener = Opener(
            SetupOptions(
                model=frozen.model, lora=wish.lora, start=start.checkpoint,
                adapter=frozen.adapter if start.checkpoint is None else None, lora_given=wish.lora_given,
                needs_reference=wish.loss.needs_reference, device=frozen.device, dtype=frozen.dtype,
                offline=frozen.offline, seed=wish.plan.seed,
            )
        )  # fmt: skip
        tasks = self._tasks()
        if self._io.dry_run:
            updates = wish.plan.passes * -(-len(tasks) // wish.plan.tasks_per_update)
            rollouts = wish.plan.passes * len(tasks) * wish.plan.samples
            plan = {"tasks": len(tasks), "updates": updates, "rollouts": rollouts}
            self._io.emit(Record.make("plan", plan))
            return
        with self._stack as stack:
            setup = opener.setup()
            tokenizer = opener.tokenizer()
            engine = stack.enter_context(self._policy_engine(setup))
            method = self._method(tokenizer, lambda: self._frozen_scorer(setup, engine), self._writing(engine))
            options = RunOptions(
                wish.out, frozen.model, save_every=wish.save_every, keep=wish.keep, options=same, strop=__version__
            )
            run = TrainRun(start, options, lambda: setup, lambda made: Trainer(made.policy, wish.loss, wish.optim))
            reading = Reading(wish.loss.loss, wish.loss.needs_old, opener.vocabulary)
            policy = OnPolicy(
                tasks, wish.plan, engine, tokenizer, stack.enter_context(open_verifiers()), method, reading,
                version=lambda: run.version, consumed=start.consumed, on_rollout=self._keeper(wish.rollouts),
                on_bad=self._io.reject,
            )  # fmt: skip
            self._train(run, policy, method, wish)
        self._say(method, None)

    def _train(self, run: TrainRun, policy: OnPolicy, method: NegativeTeacher | Teachers, wish: LoopWish) -> None:
        io, updates = self._io, 0
        about = {"method": self._name, "lr": wish.optim.lr, "seed": wish.plan.seed}
        with io.progress("tokens") as progress:
            for event in run.run(policy.batches(), progress.add):
                if not isinstance(event, Update):
                    io.emit(Record.make("checkpoint", event.info), about, updates=updates)
                    continue
                updates += 1
                version = updates if event.report is None else event.report.update
                emit_update(io, event, version, about)
                last = policy.last
                if last.pass_rate is not None:
                    self._metric(f"train/v{version:06d}/", "pass_rate", last.pass_rate, version)
                if self._metrics:
                    for name, value in method.take_metrics().items():
                        self._metric(f"distill/v{version:06d}/", name, value, version)
                rate = "" if last.pass_rate is None else f"; {last.successes}/{last.scored} passed"
                io.detail(f"{update_line(event)}{rate}")

    def _same(self, wish: LoopWish) -> dict[str, Any]:
        """What a loop that is gone on with must have in common with what it was."""
        optim = asdict(wish.optim)
        del optim["pack_tokens"]
        method = asdict(self._nsd.rule) if self._name == "nsd" else asdict(self._rule)
        if self._name == "nsd":
            sampling = self._nsd.rule.sampling
            method |= {"sampling": [sampling.temperature, sampling.top_p, sampling.max_tokens], "gate": self._nsd.gate}
        plan = asdict(wish.plan)
        plan["sampling"] = [wish.plan.sampling.temperature, wish.plan.sampling.max_tokens]
        return {
            "method": self._name, **method, **asdict(wish.loss), **optim, "betas": list(wish.optim.betas), "plan": plan
        }

    @property
    def _plays(self) -> str:
        """Who writes conditions: `student` or `initial`."""
        return "initial" if self._nsd.rule.form in ("question", "offline") else self._nsd.writer

    def _method(
        self, tokenizer: Tokenizer, frozen: Callable[[], Scorer], writing: Callable[[], Engine]
    ) -> NegativeTeacher | Teachers:
        if self._name != "nsd":
            return self._teachers(tokenizer, frozen)
        from strop.core.distill.negative import NegativeTeacher
        from strop.core.distill.writing import Writer

        wish = self._nsd
        writer = Writer(
            wish.rule, self._prompts, tokenizer, writing, writer=self._plays,
            articles=articles(wish.articles) if wish.rule.form == "wiki" else (),
            stored=stored_conditions(wish.conditions), on_written=self._condition_keeper(wish.conditions),
        )  # fmt: skip
        self._frozen = frozen()
        return NegativeTeacher(writer, self._frozen, tokenizer, self._prompts, gate=wish.gate)

    def _teachers(self, tokenizer: Tokenizer, frozen: Callable[[], Scorer]) -> Teachers:
        from strop.core.distill.teachers import Reader, Teachers
        from strop.core.engines.open import open_tokenizer

        models, rule = self._models, self._rule
        start = frozen() if rule.needs_start else None
        if models.teacher is None:
            return Teachers(rule, tokenizer, self._prompts, start=start)
        teacher = Reader(self._scorer(models.teacher), open_tokenizer(models.teacher))
        reference = None
        if models.experts is not None:
            reference = Reader(
                self._scorer(models.teacher, experts=models.experts, beside=teacher.scorer), teacher.tokenizer
            )
        elif models.reference is not None:
            reference = Reader(self._scorer(models.reference), open_tokenizer(models.reference))
        return Teachers(rule, tokenizer, self._prompts, start=start, teacher=teacher, reference=reference)

    def _scorer(self, options: EngineOptions, experts: int | None = None, beside: Scorer | None = None) -> Scorer:
        """A scorer that lives as long as the run, and remembers where --scores says so."""
        from strop.core.engines.scorers import open_scorer

        return self._remembering(open_scorer(options, experts=experts, beside=_inner(beside)))

    def _remembering(self, scorer: Scorer) -> Scorer:
        from strop.core.engines.score_cache import CachedScorer, ScoreCache

        if self._models.scores is None:
            return self._stack.enter_context(scorer)
        if self._cache is None:
            self._cache = self._stack.enter_context(ScoreCache(self._models.scores))
        cached = CachedScorer(self._stack.enter_context(scorer), self._cache)
        self._cached.append(cached)
        return cached

    def _policy_engine(self, setup: Setup) -> Any:
        """An engine over the very model that is in training."""
        from strop.core.engines.transformers import TransformersEngine
        from strop.core.models.adapters import model_info

        frozen = self._models.frozen
        return TransformersEngine(
            setup.base, model_info(setup.base, None, None), device=frozen.device, dtype=frozen.dtype,
            max_context=frozen.max_context, load=lambda: setup.policy.model,
        )  # fmt: skip

    def _frozen_scorer(self, setup: Setup, engine: Any) -> Scorer:
        """The policy with its adapter off; a copy of the start where there is no such thing."""
        from strop.core.engines.scorers import ModelScorer

        frozen = self._models.frozen
        if not setup.policy.is_lora or frozen.adapter is not None:
            return self._scorer(frozen)
        model = setup.policy.model
        return self._remembering(
            ModelScorer(model, engine.info, context_length=engine.context_length, without_adapter=True)
        )

    def _open_writer(self) -> Engine:
        """An engine that plays whoever writes conditions; of the frozen model's own weights where it is that."""
        from strop.core.engines.open import open_engine
        from strop.core.engines.scorers import TransformersScorer
        from strop.core.engines.transformers import TransformersEngine

        plays = self._models.frozen if self._plays == "initial" else self._models.student
        frozen = _inner(self._frozen)
        if plays == self._models.frozen and isinstance(frozen, TransformersScorer):
            engine: Engine = TransformersEngine.open(plays, load=frozen.weights.take)
        else:
            engine = open_engine(plays)
        return self._stack.enter_context(engine)

    def _writing(self, engine: Engine) -> Callable[[], Engine]:
        from strop.core.engines.open import open_engine

        if self._plays == "student":
            return lambda: engine
        return lambda: self._stack.enter_context(open_engine(self._models.frozen))

    def _tasks(self) -> list[tuple[Record, Task]]:
        """All tasks of the input; other kinds pass through. One id twice is bad data."""
        found: dict[str, tuple[Record, Task]] = {}
        for record in self._io.records():
            if record.kind != "task":
                self._io.write(record)
                continue
            try:
                task = record.view(Task)
                if task.id in found:
                    raise record.bad(f"task {task.id!r} came before in this input", "id")
                if task.prompt is None:
                    raise record.bad("missing; a task to attempt needs a prompt", "prompt")
            except DataError as error:
                self._io.reject(error, record)
                continue
            found[task.id] = record, task
        return list(found.values())

    def _keeper(self, file: Path | None) -> Callable[[Record], None]:
        if file is None:
            return lambda _: None
        output = self._stack.enter_context(Output(path=file, append=True, flush_each=True))
        return output.write

    def _condition_keeper(self, file: Path | None) -> Callable[[StoredCondition], None]:
        """Appends what is written to the file, which appears with the first."""
        output: list[Output] = []

        def keep(condition: StoredCondition) -> None:
            if file is None:
                return
            if not output:
                output.append(self._stack.enter_context(Output(path=file, append=True, flush_each=True)))
            output[0].write(Record.make("condition", condition))

        return keep

    def _plan(self, stream: Stream, records: Iterable[Record]) -> None:
        """--dry-run: what would be scored; no model is asked."""
        for record in records:
            stream.count(record)
        counts = stream.counts
        plan = {"rollouts": counts.rollouts - counts.failed - counts.empty, "tokens": counts.tokens}
        self._io.emit(Record.make("plan", plan))

    def _metric(self, prefix: str, name: str, value: float | int | None, update: int | None = None) -> None:
        fields = {"id": f"{prefix}{name}", "name": name, "value": value, "of": "distill"}
        self._io.emit(Record.make("metric", fields if update is None else {**fields, "update": update}))

    def _say(self, method: NegativeTeacher | Teachers, stream: Stream | None) -> None:
        io = self._io
        for line in method.lines():
            io.note(line)
        if stream is not None:
            counts = stream.counts
            reasons = {"failed by the machine": counts.failed, "empty": counts.empty, "written before": counts.resumed}
            if some := [f"{number} {why}" for why, number in reasons.items() if number]:
                io.note(f"left as they were: {', '.join(some)}")
            if counts.others:
                io.warn(f"{counts.others} rollouts name another model than --model as the one that sampled them")
        if self._cached:
            known, asked = sum(one.num_hits for one in self._cached), sum(one.num_misses for one in self._cached)
            io.note(f"{known} of {known + asked} sequences had been scored before")
        for warning in method.warnings():
            io.warn(warning)
        if self._metrics and stream is not None:
            more = {"failed_rollouts": stream.counts.failed, "empty_rollouts": stream.counts.empty}
            for name, value in {**method.take_metrics(), **more}.items():
                self._metric("distill/", name, value)


def _inner(scorer: Scorer | None) -> Scorer | None:
    """The scorer behind one that remembers."""
    return getattr(scorer, "inner", scorer)
