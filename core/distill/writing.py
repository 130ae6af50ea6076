"""Who writes negative conditions: an engine that plays the student or the frozen model, a store, a list of articles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from strop.core.distill.attempts import Attempt
from strop.core.distill.conditions import (
    Condition,
    ConditionRule,
    Prompts,
    StoredCondition,
    attack,
    distractor,
    problem_of,
)
from strop.core.engines.protocol import Completion, Request
from strop.core.errors import DataError
from strop.core.records import Record, Sampling, Task

if TYPE_CHECKING:
    from strop.core.engines.protocol import Engine
    from strop.core.models.tokens import Tokenizer


class Writer:
    """Gives each attempt of a batch its condition.

    A condition that came with the task is taken as it is. `open_engine` is called when the first attack has to be
    written; `writer` says whom it plays. Attacks of the form "offline" are written once a task and statement version,
    and each is handed to `on_written`; `stored` are those of earlier runs.
    """

    def __init__(
        self, rule: ConditionRule, prompts: Prompts, tokenizer: Tokenizer, open_engine: Callable[[], Engine], *,
        writer: str, articles: Sequence[str] = (), stored: Iterable[StoredCondition] = (),
        on_written: Callable[[StoredCondition], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._rule = rule
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._open_engine = open_engine
        self._engine: Engine | None = None
        self._writer = writer
        self._articles = list(articles)
        self._stored = {(one.task, one.statement_version): one for one in stored if one.form == rule.form}
        self._on_written = on_written
        self.prompt_tokens = 0
        self.sampled_tokens = 0

    def write(self, attempts: Sequence[Attempt]) -> list[Condition]:
        """The conditions, in order."""
        found: dict[int, Condition] = {}
        for i, attempt in enumerate(attempts):
            condition = self._known(attempt.need_task())
            if condition is not None:
                found[i] = condition
        missing = [i for i in range(len(attempts)) if i not in found]
        if missing and self._rule.form == "offline":
            self._write_offline([attempts[i].need_task() for i in missing])
            found |= {i: self._from_store(attempts[i].need_task()) for i in missing}
        elif missing:
            names = {str(i): attempts[i].rollout.id for i in missing}
            problems = {str(i): problem_of(attempts[i].need_task().prompt or "") for i in missing}
            solutions = {str(i): self._solution(attempts[i]) for i in missing}
            made = self._attacks(names, problems, solutions)
            found |= {i: made[str(i)] for i in missing}
        return [found[i] for i in range(len(attempts))]

    def _known(self, task: Task) -> Condition | None:
        if task.negative_condition is not None:
            return Condition(text=task.negative_condition.strip(), form=self._rule.form, writer="given")
        if self._rule.form == "wiki":
            return distractor(self._articles, self._rule, task.id)
        if self._rule.form == "offline" and (task.id, task.statement_version) in self._stored:
            return self._from_store(task)
        return None

    def _from_store(self, task: Task) -> Condition:
        one = self._stored[task.id, task.statement_version]
        return attack(one.text, one.form, one.writer)

    def _solution(self, attempt: Attempt) -> str:
        """The response as the policy wrote it."""
        if attempt.rollout.response is not None:
            return attempt.rollout.response
        return self._tokenizer.decode(attempt.sampled_ids)

    def _write_offline(self, tasks: Sequence[Task]) -> None:
        """A solution of the writer's own to each task, then an attack on it. Those it has are left."""
        wanted = {task.id: task for task in tasks if (task.id, task.statement_version) not in self._stored}
        problems = {name: problem_of(task.prompt or "") for name, task in wanted.items()}
        prompts = {name: self._tokenizer.encode_prompt(task.prompt or "") for name, task in wanted.items()}
        solved = self._ask(prompts, "solution", lambda name: _answering(wanted[name]))
        solutions = {name: self._tokenizer.decode(completion.token_ids) for name, completion in solved.items()}
        made = self._attacks({name: name for name in wanted}, problems, solutions)
        for name, condition in made.items():
            one = StoredCondition(
                task=name, statement_version=wanted[name].statement_version, text=condition.text, form="offline",
                writer=condition.writer,
            )  # fmt: skip
            self._stored[name, one.statement_version] = one
            if condition.error is None:
                self._on_written(one)

    def _attacks(
        self, names: dict[str, str], problems: dict[str, str], solutions: dict[str, str]
    ) -> dict[str, Condition]:
        """An attack for each key; `names` are what the seeds come from."""
        form = self._rule.form
        prompts = {}
        for key, problem in problems.items():
            text = self._prompts.writer(form, problem, solutions[key])
            chat = self._tokenizer.chat_template is not None
            prompts[key] = self._tokenizer.encode_prompt([{"role": "user", "content": text}] if chat else text)
        done = self._ask(prompts, "condition", lambda _: self._rule.sampling, names)
        made = {}
        for key, completion in done.items():
            condition = attack(self._tokenizer.decode(completion.token_ids), form, self._writer)
            condition.error = completion.error
            condition.ok = condition.ok and completion.error is None
            made[key] = condition
        return made

    def _ask(
        self, prompts: dict[str, list[int]], what: str, sampling_of: Callable[[str], Sampling],
        names: dict[str, str] | None = None,
    ) -> dict[str, Completion]:  # fmt: skip
        """What the engine says to each prompt; one that leaves no room in the context gives an error."""
        if self._engine is None:
            self._engine = self._open_engine()
        engine, found = self._engine, {}
        for key, ids in prompts.items():
            if len(ids) >= engine.context_length:
                told = f"the writer's prompt of {len(ids)} tokens does not fit a context of {engine.context_length}"
                found[key] = Completion(key, error=told)
                continue
            seed = self._rule.seed_of(f"{what}/{(names or {}).get(key, key)}")
            self.prompt_tokens += len(ids)
            engine.submit(Request(key, ids, sampling_of(key), seed))
        while engine.pending:
            for completion in engine.collect():
                self.sampled_tokens += len(completion.token_ids)
                found[completion.key] = completion
        return found


def read_conditions(records: Iterable[Record]) -> list[StoredCondition]:
    """Conditions kept by an earlier run; other kinds are left. Raises DataError for two of one task and version."""
    found: dict[tuple[str, int], StoredCondition] = {}
    for record in records:
        if record.kind == "condition":
            one = record.view(StoredCondition)
            if found.setdefault((one.task, one.statement_version), one) is not one:
                raise record.bad(f"{one.task!r} has a condition already", "task")
    return list(found.values())


def _answering(task: Task) -> Sampling:
    """How a task is answered where nobody says otherwise."""
    import msgspec

    try:
        return msgspec.convert({k: v for k, v in (task.sampling or {}).items() if k != "logprobs"}, Sampling)
    except msgspec.ValidationError as error:
        raise DataError(str(error), field="sampling") from None
