"""What an audit says and what it cannot say, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strop.core.audit.surface6 import num_typographic, num_without_lexicon

# Below this share of pairs a pruned set is a ruin and not a benchmark.
RUIN_SHARE = 0.25
FOREIGN_SHARE = 0.1
NOTICEABLE = 0.02
PROBES = {
    "trees": "boosted trees on the same six features",
    "tfidf": "a probe on the answers' words (1- and 2-grams)",
    "ngrams": "a probe on the answers' character n-grams",
}


def text_sentences(texts: Sequence[str]) -> list[str]:
    """What about the texts themselves limits the audit: language, apostrophes, empty answers."""
    said = []
    if (foreign := num_without_lexicon(texts)) > FOREIGN_SHARE * len(texts):
        said.append(
            f"{foreign} of {len(texts)} answers are not in Latin script: the lexicon of negations and hedges is "
            "English and does not apply, so that four of the six features say nothing of them"
        )
    if typographic := num_typographic(texts):
        said.append(f"{typographic} answers have typographic apostrophes, which hide contractions from the lexicon")
    if empty := sum(not text.strip() for text in texts):
        said.append(f"{empty} answers are empty and have zeros for features")
    return said


def audit_sentences(audit: dict[str, Any], threshold: float) -> list[str]:
    """The finding of one audit, and what other probes still find."""
    auc, p = audit["auc"], audit["p"]
    size = audit.get("pairs", audit.get("rows"))
    finding = f"audit AUC {auc:.4f} [{audit['low']:.3f}, {audit['high']:.3f}] on {size}"
    finding += " pairs" if "pairs" in audit else " rows"
    if auc < 0.5:
        finding += ": below one half, which counts as no leak"
    elif auc <= threshold:
        finding += f": within the threshold of {threshold:g}"
    if p is not None:
        finding += f"; p = {p:.2g}" + (", still detectable" if p < 0.05 and auc <= threshold else "")
    said = [finding]
    for kind, value in audit.get("others", {}).items():
        if value > auc + NOTICEABLE and value > 0.5 + NOTICEABLE:
            said.append(f"{PROBES[kind]} reach {value:.3f}")
    return said


def limits(audit: dict[str, Any], against: str, threshold: float) -> list[str]:
    """What the audit cannot certify, whatever it found."""
    near_chance = {
        "linear": "a linear probe over six surface counts is near chance, and nothing else",
        "trees": "boosted trees over six surface counts are near chance, which does not include the linear probe",
        "both": "a linear probe and boosted trees over six surface counts are near chance",
    }[against]
    said = [
        "what this cannot certify: "
        + (
            f"the set is certified so far that {near_chance}"
            if audit["auc"] <= threshold or against == "trees"
            else "anything; the audit found a leak, and there may be others that it cannot see"
        )
    ]
    measured = {PROBES[kind]: value for kind, value in audit.get("others", {}).items()}
    found = "; ".join(f"{what}: AUC {value:.3f}" for what, value in measured.items())
    if found:
        said.append(f"measured beyond that, not bounded by it: {found}")
    missing = [what for kind, what in PROBES.items() if kind not in audit.get("others", {})]
    if missing:
        said.append(f"not looked at: {', '.join(missing)} (--probe)")
    said.append("words, topics, plausibility and what a model knows about a data set can still tell right from wrong")
    return said


def pruning_sentences(kept: int | None, total: int, threshold: float, start_auc: float) -> list[str]:
    """How much of the set is left, and when that is a warning."""
    if kept is None:
        return [
            f"no part of the {total} pairs keeps the threshold {threshold:g}: with no mean difference left, with "
            "nothing left to blame, or with five questions left, the audit is still above it; nothing was kept"
        ]
    said = [f"kept {kept} of {total} pairs ({kept / total:.0%})"]
    if kept < RUIN_SHARE * total:
        said.append(
            f"the leak is saturated (AUC {start_auc:.3f} before): pruning destroys this set; "
            "its answers need to be written anew"
        )
    return said
