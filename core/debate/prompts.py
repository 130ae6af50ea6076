"""The prompts of a debate (core/templates.py says what a template is).

No template can name a gold label: there is no field for one [paper]. The paper prints no prompts; the words are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.core.debate.retrieval import words_of
from strop.core.records import Skill
from strop.core.templates import Templates

FOLDER = Path(__file__).parent / "templates"
COMMON = frozenset({"query", "agent", "skills"})
DEBATE = COMMON | {"dialogue", "round", "rounds"}
# Template -> the fields that it may name.
FIELDS: dict[str, frozenset[str]] = {
    "support": DEBATE | {"guidance"},
    "objection": DEBATE | {"guidance"},
    "guidance": DEBATE | {"guidance"},
    "verdict": DEBATE | {"guidance"},
    "router": COMMON | {"sections"},
}
NOTHING = "(nothing yet)"


class Prompts(Templates):
    """The templates by name: those of `folder`, and ours for what is not in it."""

    def __init__(self, folder: Path | None = None) -> None:
        """Reads and checks them. Raises InputMissing for a folder that is not there, DataError for a bad template."""
        super().__init__(FOLDER, FIELDS, folder)


def agent_lines(agent: Mapping[str, Any]) -> str:
    """The agent's profile as a prompt shows it: one line a field, lists one line an item."""
    lines = []
    for name, value in agent.items():
        if isinstance(value, list) and value:
            lines += [f"{name}:", *(f"- {': '.join(words_of(item))}" for item in value)]
        elif isinstance(value, bool):
            lines.append(f"{name}: {'yes' if value else 'no'}")
        elif value not in (None, [], {}):
            lines.append(f"{name}: {' '.join(words_of(value))}")
    return "\n".join(lines)


def skill_lines(skills: Sequence[Skill]) -> str:
    """The retrieved skills as a prompt shows them."""
    return "\n".join(
        f"[skill:{skill.id}] {skill.title}. {skill.principle} {skill.when_to_apply}".strip() for skill in skills
    )
