"""Negative conditions: what a frozen model is told so that it solves a problem badly (NSD, sections 1.2 and 1.3).

    solution   an attack on the solution that is trained on, written from problem and solution        [paper, default]
    question   an attack written from the problem alone
    offline    an attack on a solution of the frozen model's own, written once a task and kept
    wiki       no attack: a text that has nothing to do with the problem, said to be useful

An attack counts only if it begins with the literal words that its writer was asked for [code]; one that does not is
neutral: it moves no token, and is counted. (The released code takes such a condition's log-probabilities for 0, which
opens the gate as wide as it goes.)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct

from strop.core.errors import DataError
from strop.core.records import Sampling
from strop.core.seeds import derive_seed
from strop.core.templates import Templates

KINDS = ("solution", "question", "offline", "wiki")
OPENING = "You are a student who"
FOLDER = Path(__file__).parent / "templates"
FIELDS: dict[str, frozenset[str]] = {
    "solution": frozenset({"problem", "solution"}),
    "question": frozenset({"problem"}),
    "negative": frozenset({"problem", "condition"}),
    "wiki": frozenset({"problem", "condition"}),
    "privileged": frozenset({"problem", "reference"}),
}
# How attacks are drawn [code].
WRITING = Sampling(temperature=0.7, top_p=0.9, max_tokens=400)
# An article of fewer characters is no distractor [code].
MIN_ARTICLE = 500

Prompt = str | list[dict[str, Any]]


class Condition(Struct, kw_only=True, omit_defaults=True):
    """A condition, and who wrote it: `student`, `initial`, `given` (it came with the task) or `file`.

    `error`: why there is none, for which the writer is not to blame.
    """

    text: str
    form: str
    writer: str
    ok: bool = True
    error: str | None = None


class StoredCondition(Struct, kw_only=True):
    """A condition as a record of kind `condition`, kept between runs; known by task and statement version."""

    task: str
    text: str
    form: str
    writer: str
    statement_version: int = 1


def shown(condition: Condition) -> Condition | dict[str, Any]:
    """What a rollout says of its condition: an article by its length alone."""
    if condition.form != "wiki":
        return condition
    return {"form": condition.form, "writer": condition.writer, "characters": len(condition.text)}


@dataclass(frozen=True, slots=True)
class ConditionRule:
    """Which conditions, drawn how, and the seed from which each one's own is derived."""

    form: str = "solution"
    sampling: Sampling = WRITING
    seed: int = 0

    def seed_of(self, name: str) -> int:
        """The seed for the condition of this rollout or task."""
        return derive_seed(self.seed, "condition", name)


class Prompts(Templates):
    """The templates of a folder, and ours for what is not in it."""

    def __init__(self, folder: Path | None = None) -> None:
        """Reads and checks them. Raises InputMissing for a folder that is not there, DataError for a bad template."""
        super().__init__(FOLDER, FIELDS, folder)

    def writer(self, form: str, problem: str, solution: str = "") -> str:
        """What the writer of an attack is asked."""
        name = "question" if form == "question" else "solution"
        return self.fill(name, {"problem": problem, "solution": solution})

    def negative(self, prompt: Prompt, condition: Condition) -> Prompt:
        """The task's prompt with the condition in its last user message."""
        name = "wiki" if condition.form == "wiki" else "negative"
        return with_problem(prompt, self.fill(name, {"problem": problem_of(prompt), "condition": condition.text}))

    def privileged(self, prompt: Prompt, reference: str) -> Prompt:
        """The task's prompt with a right solution in its last user message: the self-teacher of OPSD."""
        return with_problem(prompt, self.fill("privileged", {"problem": problem_of(prompt), "reference": reference}))


def is_attack(text: str) -> bool:
    """Whether a writer kept to the opening; it need not be the text's only sentence [code]."""
    return text.strip().startswith(OPENING)


def attack(text: str, form: str, writer: str) -> Condition:
    """What a writer wrote, as a condition; it is not `ok` if it is no attack."""
    # A lone surrogate is no text, and could not be written.
    text = text.strip().encode("utf-8", "replace").decode()
    return Condition(text=text, form=form, writer=writer, ok=is_attack(text))


def distractor(articles: list[str], rule: ConditionRule, task: str) -> Condition:
    """One of the articles, by the rule's seed and the task's id: the same for each attempt at a task."""
    index = rule.seed_of(task) % len(articles)
    return Condition(text=articles[index], form="wiki", writer="file")


def problem_of(prompt: Prompt) -> str:
    """The problem as the policy was told it: the text of the last user message. Raises DataError where there is none.

    >>> problem_of([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}])
    '2 + 2?'
    """
    if isinstance(prompt, str):
        return prompt
    content = prompt[_last_user(prompt)].get("content")
    if not isinstance(content, str):
        raise DataError("the last user message has no plain text", field="prompt")
    return content


def with_problem(prompt: Prompt, problem: str) -> Prompt:
    """The prompt with the text of its last user message replaced."""
    if isinstance(prompt, str):
        return problem
    place = _last_user(prompt)
    return [{**one, "content": problem} if i == place else one for i, one in enumerate(prompt)]


def _last_user(messages: list[dict[str, Any]]) -> int:
    for i in range(len(messages) - 1, -1, -1):
        if messages[i].get("role") == "user":
            return i
    raise DataError("no user message, which is where a condition would stand", field="prompt")
