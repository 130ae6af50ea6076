"""strop rollout: tasks in, rollouts out."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from strop.cli import episode_options as episodes
from strop.cli import model_options as models
from strop.cli import rollout_options as opt
from strop.cli.session import Session, tool
from strop.core.errors import DataError, Unavailable, UsageError
from strop.core.records import Metric, Record, Task
from strop.core.rollout.attempts import AttemptMaker, SamplingChoice, Tally
from strop.core.rollout.grading import Grader
from strop.core.streams import Output, read_records
from strop.core.tasks.rewards import SCALE, RewardRule

if TYPE_CHECKING:
    from strop.core.engines.open import EngineOptions
    from strop.core.envs.rooms import RoomOptions
    from strop.core.rollout.horizon_state import SharedHorizon
    from strop.core.rollout.loop import Work
    from strop.core.tasks.verifiers import Verifiers

@tool(reads=("task", "rollout"), writes=("rollout", "horizon"), slow=True)
def command(
    io: Session,
    model: models.Model = None,
    samples: opt.Samples = 1,
    seed: opt.Seed = 0,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    max_tokens: opt.MaxTokens = None,
    stop: opt.Stop = None,
    concurrency: opt.Concurrency = 0,
    unordered: opt.Unordered = False,
    rescore: opt.Rescore = False,
    tasks: opt.TasksFile = None,
    metrics: opt.MetricsFile = None,
    first: opt.First = 0,
    sandbox: episodes.SandboxKind = "auto",
    image: episodes.Image = None,
    tools: episodes.ToolsName = "auto",
    max_turns: episodes.MaxTurns = None,
    max_time: episodes.MaxTime = 3000.0,
    compact: episodes.Compact = None,
    horizon: opt.HorizonName = None,
    horizon_state: opt.HorizonState = None,
    horizon_every: opt.HorizonEvery = 0,
    horizon_set: opt.HorizonSet = "",
    reward: opt.RewardName = None,
    reward_scale: opt.RewardScale = SCALE,
    length_penalty: opt.LengthPenalty = 0.0,
    free_tokens: opt.FreeTokens = 0,
    truncated_reward: opt.TruncatedReward = None,
    routing: opt.RoutingFile = None,
    adapter: models.Adapter = None,
    engine: models.EngineName = "auto",
    endpoint: models.Endpoint = None,
    device: models.Device = "auto",
    dtype: models.Dtype = "auto",
    gpu_memory: models.GpuMemory = None,
    max_context: models.MaxContext = None,
    offline: models.Offline = False,
) -> None:
    """Let a model attempt tasks and verify what it did.

    Each task passes through and is followed by its group: -n rollouts, each sampled under a seed of its own and judged
    by the task's verifier. A rollout holds the exact token ids, the log-probability of each sampled token, the reward
    and why it stopped. Where the machine failed and not the policy, `error` says so and there is no reward.

    The transformers engine gives the same bytes for the same seed, options and model, whatever the concurrency, the
    neighbours or a --resume. With the engines vllm and server repeatability is what those engines promise.

    --reward makes the reward of the outcome and of the assertions in the verifier's report. With --rescore it grades
    stored rollouts by what they hold, and no verifier runs; `majority` and `self-certainty` grade whole groups and need
    no label.

    Tasks of the envs shell, command, functions, textworld, alfworld and appworld are episodes of many turns, bounded by
    --max-turns, --max-time and --max-context, or by a horizon that follows experience: --horizon elastic.

    --routing FILE keeps, for a mixture of experts, which experts predicted each token (engines transformers, and vllm
    on a GPU): in a chunk, `routing` says where in FILE, whose name `train` looks up from its own folder. FILE is only
    appended to, so that --resume may go on with it. A rollout without its routing ends the run.

    \b
    Examples:
      strop synth-tasks arithmetic -n 24 | strop rollout --model M -n 8 --seed 1 > rollouts.jsonl
      strop rollout --endpoint http://localhost:8000 -n 16 tasks.jsonl
      strop rollout --model M -n 8 --resume rollouts.jsonl tasks.jsonl
      strop synth-tasks harbor:DIR | strop rollout --model M -n 4 --reward assertions > trials.jsonl
      strop rollout --model M --horizon elastic --horizon-state h.json tasks.jsonl > rollouts.jsonl
      strop rollout --rescore rollouts.jsonl > again.jsonl
      strop rollout --rescore --reward assertions --reward-scale 6 trials.jsonl > graded.jsonl
      strop rollout --rescore --reward majority rollouts.jsonl | strop advantage > credited.jsonl

    \b
    Input fields:
      task: id, prompt, env, verifier, reference, sampling, statement_version
      rollout (with --rescore): id, task, response; with --reward also success, assertions
      ({name, status}), report_error, stop, error, chunks (sampled); for a group group,
      group_size, sample, chunks (token_ids, sampled), policy

    \b
    Output fields:
      rollout: id, task, group, group_size, sample, seed, policy, sampling, chunks, response,
      turns, horizon, steps, stitching, reward, success, assertions, verdict, stop, error,
      provenance; with --reward grading {rule, source, cause, passed, total, scale} or {rule,
      source, votes, agreed, label, tokens}; with --routing chunks have routing {path, offset,
      shape, dtype}; with --compact compaction {done, failed}
      horizon (with --horizon): as `strop horizon` writes it

    \b
    Memory:
      the model, and the rollouts in flight (with --routing theirs too, L x K bytes a token);
      with --rescore the tasks seen; by group the largest group, too.
    """
    grader = None
    shaped = length_penalty or free_tokens or truncated_reward is not None
    if shaped and (reward is None or reward == "majority" or reward == "self-certainty"):
        raise UsageError("--length-penalty, --free-tokens and --truncated-reward go with --reward pass")
    if reward == "majority" or reward == "self-certainty":
        if not rescore:
            raise UsageError(f"--reward {reward} is given to whole groups of stored rollouts: it goes with --rescore")
    elif reward is not None:
        grader = Grader(RewardRule(reward, reward_scale, length_penalty, free_tokens, truncated_reward))
    options = models.engine_options(
        model=model, adapter=adapter, engine=engine, endpoint=endpoint, device=device, dtype=dtype,
        gpu_memory=gpu_memory, max_context=max_context, offline=offline, seed=seed,
    )  # fmt: skip
    if rescore:
        if routing is not None:
            raise UsageError("--routing records what a model does; with --rescore none samples")
        if reward == "majority" or reward == "self-certainty":
            _grade_groups(io, tasks, reward, options)
        else:
            _rescore(io, tasks, grader)
        return
    if tasks is not None:
        raise UsageError("--tasks goes with --rescore")
    options = replace(options, record_routing=routing is not None)
    stops = None if stop is None else tuple(text.replace("\\n", "\n") for text in stop)
    choice = SamplingChoice(temperature, top_p, top_k, max_tokens, stops)
    if io.dry_run:
        _plan(io, options, choice, samples)
        return
    shared = _open_horizon(horizon, horizon_state, horizon_every, horizon_set, max_turns)
    rooms = episodes.room_options(
        sandbox=sandbox, image=image, tools=tools, max_turns=max_turns, max_time=max_time, compact=compact,
        cap=None if shared is None else lambda: shared.applied,
    )  # fmt: skip
    _sample(
        io, options, choice, samples=samples, seed=seed, concurrency=concurrency, ordered=not unordered, first=first,
        metrics=metrics, grader=grader, rooms=rooms, horizon=shared, routing=routing,
    )  # fmt: skip


def _open_horizon(
    name: str | None, state: Path | None, every: int, changes: str, max_turns: int | None
) -> SharedHorizon | None:
    """The horizon that the options name, or None."""
    if name is None:
        if state is not None or every or changes:
            raise UsageError("--horizon-state, --horizon-every and --horizon-set go with --horizon")
        return None
    if state is None:
        raise UsageError("--horizon needs a --horizon-state FILE, in which the next run finds where it stands")
    if max_turns is not None:
        raise UsageError("--max-turns and --horizon are two ways to bound the turns of an episode; give one")
    from strop.core.rollout.horizon_state import SharedHorizon, parse_plan

    return SharedHorizon(state, parse_plan(name, changes, every))


def _sample(
    io: Session, options: EngineOptions, choice: SamplingChoice, *,
    samples: int, seed: int, concurrency: int, ordered: bool, first: int, metrics: Path | None, grader: Grader | None,
    rooms: RoomOptions, horizon: SharedHorizon | None, routing: Path | None,
) -> None:  # fmt: skip
    from strop.core.engines.open import open_engine, open_tokenizer
    from strop.core.envs.rooms import Rooms
    from strop.core.rollout.loop import RolloutLoop
    from strop.core.rollout.routing import open_log
    from strop.core.tasks.verifiers import open_verifiers

    before, rest = _until_first_task(io)
    for record in before:
        io.write(record)
    if rest is None:
        # No task, no model: nothing is loaded for an empty stream.
        return
    tokenizer = open_tokenizer(options)
    with (
        open_engine(options) as engine, open_verifiers() as verifiers, closing(Rooms(rooms)) as opened,
        open_log(engine, routing) as log, io.progress("rollouts") as progress,
    ):  # fmt: skip
        maker = AttemptMaker(engine, tokenizer, seed=seed, choice=choice, rooms=opened)
        in_flight = concurrency or engine.concurrency
        loop = RolloutLoop(
            log or engine, maker, verifiers.verify, concurrency=in_flight, ordered=ordered, first=first,
            on_bad=io.reject,
        )  # fmt: skip
        io.detail(
            f"engine {engine.name}, model {engine.info.model} at {engine.info.revision}, adapter {engine.info.adapter}"
        )
        provenance = {"seed": seed, "samples": samples, "engine": engine.name}
        started = time.monotonic()
        for given in loop.run(_work(io, rest, maker, verifiers, samples)):
            if given.made:
                if log is not None:
                    log.attach(given.record)
                if grader is not None:
                    grader.grade(given.record)
                moved = None if horizon is None else horizon.count(given.record)
                io.emit(given.record, provenance)
                _write_move(io, moved)
                progress.add()
            else:
                io.write(given.record)
        if horizon is not None:
            _write_move(io, horizon.end())
        _say_grading(io, grader)
        _report(io, maker.tally, time.monotonic() - started, metrics)


def _write_move(io: Session, moved: dict[str, Any] | None) -> None:
    """The horizon record of a step that has ended."""
    if moved is not None:
        io.emit(Record.make("horizon", moved))
        io.note(f"horizon: {moved['before']:.4g} turns before, {moved['after']:.4g} after ({moved['reason']})")


def _until_first_task(io: Session) -> tuple[list[Record], Iterator[Record] | None]:
    """The records before the first task, and all from there on (None if no task comes)."""
    before: list[Record] = []
    records = io.records()
    for record in records:
        if record.kind == "task":
            return before, _again(record, records)
        before.append(record)
    return before, None


def _again(first: Record, rest: Iterator[Record]) -> Iterator[Record]:
    yield first
    yield from rest


def _work(
    io: Session, records: Iterator[Record], maker: AttemptMaker, verifiers: Verifiers, samples: int
) -> Iterator[Work]:
    from strop.core.rollout.loop import Work

    groups: set[str] = set()
    for record in records:
        if record.kind != "task":
            yield Work(record)
            continue
        try:
            task = record.view(Task)
            group = maker.group_of(task)
            if group in groups:
                raise record.bad(f"task {task.id!r} came before in this input", "id")
            verifiers.check(record, task)
        except DataError as error:
            io.reject(error, record)
            continue
        groups.add(group)
        done = set() if io.resumed is None else io.resumed.ids
        missing = tuple(i for i in range(samples) if ("rollout", f"{group}/{i}") not in done)
        yield Work(record, task, missing, samples)


def _report(io: Session, tally: Tally, seconds: float, metrics: Path | None) -> None:
    rate = f"{tally.successes}/{tally.scored} passed" if tally.scored else "none scored"
    errors = f", {tally.errors} failed by the machinery ({tally.first_error})" if tally.errors else ""
    tokens = f"{tally.prompt_tokens} prompt and {tally.sampled_tokens} sampled tokens"
    io.note(f"{tally.rollouts} rollouts, {rate}{errors}; {tokens} in {seconds:.1f} s")
    if tally.cancelled.number:
        io.note(
            f"{tally.cancelled.number} cancelled after {tally.cancelled.mean()} on average; those that finished took "
            f"{tally.finished.mean()}"
        )
    if metrics is not None:
        values: dict[str, float | int | None] = {
            "rollouts": tally.rollouts, "rollout_errors": tally.errors, "cancelled": tally.cancelled.number,
            "prompt_tokens": tally.prompt_tokens,
            "sampled_tokens": tally.sampled_tokens, "rollout_seconds": round(seconds, 3),
            "pass_rate": tally.successes / tally.scored if tally.scored else None,
            **{f"stop_{reason}": count for reason, count in sorted(tally.stops.items())},
        }  # fmt: skip
        with Output(path=metrics, append=True) as output:
            for name, value in values.items():
                output.write(io.stamped(Record.make("metric", Metric(name=name, value=value, n=tally.rollouts))))
    if tally.rollouts and tally.errors == tally.rollouts:
        raise Unavailable(f"every rollout failed by the machinery: {tally.first_error}")


def _plan(io: Session, options: EngineOptions, choice: SamplingChoice, samples: int) -> None:
    """--dry-run: counts, and tokens bounded by each task's max_tokens."""
    from strop.core.engines.open import open_tokenizer

    tokenizer = None
    num_tasks = prompt_tokens = most_sampled = 0
    for record in io.records():
        if record.kind != "task":
            continue
        task = record.view(Task)
        tokenizer = tokenizer or open_tokenizer(options)
        num_tasks += 1
        prompt_tokens += len(tokenizer.encode_prompt(task.prompt or ""))
        try:
            most_sampled += choice.for_task(task).max_tokens * samples
        except msgspec.ValidationError as error:
            raise record.bad(str(error), "sampling") from None
    io.emit(
        Record.make(
            "plan",
            {
                "tasks": num_tasks,
                "rollouts": num_tasks * samples,
                "prompt_tokens": prompt_tokens,
                "prompt_tokens_unshared": prompt_tokens * samples,
                "sampled_tokens_at_most": most_sampled,
            },
        )
    )


def _say_grading(io: Session, grader: Grader | None) -> None:
    for line in grader.tally.lines(grader.rule) if grader is not None else ():
        io.note(line)


def _grade_groups(
    io: Session, tasks: Path | None, reward: Literal["majority", "self-certainty"], options: EngineOptions
) -> None:
    from strop.core.rollout.group_rewards import GroupGrader, GroupRule, Majority, SelfCertainty
    from strop.core.rollout.rescore import KnownTasks
    from strop.core.tasks.verifiers import open_verifiers

    with open_verifiers() as verifiers:
        known = KnownTasks()
        rule: GroupRule = Majority(verifiers, known) if reward == "majority" else SelfCertainty(options)
        for record in _read_tasks(tasks):
            known.add(record)
        grader = GroupGrader(rule, known, on_bad=io.reject)
        for record in grader.run(io.records()):
            io.write(record)
    for line in grader.lines():
        io.note(line)


def _read_tasks(file: Path | None) -> Iterator[Record]:
    records = read_records([str(file)], sys.stdin.buffer) if file else ()
    return (record for record in records if record.kind == "task")


def _rescore(io: Session, tasks: Path | None, grader: Grader | None) -> None:
    from strop.core.rollout.rescore import Rescorer
    from strop.core.tasks.verifiers import open_verifiers

    with open_verifiers() as verifiers:
        rescorer = Rescorer(verifiers.verify)
        for record in _read_tasks(tasks):
            rescorer.add_task(record)
        rescore = rescorer.rescore if grader is None else grader.grade
        handle: dict[str, Callable[[Record], None]] = {"task": rescorer.add_task, "rollout": rescore}
        for record in io.records():
            try:
                if record.kind in handle:
                    handle[record.kind](record)
            except DataError as error:
                io.reject(error, record)
                continue
            io.write(record)
    if grader is not None:
        _say_grading(io, grader)
        return
    io.note(
        f"{rescorer.num_rescored} rollouts verified again, {rescorer.num_changed} rewards changed"
        + (f", {rescorer.num_left} without a response left as they were" if rescorer.num_left else "")
    )
