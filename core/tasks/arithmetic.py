"""The family `arithmetic`: a few whole numbers joined by operators.

With the default prompt, two worked lines and an open one,

    3+4=7
    12+5=17
    8+31=

a base model continues with the answer and a line feed. Products bind before sums. For other operators and numbers of
terms the worked lines are other fixed ones that show each operator at least once.

Each number of terms is equally frequent. As long as there are no more than 32,768 questions of one number of terms,
they come in an order drawn from the seed, and none twice before all were asked; from larger spaces tasks are drawn
independently, so that a repetition is as rare as chance has it.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from strop.core.errors import DataError, UsageError
from strop.core.records import Task
from strop.core.seeds import derive_seed
from strop.core.tasks.draws import Draws
from strop.core.tasks.families import MOST_INT, Family, FamilyOptions, bounds, one_of, operators_from
from strop.core.tasks.verifiers.number import NumberVerifier

OPERATORS = ("+", "-", "*")
MOST_LISTED = 1 << 15
# Questions drawn before the part that --split asks for is taken to be empty; at a share of 0.01 the chance to miss one
# that exists is exp(-100).
MOST_DRAWS = 10_000

# Terms of the worked lines; the first two of the first two rows are those of the default prompt.
EXAMPLE_TERMS = ((3, 4, 2, 6, 5, 7, 8, 9), (12, 5, 7, 3, 4, 6, 2, 8), (6, 2, 8, 5, 3, 9, 4, 7))
CHAT_REQUEST = "Compute {expression}. Reply with the number alone."
CHAT_MAX_TOKENS = 64
MOST_TERMS = len(EXAMPLE_TERMS[0])

Question = tuple[tuple[int, ...], tuple[str, ...]]


class Arithmetic(Family):
    """Options: terms (default 2:2), range of the numbers (1:49), operators (+), format (few-shot or chat)."""

    applies = frozenset({"terms", "range", "operators", "format", "verifier_options"})

    def __init__(self, options: FamilyOptions) -> None:
        super().__init__("arithmetic", options)
        low, high = bounds("terms", options.terms, (2, 2), least=2)
        if high > MOST_TERMS:
            raise UsageError(f"--terms {low}:{high}: the most is {MOST_TERMS}")
        self._terms = range(low, high + 1)
        self._low, self._high = bounds("range", options.range, (1, 49))
        self._operators = operators_from(options.operators, ("+",), OPERATORS)
        self._format = one_of("format", options.format, ("few-shot", "chat"))
        self._verifier = {"name": "number", **dict(options.verifier_options)}
        try:
            NumberVerifier().check(Task(id="", verifier=self._verifier, reference=0))
        except DataError as error:
            raise UsageError(f"--verifier-option: {error.field}: {error.message}") from None
        self._sampling = self._hints()
        self._worked = {terms: self._worked_lines(terms) for terms in self._terms}
        self._orders: dict[int, tuple[tuple[int, int], list[int]]] = {}
        self._listed = {terms: self._list(terms) for terms in self._terms}
        if all(listed is not None for listed in self._listed.values()):
            self.num_distinct = sum(len(listed or ()) for listed in self._listed.values())
            if any(not listed for listed in self._listed.values()):
                raise UsageError(f"--split {options.split}: no question is in this part; widen --range or the share")

    def make(self, index: int, seed: int) -> Task:
        """Task `index` under `seed`."""
        numbers, operators = self._question(index, seed)
        expression = write_sum(numbers, operators)
        prompt: str | list[dict[str, Any]] = f"{self._worked[len(numbers)]}{expression}="
        if self._format == "chat":
            prompt = [{"role": "user", "content": CHAT_REQUEST.format(expression=expression)}]
        return Task(
            id=self.task_id(seed, index),
            prompt=prompt,
            verifier=self._verifier,
            reference=_as_json(compute(numbers, operators)),
            sampling=self._sampling,
        )

    def _question(self, index: int, seed: int) -> Question:
        # Blocks of one task of each number of terms, in an order of their own.
        block, place = divmod(index, len(self._terms))
        terms = list(self._terms)
        if len(terms) > 1:
            Draws(derive_seed(seed, self.name, "terms", block)).shuffle(terms)
        listed = self._listed[terms[place]]
        if listed is not None:
            pass_, position = divmod(block, len(listed))
            return listed[self._order(seed, terms[place], pass_)[position]]
        draws = Draws(derive_seed(seed, self.name, index))
        for _ in range(MOST_DRAWS):
            numbers = tuple(draws.between(self._low, self._high) for _ in range(terms[place]))
            operators = tuple(draws.pick(self._operators) for _ in range(terms[place] - 1))
            if self.admits(write_sum(numbers, operators)):
                return numbers, operators
        raise UsageError(f"--split {self.options.split}: no question in {MOST_DRAWS} draws; raise --heldout-share")

    def _list(self, terms: int) -> list[Question] | None:
        """All questions with so many terms that the split admits, or None where there are too many."""
        numbers = range(self._low, self._high + 1)
        if len(numbers) ** terms * len(self._operators) ** (terms - 1) > MOST_LISTED:
            return None
        questions = product(product(numbers, repeat=terms), product(self._operators, repeat=terms - 1))
        return [question for question in questions if self.options.split == "all" or self.admits(write_sum(*question))]

    def _order(self, seed: int, terms: int, pass_: int) -> list[int]:
        """The order in which pass `pass_` goes through the listed questions; the last one is kept."""
        known = self._orders.get(terms)
        if known is None or known[0] != (seed, pass_):
            positions = list(range(len(self._listed[terms] or ())))
            Draws(derive_seed(seed, self.name, "order", terms, pass_)).shuffle(positions)
            known = self._orders[terms] = ((seed, pass_), positions)
        return known[1]

    def _worked_lines(self, terms: int) -> str:
        lines, operators = [], list(self._operators)
        for i in range(max(2, len(operators))):
            numbers = EXAMPLE_TERMS[i][:terms]
            chosen = tuple(operators[(i + j) % len(operators)] for j in range(terms - 1))
            lines.append(f"{write_sum(numbers, chosen)}={compute(numbers, chosen)}\n")
        return "".join(lines)

    def _hints(self) -> dict[str, Any]:
        """A bound on the answer's length that is the same for all tasks: a bound for each would tell of the answer."""
        if self._format == "chat":
            return {"max_tokens": CHAT_MAX_TOKENS}
        size = max(abs(self._low), abs(self._high))
        most = size ** self._terms[-1] if "*" in self._operators else size * self._terms[-1]
        has_sign = "-" in self._operators or self._low < 0
        return {"stop": ["\n"], "max_tokens": len(str(most)) + has_sign + 2}


def _as_json(value: int) -> int | str:
    """A large number as text: readers of JSON round it, the verifier compares it exactly."""
    return value if abs(value) <= MOST_INT else str(value)


def write_sum(numbers: tuple[int, ...], operators: tuple[str, ...]) -> str:
    """The expression as text; a negative number that is not the first stands in parentheses.

    >>> write_sum((1, -2, 3), ("+", "*"))
    '1+(-2)*3'
    """
    rest = (f"{o}({n})" if n < 0 else f"{o}{n}" for o, n in zip(operators, numbers[1:], strict=True))
    return str(numbers[0]) + "".join(rest)


def compute(numbers: tuple[int, ...], operators: tuple[str, ...]) -> int:
    """The value, products first.

    >>> compute((1, -2, 3), ("+", "*"))
    -5
    """
    total, term = 0, numbers[0]
    for operator, number in zip(operators, numbers[1:], strict=True):
        if operator == "*":
            term *= number
        else:
            total += term
            term = number if operator == "+" else -number
    return total + term
