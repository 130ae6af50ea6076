"""strop calibrate: attempts in, verdicts on their tasks out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from strop.cli import calibrate_options as opt
from strop.cli import episode_options as episodes
from strop.cli import model_options as models
from strop.cli import rollout_options as sampling
from strop.cli.session import Session, tool
from strop.core.errors import DataError, OutputFailed, Unavailable, UsageError
from strop.core.records import Record
from strop.core.rollout.attempts import SamplingChoice
from strop.core.tasks.calibration import ACCEPT, Rule, choose_rule
from strop.core.tasks.ledger import Given, Ledger
from strop.core.tasks.pass_metrics import parse_ks, pass_estimates
from strop.core.tasks.verdicts import Verdicts

if TYPE_CHECKING:
    from strop.core.engines.open import EngineOptions
    from strop.core.envs.rooms import RoomOptions
    from strop.core.tasks.adaptive import Plan
    from strop.core.tasks.attempter import Attempter
    from strop.core.tasks.campaign import Case


@tool(reads=("task", "rollout"), writes=("task", "rollout", "metric"), slow=True)
def command(
    io: Session,
    band: opt.Band = None,
    rule: opt.RuleName = None,
    accepted: opt.Accepted = False,
    at_least: opt.AtLeast = 0,
    contiguous: opt.Contiguous = False,
    metrics: opt.Metrics = False,
    k: opt.Ks = None,
    attempts: opt.Attempts = None,
    adaptive: opt.Adaptive = False,
    confidence: opt.Confidence = None,
    max_attempts: opt.MaxAttempts = 0,
    round_size: opt.RoundSize = 0,
    prior: opt.Prior = "terminal",
    model: models.Model = None,
    window: opt.Window = 64,
    seed: opt.BootstrapSeed = 0,
    temperature: sampling.Temperature = None,
    top_p: sampling.TopP = None,
    top_k: sampling.TopK = None,
    max_tokens: sampling.MaxTokens = None,
    stop: sampling.Stop = None,
    adapter: models.Adapter = None,
    engine: models.EngineName = "auto",
    endpoint: models.Endpoint = None,
    device: models.Device = "auto",
    dtype: models.Dtype = "auto",
    gpu_memory: models.GpuMemory = None,
    max_context: models.MaxContext = None,
    offline: models.Offline = False,
    sandbox: episodes.SandboxKind = "auto",
    image: episodes.Image = None,
    tools: episodes.ToolsName = "auto",
    max_turns: episodes.MaxTurns = None,
    max_time: episodes.MaxTime = 3000.0,
    compact: episodes.Compact = None,
) -> None:
    """Find the tasks at the edge of what a model can do.

    Counts the rollouts of each task and writes the task with a verdict: too_hard, too_easy, accept, or invalid where no
    attempt counts. A task that never came as a record leaves as a stub with its id. Everything else passes through in
    order. With --model (or --endpoint) the attempts are made here, and each task is followed by its group.

    An attempt succeeded if `success` says so, or without it if `reward` is at least 1. One with `error` failed by the
    machinery: it is counted apart and shrinks the number of attempts. Attempts at another statement_version than the
    task's (without a task: than the newest) are stale and do not count.

    --adaptive makes attempts in rounds and stops at a task when more are not worth their price. A verdict is wrong when
    the true pass rate lies in another region of the band; the prior says how likely each rate is; so the rule that
    needs the fewest attempts for a share of right verdicts can be computed (optimal stopping over the counts), and it
    is: as right as -n attempts at each task would be, for fewer. With --confidence a task stops once its own verdict is
    that probable. --dry-run shows the plan: where it stops, what it costs, how often it is right. All this holds for
    tasks like the prior's; the first attempts are tested against it, and a warning says when they do not look like it.
    Without a model the attempts of the input are replayed: those that the plan would have made count, in their order.

    After --adaptive a pass rate is what made the attempts stop and leans away from the middle; `confidence` is free of
    that.

    \b
    Examples:
      strop rollout --model M -n 8 tasks.jsonl | strop calibrate --accepted --only task > edge.jsonl
      strop calibrate --model M --adaptive -n 16 --accepted tasks.jsonl > edge.jsonl
      strop calibrate --adaptive --dry-run -n 16 < /dev/null
      strop calibrate --metrics --k 1,4,8 --only metric rollouts.jsonl
      strop calibrate --rule frognano-half --at-least 300 --only task rollouts.jsonl

    \b
    Input fields:
      rollout: id, task, success, reward, error, statement_version, policy
      task: id, statement_version, and to make attempts prompt, env, verifier, reference, sampling

    \b
    Output fields:
      task: calibration {successes, attempts, errors, stale, pass_rate, low, high (95 % Wilson
      interval), learnability p(1-p), verdict, rule, admits, policy}; with --adaptive also
      {confidence, settled, prior, unused}
      rollout (with a model): as `strop rollout` writes it
      metric: pass@1, avg@k, pass@k, attempts_saved

    \b
    Memory:
      needs all input: the tasks, a count and the ids of attempts of each; rollouts wait in memory up
      to 16 MiB, then in a temporary file (not at all with --only task). --contiguous: one task's.
      With a model: the model, and the attempts of the tasks in work.
    """
    chosen = choose_rule(band, rule)
    options = opt.AdaptiveOptions(confidence, attempts, max_attempts, round_size, prior)
    makes = model is not None or bool(endpoint)
    if k is not None and not metrics:
        raise UsageError("--k goes with --metrics")
    ks = None if not metrics else [] if k is None else parse_ks(k)
    _check(options, makes=makes, adaptive=adaptive, metrics=metrics, contiguous=contiguous)
    plan = options.plan(chosen) if adaptive else None
    fixed = attempts or opt.DEFAULT_ATTEMPTS
    stops = None if stop is None else tuple(text.replace("\\n", "\n") for text in stop)
    choice = SamplingChoice(temperature, top_p, top_k, max_tokens, stops)
    policy = None
    if makes:
        policy = models.engine_options(
            model=model, adapter=adapter, engine=engine, endpoint=endpoint, device=device, dtype=dtype,
            gpu_memory=gpu_memory, max_context=max_context, offline=offline, seed=seed,
        )  # fmt: skip
    if io.dry_run:
        _dry_run(io, chosen, plan, fixed, policy, choice)
        return
    if plan is not None:
        io.note(opt.promise(plan, chosen, fixed))
    verdicts = Verdicts(chosen, plan, replay=not makes)
    if policy is None:
        _judge(io, verdicts, accepted=accepted, contiguous=contiguous)
    else:
        rooms = episodes.room_options(
            sandbox=sandbox, image=image, tools=tools, max_turns=max_turns, max_time=max_time, compact=compact
        )
        size = plan.max_attempts if plan else fixed
        with open_attempter(io, policy, choice, rooms, seed=seed, group_size=size) as maker:
            _make_and_judge(io, maker, verdicts, fixed=fixed, window=window, accepted=accepted, seed=seed)
    _report(io, verdicts, fixed, ks, seed)
    if verdicts.num_accepted < at_least:
        io.say_no(f"{verdicts.num_accepted} tasks accepted, fewer than --at-least {at_least}")


def _check(options: opt.AdaptiveOptions, *, makes: bool, adaptive: bool, metrics: bool, contiguous: bool) -> None:
    if not adaptive:
        options.check_unused()
    if options.attempts is not None and not (makes or adaptive):
        raise UsageError("-n says how many attempts to make: it goes with --model, --endpoint or --adaptive")
    if makes and adaptive and metrics:
        raise UsageError("--metrics needs attempts that no stopping has chosen; leave --adaptive out")
    if makes and contiguous:
        raise UsageError("--contiguous is about attempts that come in, and with a model they are made here")


@contextmanager
def open_attempter(
    io: Session, policy: EngineOptions, choice: SamplingChoice, rooms: RoomOptions, *, seed: int, group_size: int
) -> Iterator[Attempter]:
    """What makes attempts (the `Attempts` of core/tasks/adaptive.py): loads the model when the first one is wanted."""
    from strop.core.tasks.attempter import Attempter

    with Attempter(policy, choice, rooms, seed=seed, group_size=group_size, on_bad=io.reject) as maker:
        yield maker
        tally = maker.tally
        if tally.rollouts:
            io.note(f"{tally.prompt_tokens} prompt and {tally.sampled_tokens} sampled tokens")
        if tally.rollouts and tally.errors == tally.rollouts:
            raise Unavailable(f"every attempt failed by the machinery: {tally.first_error}")


def _judge(io: Session, verdicts: Verdicts, *, accepted: bool, contiguous: bool) -> None:
    """Attempts that came in."""
    ledger = Ledger(contiguous=contiguous, hold_rollouts=io.wants("rollout"))
    for record in io.records():
        try:
            if ledger.is_next(record):
                _let_out(io, ledger.release(verdicts), accepted)
            ledger.add(record)
        except DataError as error:
            io.reject(error, record)
    _let_out(io, ledger.release(verdicts), accepted)
    if ledger.num_repeats:
        io.note(f"{ledger.num_repeats} task records came before with the same statement and leave once")


def _let_out(io: Session, given: Iterable[Given], accepted: bool) -> None:
    for item in given:
        if accepted and item.accepted is False:
            continue
        if item.made:
            io.emit(item.record)
        else:
            io.write(item.record)


def _make_and_judge(
    io: Session, maker: Attempter, verdicts: Verdicts, *, fixed: int, window: int, accepted: bool, seed: int
) -> None:
    """Attempts made here, written task by task; an interruption keeps those of unfinished tasks, too."""
    from strop.core.tasks.campaign import Campaign, Case, FixedNumber, read_earlier

    schedule = verdicts.plan or FixedNumber(fixed)
    earlier = {} if io.resumed is None else read_earlier(io.resumed.path)
    campaign = Campaign(maker, schedule, window=window, on_bad=io.reject, earlier=earlier, check=maker.check)
    provenance: dict[str, Any] = {"seed": seed, "attempts": fixed, "adaptive": verdicts.plan is not None}
    num_foreign = 0
    with io.progress("tasks") as progress:
        try:
            for item in campaign.run(io.records()):
                if isinstance(item, Case):
                    _let_out_case(io, item, verdicts, accepted, provenance | {"engine": maker.engine_name})
                    progress.add()
                else:
                    num_foreign += item.kind == "rollout"
                    io.write(item)
        except BaseException as failure:
            if not isinstance(failure, (BrokenPipeError, OutputFailed)):
                for case in campaign.unfinished():
                    _write_rollouts(io, case, None, provenance | {"engine": maker.engine_name})
            raise
    if num_foreign:
        io.warn(f"{num_foreign} rollouts came in and were passed on uncounted: with a model the attempts are made here")


def _let_out_case(io: Session, case: Case, verdicts: Verdicts, accepted: bool, provenance: dict[str, Any]) -> None:
    fields = verdicts.decide(case.progress.tally, case.policies)
    if accepted and fields["verdict"] != ACCEPT:
        return
    if not case.was_written:
        case.record.set(calibration=fields)
        io.write(case.record)
    # Members that a killed run wrote do not say how many they are; no member of the group does then.
    whole = case.was_written or not case.resumed or verdicts.plan is None
    _write_rollouts(io, case, case.progress.made if whole else None, provenance)


def _write_rollouts(io: Session, case: Case, group_size: int | None, provenance: dict[str, Any]) -> None:
    for rollout in case.rollouts:
        if group_size is not None:
            rollout.set(group_size=group_size)
        elif provenance["adaptive"]:
            rollout.fields.pop("group_size", None)
        io.emit(rollout, provenance)


def _report(io: Session, verdicts: Verdicts, fixed: int, ks: list[int] | None, seed: int) -> None:
    """Warnings, the summary line, and the metric records. `ks`: None for no metrics, empty for the default."""
    for warning in verdicts.warnings():
        io.warn(warning)
    io.note(verdicts.summary())
    if verdicts.plan is not None:
        _report_savings(io, verdicts, fixed)
    if ks is None:
        return
    fewest = min((len(outcomes) for outcomes in verdicts.outcomes if outcomes), default=1)
    for found in pass_estimates(verdicts.outcomes, ks or [fewest], seed):
        _metric(
            io, verdicts, found.name, found.value, low=found.low, high=found.high, n=found.num_tasks,
            left_out=found.num_left_out, seeds=[seed],
        )  # fmt: skip


def _report_savings(io: Session, verdicts: Verdicts, fixed: int) -> None:
    tasks = sum(1 for outcomes in verdicts.outcomes if outcomes)
    base = verdicts.num_attempts if verdicts.replay else fixed * tasks
    saved = 1 - verdicts.used / base if base else None
    beside = "the attempts that came in" if verdicts.replay else f"{fixed} attempts at each task"
    said = [
        f"{verdicts.used} attempts used" + (f", {saved:.1%} fewer than {beside} ({base})" if saved is not None else "")
    ]
    if verdicts.replay and tasks:
        said.append(f"{verdicts.num_changed} verdicts differ from those of all attempts")
    if verdicts.num_unsettled:
        said.append(f"{verdicts.num_unsettled} tasks ran out of attempts before they were settled")
    io.note("adaptive: " + "; ".join(said))
    _metric(io, verdicts, "attempts_saved", saved, n=tasks, used=verdicts.used, attempts=base, beside=beside)


def _metric(io: Session, verdicts: Verdicts, name: str, value: float | None, **more: Any) -> None:
    model = verdicts.policy_name()
    known = {field: found for field, found in more.items() if found is not None}
    io.emit(Record.make("metric", {"name": name, "value": value, **known, **({"of": model} if model else {})}))


def _dry_run(
    io: Session, rule: Rule, plan: Plan | None, fixed: int, policy: EngineOptions | None, choice: SamplingChoice
) -> None:
    """One `plan` record: the stopping rule, and with a model attempts and tokens."""
    from strop.core.tasks.adaptive import fixed_errors

    counts = _count_work(io, policy, choice)
    fields: dict[str, Any] = {"rule": rule.name, "tasks": counts["tasks"], "rollouts": counts["rollouts"]}
    expected, most = float(fixed), fixed
    if plan is not None:
        expected, most = plan.expected_attempts, plan.max_attempts
        fields |= {
            "prior": plan.prior.name, "asked": plan.asked, "max_attempts": most, "round_size": plan.round_size,
            "attempts_per_task": expected, "right": 1 - plan.expected_errors, "fixed_attempts": fixed,
            "fixed_right": 1 - fixed_errors(rule, plan.prior, fixed), "stops": plan.describe(),
        }  # fmt: skip
    if policy is not None:
        fields |= {
            "attempts": round(counts["tasks"] * expected), "attempts_at_most": counts["tasks"] * most,
            "prompt_tokens": counts["prompt_tokens"], "sampled_tokens_at_most": counts["max_tokens"] * most,
        }  # fmt: skip
    io.emit(Record.make("plan", fields))


def _count_work(io: Session, policy: EngineOptions | None, choice: SamplingChoice) -> dict[str, int]:
    from strop.core.records import Task

    tokenizer = None
    counts = {"tasks": 0, "rollouts": 0, "prompt_tokens": 0, "max_tokens": 0}
    for record in io.records():
        counts["tasks"] += record.kind == "task"
        counts["rollouts"] += record.kind == "rollout"
        if policy is None or record.kind != "task":
            continue
        if tokenizer is None:
            from strop.core.engines.open import open_tokenizer

            tokenizer = open_tokenizer(policy)
        task = record.view(Task)
        counts["prompt_tokens"] += len(tokenizer.encode_prompt(task.prompt or ""))
        try:
            counts["max_tokens"] += choice.for_task(task).max_tokens
        except msgspec.ValidationError as error:
            raise record.bad(str(error), "sampling") from None
    return counts
