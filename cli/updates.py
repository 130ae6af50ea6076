"""What a command that trains says of each update."""

from __future__ import annotations

from typing import Any

from strop.cli.session import Session
from strop.core.records import Record
from strop.core.train.run import Update


def emit_update(io: Session, update: Update, version: int, options: dict[str, Any]) -> None:
    """Metric records of an update."""
    values: dict[str, float | None] = {}
    if (report := update.report) is not None:
        batch = update.batch
        values |= report.metrics
        values |= {
            "groups_without_signal_share": batch.groups_without_signal / len(batch.groups),
            "trained_tokens": report.trained, "tokens": report.tokens, "rollouts": len(batch.examples),
            "seconds": round(report.seconds, 3),
        }  # fmt: skip
    if (critic := update.critic) is not None:
        values |= {
            "critic_loss": critic.loss, "explained_variance": critic.explained_variance,
            "value_mean": critic.value_mean, "value_clip_share": critic.clip_share,
            "critic_grad_norm": critic.grad_norm, "critic_seconds": round(critic.seconds, 3),
        }  # fmt: skip
    for name, value in values.items():
        fields = {"id": f"train/v{version:06d}/{name}", "name": name, "value": value, "of": "train", "update": version}
        io.emit(Record.make("metric", fields), options)


def update_line(update: Update) -> str:
    """An update in words, for --verbose."""
    if update.report is None:
        assert update.critic is not None
        return f"critic: loss {update.critic.loss:.4g}"
    metrics = update.report.metrics
    shown = [name for name in ("loss", "grad_norm", "entropy", "kl_rollout") if name in metrics]
    parts = [f"{name} {metrics[name]:.4g}" for name in shown]
    return f"update {update.report.update}: {', '.join(parts)}, {metrics['tokens_per_s']:.0f} tokens/s"
