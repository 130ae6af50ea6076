"""The options of `strop calibrate`, and what they mean together."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from strop.core.errors import UsageError
from strop.core.streams import read_records
from strop.core.tasks.adaptive import Plan, cheapest_plan, confidence_plan, default_round_size, fixed_errors
from strop.core.tasks.calibration import Rule
from strop.core.tasks.prior import NAMED, BetaMixture, count_records, fit_mixture, parse_components, with_doubt

DEFAULT_ATTEMPTS = 8

Band = Annotated[
    str | None,
    typer.Option(
        "--band",
        metavar="LO:HI",
        help="Accept pass rates from LO to HI, both included. [default: 0.2:0.8]",
        show_default=False,
    ),
]
RuleName = Annotated[
    str | None,
    typer.Option(
        "--rule",
        metavar="NAME",
        help="Accept by a named rule instead: frognano-half (p = 1/2; with an odd number of attempts the two nearest "
        "rates), frognano-round5 (0 < p <= 1/2), learnable (0 < p < 1).",
        show_default=False,
    ),
]
Accepted = Annotated[
    bool,
    typer.Option("--accepted", help="Let out only accepted tasks and their rollouts; other records still pass."),
]
AtLeast = Annotated[
    int, typer.Option("--at-least", metavar="N", min=0, help="Exit 1 if fewer than N tasks are accepted. 0: no check.")
]
Contiguous = Annotated[
    bool,
    typer.Option(
        "--contiguous",
        help="The input holds each task together with all its attempts, as `rollout` writes it: a task leaves when the "
        "next one begins, and memory is bounded by one task's attempts.",
    ),
]
Metrics = Annotated[
    bool,
    typer.Option("--metrics", help="Add metric records: pass@1, avg@k, pass@k with bootstrap intervals over tasks."),
]
Ks = Annotated[
    str | None,
    typer.Option(
        "--k",
        metavar="K[,K]",
        help="The k of --metrics, e.g. 1,4,8. [default: 1 and the fewest attempts any task has]",
        show_default=False,
    ),
]
Adaptive = Annotated[
    bool,
    typer.Option(
        "--adaptive",
        help="Attempts in rounds, as many as a task's verdict is worth. Without a model: replay, see above.",
    ),
]
Attempts = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--attempts",
        min=1,
        help=f"Attempts at each task. With --adaptive: be as right as so many would be. [default: {DEFAULT_ATTEMPTS}]",
        show_default=False,
    ),
]
Confidence = Annotated[
    float | None,
    typer.Option(
        "--confidence",
        metavar="P",
        help="--adaptive: stop at a task once its verdict is right with probability P (0.5 to below 1), or at "
        "--max-attempts. [default: the cheapest plan that is as right as -n attempts]",
        show_default=False,
    ),
]
MaxAttempts = Annotated[
    int, typer.Option("--max-attempts", min=0, help="--adaptive: most attempts at one task. 0: twice -n.")
]
RoundSize = Annotated[
    int,
    typer.Option(
        "--round-size",
        min=0,
        help="--adaptive: attempts at a task between two looks at it; fewer save a few more attempts and take more "
        "turns. 0: 4, or half of -n if that is less.",
    ),
]
Prior = Annotated[
    str,
    typer.Option(
        "--prior",
        metavar="NAME|FILE|W:A:B,...",
        help="--adaptive: what is believed of a task's pass rate before its attempts. terminal (fitted to real "
        "attempts of 8 models at 89 terminal tasks), uniform, a mixture of Beta distributions as weight:a:b, or a FILE "
        "of an earlier run (calibrated tasks or rollouts, nothing filtered out) to fit one to.",
    ),
]
Window = Annotated[
    int,
    typer.Option("--window", metavar="N", min=1, help="With a model: tasks in work at a time. It changes speed only."),
]
BootstrapSeed = Annotated[
    int,
    typer.Option("--seed", help="Of the attempts (with the task's id and the sample's index) and of the bootstrap."),
]


@dataclass(frozen=True, slots=True)
class AdaptiveOptions:
    """The options of --adaptive as the user gave them."""

    confidence: float | None
    attempts: int | None
    max_attempts: int
    round_size: int
    prior: str

    def plan(self, rule: Rule) -> Plan:
        """The stopping plan they ask for. Raises UsageError."""
        attempts = self.attempts or DEFAULT_ATTEMPTS
        prior = open_prior(self.prior)
        most = self.max_attempts or 2 * attempts
        size = self.round_size or min(most, default_round_size(attempts))
        if self.confidence is not None:
            return confidence_plan(rule, prior, confidence=self.confidence, max_attempts=most, round_size=size)
        if rule.band is None:
            raise UsageError(f"--rule {rule.name} says nothing of the true rate, so nothing settles it; use --band")
        errors = fixed_errors(rule, prior, attempts)
        return cheapest_plan(rule, prior, errors=errors, max_attempts=most, round_size=size)

    def check_unused(self) -> None:
        """Without --adaptive its options have no meaning. Raises UsageError."""
        given = {"--confidence": self.confidence, "--max-attempts": self.max_attempts, "--round-size": self.round_size}
        named = [name for name, value in given.items() if value]
        if named:
            raise UsageError(f"{named[0]} goes with --adaptive")


def open_prior(text: str) -> BetaMixture:
    """The prior that `--prior` names, spells out, or has fitted to a file. Raises UsageError or DataError."""
    if text in NAMED:
        return NAMED[text]
    if text != "-" and os.path.exists(text):  # noqa: PTH110
        counts = count_records(read_records([text], sys.stdin.buffer))
        if not counts:
            raise UsageError(f"--prior {text}: holds no attempts and no calibrated tasks")
        return with_doubt(fit_mixture(counts), sum(counts.values()))
    if ":" not in text:
        raise UsageError(f"--prior {text}: expected {', '.join(NAMED)}, W:A:B,..., or a file that exists")
    return parse_components(text)


def promise(plan: Plan, rule: Rule, attempts: int) -> str:
    """What a plan costs and gives, for tasks like its prior's, beside a fixed number of attempts."""
    fixed = 1 - fixed_errors(rule, plan.prior, attempts)
    said = (
        f"plan for tasks like the prior {plan.prior.name}: {plan.expected_attempts:.1f} attempts a task, "
        f"{1 - plan.expected_errors:.1%} of verdicts right ({attempts} attempts at each: {fixed:.1%})"
    )
    return said if plan.is_reached else f"{said}; {plan.max_attempts} attempts at most cannot give {plan.asked:.1%}"
