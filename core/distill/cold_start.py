"""The cold start: a teacher's own answers as text, which any tokenizer can learn from (sheet compass, section 2.4)."""

from __future__ import annotations

from typing import Any

from strop.core.distill.attempts import Attempt

# How a response ends by itself; one that was cut off teaches to be cut off.
ENDED = ("eos", "stop")


def why_not(attempt: Attempt) -> str | None:
    """Why a rollout is no example, or None: the paper keeps answers that ended by themselves and are not empty."""
    rollout = attempt.rollout
    if rollout.error is not None:
        return "failed by the machine"
    if not (rollout.response or "").strip():
        return "empty"
    return None if rollout.stop in ENDED else "cut off"


def sft_fields(attempt: Attempt) -> dict[str, Any]:
    """The fields of the sft record. Raises DataError without the rollout's task."""
    task = attempt.need_task()
    return {
        "id": attempt.rollout.id, "task": task.id, "prompt": task.prompt, "response": attempt.rollout.response,
        "policy": attempt.rollout.policy,
    }  # fmt: skip
