"""The files of a report: audit, trajectory and manifest as JSON, the kept pairs, and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from strop.core.audit.surface6 import NAMES
from strop.core.errors import OutputFailed

if TYPE_CHECKING:
    from strop.core.audit.run import Choice
    from strop.core.audit.search import Found


def manifest(pruned: Found, choice: Choice, total: int, final_auc: float | None, source: str) -> dict[str, Any]:
    """What makes a subset findable again: which pairs of which input, by which rule, with which seed."""
    keep = None if pruned.keep is None else [int(pair) for pair in pruned.keep]
    kept = set(keep or [])
    method = {"linear": choice.method, "trees": "tree margins", "both": "tree margins and linear program"}
    return {
        "input": source, "method": method[choice.against], "against": choice.against, "threshold": choice.threshold,
        "folds": choice.rule.name, "seed": choice.seed, "score": choice.score if choice.method == "greedy" else None,
        "feature_cols": list(NAMES), "n_pairs": None if keep is None else len(keep), "n_input_pairs": total,
        "fresh_auc_mean": None if keep is None else final_auc, "pair_ids": keep,
        "removed_ids": None if keep is None else [pair for pair in range(total) if pair not in kept],
        "sets_tried": pruned.tried, "details": pruned.details,
    }  # fmt: skip


def write_json(folder: Path, name: str, value: Any) -> None:
    """Writes FOLDER/NAME whole or not at all. Raises OutputFailed."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
    write_bytes(folder, name, text)


def write_bytes(folder: Path, name: str, data: bytes) -> None:
    """Writes FOLDER/NAME whole or not at all; the folder is made. Raises OutputFailed."""
    path = folder / name
    part = folder / f".{name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        raise OutputFailed(f"{path}: {error.strerror}") from None


def draw(folder: Path, before: dict[str, Any], after: dict[str, Any] | None, trajectory: list[dict[str, Any]],
         threshold: float) -> None:  # fmt: skip
    """FOLDER/audit.png: gaps of the features before and after, and the AUC along the deletions. Raises OutputFailed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (gaps, path) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    names = [row["feature"] for row in before["features"]]
    places = range(len(names))
    for offset, label, audit in ((-0.2, "before", before), (0.2, "after", after)):
        if audit is not None:
            values = [row["gap"] for row in audit["features"]]
            gaps.barh([place + offset for place in places], values, height=0.36, label=label)
    gaps.set_yticks(list(places), names)
    gaps.invert_yaxis()
    gaps.axvline(0, color="black", linewidth=0.8)
    gaps.set_title("Mean of right answers less that of wrong ones")
    gaps.set_xlabel("standard deviations")
    gaps.grid(axis="x", alpha=0.3)
    gaps.set_axisbelow(True)
    gaps.legend(loc="lower right")
    path.set_title("Sets on the way")
    # A line for each way: where the set grows again another one begins.
    start = 0
    for end in range(1, len(trajectory) + 1):
        if end == len(trajectory) or trajectory[end]["pairs"] > trajectory[end - 1]["pairs"]:
            part = trajectory[start:end]
            path.plot([point["pairs"] for point in part], [point["auc"] for point in part], marker=".", color="C0")
            start = end
    if trajectory:
        path.invert_xaxis()
    ends = ((before, "before", "s", "C0"), (after, "kept", "*", "C1"))
    for audit, label, marker, colour in ends:
        if audit is not None:
            path.plot(audit["pairs"], audit["auc"], marker, color=colour, markersize=10, label=label, zorder=3)
    path.axhline(threshold, color="black", linewidth=0.8, linestyle="--", label=f"threshold {threshold:g}")
    path.set_xlabel("pairs left")
    path.set_ylabel("audit AUC")
    path.grid(alpha=0.3)
    path.legend()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / "audit.png", dpi=150, metadata={"Software": None})
    except OSError as error:
        raise OutputFailed(f"{folder / 'audit.png'}: {error.strerror}") from None
    finally:
        pyplot.close(figure)
