"""One run of training: batches in, updates and checkpoints out, resumable at the last checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.core.errors import DataError, UsageError
from strop.core.train.batches import Batch
from strop.core.train.checkpoints import (
    LATEST,
    About,
    Checkpoint,
    find_checkpoint,
    keep_newest,
    rewrite_about,
    write_checkpoint,
)
from strop.core.train.critic import CriticOptions, CriticReport, CriticTrainer
from strop.core.train.loop import StepReport, Trainer
from strop.core.train.setup import Setup


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Where checkpoints go and when. `epochs`: updates made with each batch; `save_every` batches (0: at the end).

    `options` are what a resumed run must have in common with the one it continues. With a `critic` each update trains
    it first, on the values the records hold from before; `critic_only` then leaves the policy as it is.
    """

    out: Path
    model: str
    epochs: int = 1
    save_every: int = 0
    keep: int = 0
    fresh_optimizer: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    strop: str = ""
    critic: CriticOptions | None = None
    critic_only: bool = False
    fresh_critic_optimizer: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """What a run goes on from: a checkpoint (or none), and whether it is the same run, with what that has consumed."""

    checkpoint: Checkpoint | None = None
    is_resumed: bool = False
    consumed: tuple[str, ...] = ()


def find_start(out: Path, *, go_on_from: Path | None, resume: bool, options: dict[str, Any]) -> Start:
    """Where to start. Raises UsageError where weights would be overwritten or a run mixed with another."""
    here = find_checkpoint(out)
    if resume and here is not None:
        changed = [name for name, value in here.about.options.items() if options.get(name) != value]
        if changed and here.about.done and go_on_from is not None:
            # The run there came to its end: this one is another, the next turn of a loop.
            return Start(find_checkpoint(go_on_from))
        if changed:
            name = changed[0]
            raise UsageError(
                f"--resume: {out / LATEST} was trained with {name} {here.about.options[name]}, not {options.get(name)}"
            )
        return Start(here, True, tuple(here.about.consumed))
    if go_on_from is not None:
        source = find_checkpoint(go_on_from)
        if source is None and go_on_from.resolve() != out.resolve():
            raise UsageError(f"--from {go_on_from}: no checkpoint of `strop train` there")
        return Start(source)
    if here is not None:
        raise UsageError(
            f"{out} holds version {here.about.version} already: --from {out} goes on from it, --resume continues an "
            "interrupted run, or choose another --out"
        )
    return Start()


@dataclass(frozen=True, slots=True)
class Update:
    """An update that was made, and of what."""

    batch: Batch
    report: StepReport | None
    critic: CriticReport | None = None


class Run:
    """Makes updates from batches. `open_setup` is called when the first batch (or the end without one) needs it."""

    def __init__(
        self,
        start: Start,
        options: RunOptions,
        open_setup: Callable[[], Setup],
        make_trainer: Callable[[Setup], Trainer],
    ) -> None:
        self.start = start
        self.options = options
        self.last: Checkpoint | None = start.checkpoint
        self._open_setup = open_setup
        self._make_trainer = make_trainer
        self._setup: Setup | None = None
        self._trainer: Trainer | None = None
        self._critic: CriticTrainer | None = None
        self._consumed = list(start.consumed)
        self._unsaved = 0
        self._on_pack: Callable[[int], None] = lambda _: None

    @property
    def version(self) -> int:
        """How many updates the weights have seen."""
        if self._trainer is not None:
            return self._trainer.updates
        return self.start.checkpoint.about.version if self.start.checkpoint else 0

    def run(self, batches: Iterable[Batch], on_pack: Callable[[int], None]) -> Iterator[Update | Checkpoint]:
        """Updates with their batch, and checkpoints, as they happen; the last is always the final checkpoint."""
        self._on_pack = on_pack
        for batch in batches:
            if batch.examples:
                for _ in range(self.options.epochs):
                    yield self._update(batch)
                self._unsaved += 1
            self._consumed.extend(batch.groups)
            if self.options.save_every and self._unsaved >= self.options.save_every:
                yield self._save(done=False)
        yield self._finish()

    def _update(self, batch: Batch) -> Update:
        trainer = self._ready()
        critic = report = None
        try:
            if self._critic is not None:
                critic = self._critic.update(batch.examples, self._on_pack)
            if not self.options.critic_only:
                report = trainer.update(batch.examples, self._on_pack)
        except RuntimeError as error:
            if "non-finite" not in str(error):
                raise
            groups = ", ".join(batch.groups[:3])
            whose = "critic's gradient" if self._critic is not None and critic is None else "gradient"
            message = f"the {whose} of update {trainer.updates + 1} (groups {groups}...) is not finite"
            raise DataError(f"{message}; nothing of it was applied") from None
        return Update(batch, report, critic)

    def _ready(self) -> Trainer:
        if self._trainer is None:
            self._setup = self._open_setup()
            self._trainer = self._make_trainer(self._setup)
            checkpoint = self.start.checkpoint
            if checkpoint is not None:
                self._trainer.continue_from(checkpoint.about.version)
                if not self.options.fresh_optimizer or self.start.is_resumed:
                    self._load_optimizer(self._trainer, checkpoint)
            self._critic = self._ready_critic(self._setup)
        return self._trainer

    def _ready_critic(self, setup: Setup) -> CriticTrainer | None:
        opened = setup.critic
        if opened is None or self.options.critic is None:
            return None
        trainer = CriticTrainer(opened.critic, self.options.critic)
        state = None if self.options.fresh_critic_optimizer and not self.start.is_resumed else opened.optimizer_state()
        if state is not None:
            try:
                trainer.load_state(state)
            except ValueError as error:
                raise DataError(f"{opened.start}: {error}; --fresh-optimizer starts with a new one") from None
        return trainer

    def _load_optimizer(self, trainer: Trainer, checkpoint: Checkpoint) -> None:
        state = checkpoint.optimizer_state()
        if state is None:
            raise DataError(f"{checkpoint.path}: no optimiser state there; --fresh-optimizer starts with a new one")
        try:
            trainer.load_state(state)
        except ValueError as error:
            raise DataError(f"{checkpoint.path}: {error}; --fresh-optimizer starts with a new one") from None

    def _finish(self) -> Checkpoint:
        here = self.last is not None and self.last.path.parent.resolve() == self.options.out.resolve()
        if self._unsaved or not here:
            return self._save(done=True)
        assert self.last is not None
        about = self.last.about
        about.done = True
        about.consumed = self._consumed
        about.options = self.options.options
        rewrite_about(self.last)
        return self.last

    def _save_weights(self, folder: Path) -> None:
        setup = self._setup
        assert setup is not None
        setup.save_weights(folder)
        if setup.critic is not None:
            setup.critic.save(folder, None if self._critic is None else self._critic.state())

    def _save(self, *, done: bool) -> Checkpoint:
        trainer = self._ready()
        setup = self._setup
        assert setup is not None
        about = About(
            version=trainer.updates,
            base=self.options.model,
            base_revision=setup.base.revision,
            lora_rank=setup.lora_rank,
            start_version=self.start.checkpoint.about.version if self.start.checkpoint else 0,
            done=done,
            options=self.options.options,
            consumed=list(self._consumed),
            strop=self.options.strop,
        )
        self.last = write_checkpoint(self.options.out, about, trainer.state(), self._save_weights)
        self._unsaved = 0
        keep_newest(self.options.out, self.options.keep)
        return self.last
