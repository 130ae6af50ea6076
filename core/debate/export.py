"""Labels as training data for the router: sft records of the trace, and tasks whose verifier computes the reward.

Only well-formed labels are exported [paper]: a verdict that can be read, all sections, nothing that failed. The router
is asked with the request, the agent and the retrieved skills, and never with a label [paper]. An example of a split
other than train is never training data. `--trace` chooses what a student learns to write [paper, its baselines]:
"full" the complete trace, "reasoning" the judge's reason and the verdict, "label" the verdict alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strop.core.debate.prompts import Prompts
from strop.core.debate.rounds import prompt_values
from strop.core.debate.verdict import SECTIONS, read_sections
from strop.core.records import Label, Record, Skill, Task

TRACES: dict[str, tuple[str, ...]] = {
    "full": SECTIONS, "reasoning": ("judgement", "verdict"), "label": ("verdict",),
}  # fmt: skip
EXPORTS = ("sft", "grpo")
TRAIN = "train"
MOST_TOKENS = 512


def is_training(label: Label) -> bool:
    """Whether the label may be trained on, as far as its split and its form go."""
    whole = label.error is None and label.verdict is not None and bool(label.trace.get("valid_sections"))
    return whole and label.split in (None, TRAIN)


def asked_sections(trace: str, sections: Sequence[str]) -> list[str]:
    """The sections that a student is asked for: those of the trace, as far as traces must have them at all."""
    return [name for name in TRACES[trace] if name in sections]


def router_prompt(
    label: Label, prompts: Prompts, skills: Sequence[Skill], sections: Sequence[str]
) -> list[dict[str, Any]]:
    """What the router is asked, as chat messages."""
    values = prompt_values(label.query, label.agent, skills, sections)
    return [{"role": "user", "content": prompts.fill("router", values)}]


def trace_response(label: Label, trace: str) -> str:
    """The part of a label's trace that a student learns."""
    text = str(label.trace["text"])
    if trace == "full":
        return text
    found = read_sections(text)
    return "\n".join(f"## {name.capitalize()}\n{found[name]}" for name in TRACES[trace] if found.get(name))


def sft_record(
    label: Label, prompts: Prompts, skills: Sequence[Skill], trace: str, sections: Sequence[str] = SECTIONS
) -> Record:
    """The example for `train --loss sft`."""
    prompt = router_prompt(label, prompts, skills, asked_sections(trace, sections))
    values = {"id": f"{label.id}/{trace}", "prompt": prompt, "response": trace_response(label, trace)}
    return Record.make("sft", values)


def grpo_task(
    label: Label, gold: int, prompts: Prompts, skills: Sequence[Skill], trace: str, compare: str, uncited: int,
    sections: Sequence[str] = SECTIONS,
) -> Record:  # fmt: skip
    """The task for `rollout -n 8 | advantage --grpo | train`; `gold` is the raw label to be found."""
    verifier = {
        "name": "debate", "retrieved": [skill.id for skill in skills], "sections": asked_sections(trace, sections),
        "compare": compare, "uncited": uncited,
    }  # fmt: skip
    prompt = router_prompt(label, prompts, skills, asked_sections(trace, sections))
    task = Task(
        id=f"{label.id}/{trace}", prompt=prompt, verifier=verifier, reference=gold, sampling={"max_tokens": MOST_TOKENS}
    )
    return Record.make("task", task)
