"""Where each signal would lead if training never ended: pass@1 of the policies that CompassOPD and its relatives fix.

    python optimum.py MODEL TEACHER STUDENT SEED < tasks.jsonl

Sums of two numbers below 50 have few answers, so teacher, reference and student can be asked for all of them: a token
of the student is a digit, or a digit with the line feed. In one context a signal pulls until its advantage is the same
for all tokens z (sheet compass, equations 9 to 12), which gives, with the scores l of the unit of z by the mean rule,

    compass, beta b: pi(z) ~ exp((l_T - l_R + b l_R + a log pi_ref) / (a + b)),  a = 0.5        opd: pi(z) ~ exp(l_T)

over the tokens that a right answer may have there. Nothing is sampled and nothing is trained.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.core.models.adapters import apply_adapter, resolve_adapter
from strop.core.models.load import load_model, load_tokenizer, resolve_model

ALPHA = 0.5
BETAS = {"compass": 0.0, "beta-0.5": 0.5, "beta-1": 1.0}
DIGITS = "0123456789"


@dataclass
class Scores:
    """Log-scores of the student's tokens: `first` [20], a digit, or one that ends; `second` [10, 10]."""

    first: Tensor
    second: Tensor


class Asked:
    """A model, and what it says after a prompt and digits."""

    def __init__(self, name: str, adapter: str | None = None) -> None:
        path = resolve_model(name, offline=True)
        self.tokenizer = load_tokenizer(path)
        model = load_model(path, device="cpu", dtype="float32")
        self.model: Any = (model if adapter is None else apply_adapter(model, resolve_adapter(adapter))).eval()

    def token(self, text: str) -> int:
        """The id of a text that is one token."""
        ids = self.tokenizer.inner(text, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise SystemExit(f"optimum.py: a model has {text!r} as {len(ids)} tokens and not as one")
        return int(ids[0])

    def after(self, prompt: str, depth: int) -> list[Tensor]:
        """Log-probabilities after the prompt [V], after each digit [10, V], and with depth 2 after two [100, V]."""
        digits = torch.tensor([self.token(digit) for digit in DIGITS])
        said = self.model(torch.tensor([self.tokenizer.encode_prompt(prompt)]), use_cache=True)
        found = [said.logits[0, -1].log_softmax(-1)]
        for level in range(depth):
            said.past_key_values.batch_repeat_interleave(10)
            fed = digits.repeat(10**level)[:, None]
            said = self.model(fed, past_key_values=said.past_key_values, use_cache=True)
            found.append(said.logits[:, -1].log_softmax(-1))
        return found


def unit_scores(model: Asked, prompt: str) -> Scores:
    """What teacher or reference, which have a token for the line feed, say of the student's tokens (the mean rule)."""
    digits, feed = [model.token(digit) for digit in DIGITS], model.token("\n")
    start, after_1, after_2 = model.after(prompt, 2)
    ends_1, ends_2 = after_1[:, feed], after_2[:, feed].view(10, 10)
    first = torch.cat([start[digits], (start[digits] + ends_1) / 2])
    return Scores(first, (after_1[:, digits] + ends_2) / 2)


def student_scores(model: Asked, prompt: str) -> Scores:
    """The student's own log-probabilities."""
    digits = [model.token(digit) for digit in DIGITS]
    ending = [model.token(digit + "\n") for digit in DIGITS]
    start, after_1 = model.after(prompt, 1)
    return Scores(start[digits + ending], after_1[:, ending])


def chance(scores: Scores, answer: int) -> float:
    """The probability of an answer of one or two digits under the softmax of the scores in each context."""
    first = scores.first.log_softmax(0)
    if answer < 10:
        return float(first[10 + answer].exp())
    second = scores.second[answer // 10].log_softmax(0)
    return float((first[answer // 10] + second[answer % 10]).exp())


def mixed(teacher: Scores, reference: Scores, student: Scores, beta: float) -> Scores:
    """Compass' fixed point in each context, up to a constant."""
    pairs = zip(vars(teacher).values(), vars(reference).values(), vars(student).values(), strict=True)
    return Scores(*((t - r + beta * r + ALPHA * s) / (ALPHA + beta) for t, r, s in pairs))


@torch.inference_mode()
def main() -> None:
    """Prints a metric record for each variant."""
    name, adapter, folder, seed = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    reference, teacher, student = Asked(name), Asked(name, adapter), Asked(str(folder))
    found: dict[str, list[float]] = {"start": [], "opd": [], **{variant: [] for variant in BETAS}}
    for task in map(json.loads, sys.stdin):
        prompt, answer = task["prompt"], task["reference"]
        of_t, of_r = unit_scores(teacher, prompt), unit_scores(reference, prompt)
        of_s = student_scores(student, prompt)
        found["start"].append(chance(of_s, answer))
        found["opd"].append(chance(of_t, answer))
        for variant, beta in BETAS.items():
            found[variant].append(chance(mixed(of_t, of_r, of_s, beta), answer))
    for variant, values in found.items():
        fields = {"value": sum(values) / len(values), "n": len(values), "variant": variant, "seed": seed}
        print(json.dumps({"kind": "metric", "name": "optimum", **fields}))


if __name__ == "__main__":
    main()
