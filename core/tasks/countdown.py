"""The family `countdown`: reach a target with given numbers. Every task has a solution; the reference carries one.

A task is made backwards: numbers and an expression over them (over all with `use_all`, else over at least two) are
drawn, and its value is the target if it is a whole number within bounds. With division "exact" every quotient in it is
whole; with "rational" fractions may occur on the way.
"""

from __future__ import annotations

from typing import Any

from strop.core.errors import UsageError
from strop.core.records import Task
from strop.core.seeds import derive_seed
from strop.core.tasks.draws import Draws
from strop.core.tasks.expressions import (
    ExpressionError,
    Node,
    Operation,
    evaluate,
    leaves,
    operators_of,
    parse_expression,
    write_expression,
)
from strop.core.tasks.families import Family, FamilyOptions, bounds, one_of, operators_from

OPERATORS = ("+", "-", "*", "/")
MOST_NUMBERS = 8
MOST_DRAWS = 20_000

# Worked examples: the first two that the allowed operators permit are shown. Each uses all of its numbers.
WORKED = (
    "(7-2)*4", "6*3+5", "(8+4)/3", "9-4+2", "15/5-2", "4*6", "2*3*5", "5+3", "2+6+4", "9-4", "15-6-2", "8/2", "24/3/2",
)  # fmt: skip

RULES = {
    "exact": "Every division must leave no remainder.",
    "rational": "Fractions may occur on the way.",
}
CHAT_REQUEST = (
    "Use the numbers {numbers} to make {target}. {use} You may use {operators} and parentheses{rule}\n"
    "Think step by step, then write the expression, without the result, in <answer> </answer> tags, "
    "for example <answer>{example}</answer>."
)
CHAT_MAX_TOKENS = 1024


class Countdown(Family):
    """Options: terms (how many numbers, default 3:4), range (1:50), target (1:100), operators, use_all, division."""

    applies = frozenset({"terms", "range", "target", "operators", "use_all", "division", "format"})

    def __init__(self, options: FamilyOptions) -> None:
        super().__init__("countdown", options)
        self._terms = bounds("terms", options.terms, (3, 4), least=2)
        if self._terms[1] > MOST_NUMBERS:
            raise UsageError(f"--terms {self._terms[0]}:{self._terms[1]}: the most is {MOST_NUMBERS}")
        self._range = bounds("range", options.range, (1, 50), least=0)
        self._target = bounds("target", options.target, (1, 100))
        self._operators = operators_from(options.operators, OPERATORS, OPERATORS)
        self._use_all = bool(options.use_all)
        self._division = one_of("division", options.division, ("exact", "rational"))
        self._format = one_of("format", options.format, ("chat", "few-shot"))
        allowed = set(self._operators)
        self._worked = [text for text in WORKED if operators_of(parse_expression(text)) <= allowed][:2]

    def make(self, index: int, seed: int) -> Task:
        """Task `index` under `seed`."""
        numbers, target, solution = self._puzzle(Draws(derive_seed(seed, self.name, index)))
        is_chat = self._format == "chat"
        prompt: str | list[dict[str, Any]] = self._lines(numbers, target)
        if is_chat:
            prompt = [{"role": "user", "content": self._request(numbers, target)}]
        return Task(
            id=self.task_id(seed, index),
            prompt=prompt,
            verifier={
                "name": "countdown",
                "extract": "tag" if is_chat else "line",
                "use_all": self._use_all,
                "division": self._division,
                "operators": list(self._operators),
            },
            reference={"numbers": numbers, "target": target, "solution": solution},
            sampling={"max_tokens": CHAT_MAX_TOKENS} if is_chat else {"stop": ["\n"], "max_tokens": self._max_tokens()},
        )

    def _puzzle(self, draws: Draws) -> tuple[list[int], int, str]:
        for _ in range(MOST_DRAWS):
            numbers = [draws.between(*self._range) for _ in range(draws.between(*self._terms))]
            used = len(numbers) if self._use_all else draws.between(2, len(numbers))
            tree = self._tree(numbers[:used], draws)
            try:
                value = evaluate(tree, self._division)  # type: ignore[arg-type]
            except ExpressionError:
                continue
            if value.denominator != 1 or not self._target[0] <= value <= self._target[1]:
                continue
            draws.shuffle(numbers)
            if self.admits(f"{sorted(numbers)} {value}"):
                return numbers, int(value), write_expression(tree)
        raise UsageError(
            f"no task found in {MOST_DRAWS} draws: --target {self._target[0]}:{self._target[1]} can hardly be reached "
            "with these numbers and operators, or the split is too small"
        )

    def _tree(self, numbers: list[int], draws: Draws) -> Node:
        """A random expression that uses each number once."""
        parts: list[Node] = list(numbers)
        while len(parts) > 1:
            left = parts.pop(draws.below(len(parts)))
            right = parts.pop(draws.below(len(parts)))
            parts.append(Operation(draws.pick(self._operators), left, right))
        return parts[0]

    def _request(self, numbers: list[int], target: int) -> str:
        divides = "/" in self._operators
        return CHAT_REQUEST.format(
            numbers=", ".join(map(str, numbers)),
            target=target,
            use="Use each of them exactly once." if self._use_all else "Use each of them at most once.",
            operators=" ".join(self._operators),
            rule=f". {RULES[self._division]}" if divides else ".",
            example=self._worked[0],
        )

    def _lines(self, numbers: list[int], target: int) -> str:
        worked = ""
        for example in self._worked:
            tree = parse_expression(example)
            worked += f"{_open_line(sorted(leaves(tree)), int(evaluate(tree)))} {example}\n"
        return worked + _open_line(numbers, target)

    def _max_tokens(self) -> int:
        """Room for every number with an operator and two parentheses, one token a character."""
        return (len(str(self._range[1])) + 3) * self._terms[1] + 2


def _open_line(numbers: list[int], target: int) -> str:
    return f"Numbers: {' '.join(map(str, numbers))}. Target: {target}. Expression:"
