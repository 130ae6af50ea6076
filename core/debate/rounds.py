"""The debate on a batch of examples: rounds of support, objection and guidance, then the verdict (B3, eq. 4 [paper]).

In a round both sides are asked at once, from the request, the retrieved skills, what was said before, and the judge's
last guidance. Neither hears the other of the same round. Which of them is shown first is drawn anew for each round from
the seed, since judges favour a place [earlier work FairEval]. A judge that gives no readable verdict is asked again, up
to `rechecks` times ("unstable cases are rechecked" [paper]). How many rounds it does not say; 2 is ours [inferred].

Variants, as the paper ablates them: "no-debate", one pass by the router alone; "no-judge", no guidance, and the vote
that was spoken last in the last round is the verdict [paper: "last round is the verdict"; which vote is inferred].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import asdict

from strop.core.debate.prompts import NOTHING, Prompts, agent_lines, skill_lines
from strop.core.debate.replies import Question, Reply
from strop.core.debate.retrieval import Found, example_text, retrieve
from strop.core.debate.roles import Cast
from strop.core.debate.skills import Bank
from strop.core.debate.verdict import SECTIONS, read_number
from strop.core.records import Example, Record, Skill
from strop.core.seeds import derive_seed

VARIANTS = ("full", "no-debate", "no-judge")
ROUNDS = 2
TITLES = {"support": "Support", "objection": "Objection", "guidance": "Judge"}


@dataclass(frozen=True, slots=True)
class Rules:
    """How a debate is held. `sections` are those that a router is asked for."""

    variant: str = "full"
    rounds: int = ROUNDS
    rechecks: int = 1
    k: int = 3
    bag: str = "counts"
    seed: int = 0
    swap: bool = True
    sections: tuple[str, ...] = SECTIONS


@dataclass(slots=True)
class Case:
    """An example under debate: what was retrieved, what was said (`said`: role, round, attempt, raw text, in order)."""

    record: Record
    example: Example
    retrieved: list[Found] = field(default_factory=list)
    skills: list[Skill] = field(default_factory=list)
    fallback: bool = False
    first: list[str] = field(default_factory=list)
    said: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    is_bad: bool = False

    def of(self, role: str) -> list[dict[str, Any]]:
        """What a role said, round by round; of several attempts in a round all."""
        return [one for one in self.said if one["role"] == role]

    def hear(self, question: Question, reply: Reply) -> None:
        """Takes a reply down; a failure ends the case."""
        if self.error is not None:
            return
        if reply.error is not None:
            self.error, self.is_bad = reply.error, reply.is_bad
        else:
            self.said.append(
                {"role": question.role, "round": question.round, "attempt": question.attempt, "text": reply.text}
            )

    @property
    def dialogue(self) -> list[dict[str, Any]]:
        """What was said in the rounds, each round's sides in the order that was drawn for it."""
        order = {"support": 0, "objection": 1, "guidance": 2}

        def place(one: dict[str, Any]) -> tuple[int, int]:
            swapped = self.first[one["round"] - 1] == "objection"
            number = order[one["role"]]
            return one["round"], 1 - number if swapped and number < 2 else number

        return sorted((one for one in self.said if one["role"] in order), key=place)


class Debate:
    """Holds debates under one set of rules, with one cast and one bank of skills."""

    def __init__(self, cast: Cast, prompts: Prompts, bank: Bank, rules: Rules) -> None:
        self._cast = cast
        self._prompts = prompts
        self._bank = bank
        self._rules = rules

    def open(self, record: Record, example: Example) -> Case:
        """A case with its skills, which are those of the bank as it is now."""
        rules = self._rules
        text = example_text(example.query, example.agent)
        retrieved, fallback = retrieve(text, self._bank.texts(), k=rules.k, how=rules.bag)
        skills = [self._bank.skills[found.id] for found in retrieved]
        first = [
            "objection" if rules.swap and derive_seed(rules.seed, "first", example.id, t) % 2 else "support"
            for t in range(1, rules.rounds + 1)
        ]
        return Case(record, example, retrieved, skills, fallback, [] if rules.variant == "no-debate" else first)

    def first_prompt(self, record: Record, example: Example) -> str:
        """The prompt that an example's first question has."""
        role = "router" if self._rules.variant == "no-debate" else "support"
        return self._question(self.open(record, example), role, 1, 0).prompt

    def hold(self, cases: Sequence[Case]) -> None:
        """Debates them all, side by side; what was said, or what failed, is then in each case."""
        rules = self._rules
        if rules.variant == "no-debate":
            self._ask_until_read(cases, "router", 1)
            return
        for number in range(1, rules.rounds + 1):
            self._ask([(case, side) for case in cases for side in ("support", "objection")], number)
            if rules.variant == "full":
                self._ask([(case, "guidance") for case in cases], number)
        if rules.variant == "full":
            self._ask_until_read(cases, "verdict", rules.rounds)

    def _ask_until_read(self, cases: Sequence[Case], role: str, number: int) -> None:
        open_cases = list(cases)
        for attempt in range(1 + self._rules.rechecks):
            self._ask([(case, role) for case in open_cases], number, attempt)
            open_cases = [
                case for case in open_cases
                if case.error is None and read_number(case.said[-1]["text"]).value is None
            ]  # fmt: skip

    def _ask(self, wanted: Sequence[tuple[Case, str]], number: int, attempt: int = 0) -> None:
        alive = [(case, self._question(case, role, number, attempt)) for case, role in wanted if case.error is None]
        replies = self._cast.ask([question for _, question in alive])
        for (case, question), reply in zip(alive, replies, strict=True):
            case.hear(question, reply)

    def _question(self, case: Case, role: str, number: int, attempt: int) -> Question:
        rules, example = self._rules, case.example
        heard = [one for one in case.dialogue if one["round"] <= number] if case.first else []
        guidance = [one["text"].strip() for one in case.of("guidance")]
        last = guidance[-1] if guidance else ""
        values = prompt_values(example.query, example.agent, case.skills, rules.sections) | {
            "dialogue": "\n\n".join(f"{TITLES[one['role']]}: {one['text'].strip()}" for one in heard) or NOTHING,
            "guidance": last or NOTHING, "round": str(number), "rounds": str(rules.rounds),
        }  # fmt: skip
        details = {
            "rounds": rules.rounds, "example": {"id": example.id, "query": example.query, "agent": example.agent},
            "skills": [asdict(skill) for skill in case.skills],
            "dialogue": [{"role": one["role"], "round": one["round"], "text": one["text"]} for one in heard],
            "guidance": last,
        }  # fmt: skip
        seed = derive_seed(rules.seed, "reply", example.id, role, number, attempt)
        return Question(example.id, role, number, attempt, self._prompts.fill(role, values), seed, details)


def prompt_values(
    query: str, agent: dict[str, Any], skills: Sequence[Skill], sections: Sequence[str]
) -> dict[str, str]:
    """The fields of a template that come from an example and its skills. No label is among them."""
    return {
        "query": query, "agent": agent_lines(agent), "skills": skill_lines(skills),
        "sections": ", ".join(f'"## {name.capitalize()}"' for name in sections),
    }  # fmt: skip
