r"""What a stream of credit looked like, and whether modulated weights can help (sheet gaca.md, 2.4 and 2.8).

With w = w0 + kappa s, s a score of mean 0, d = A^S - A^E, M = A^E + w0 d and A* the optimal advantage:

    Risk(kappa) = E[(M + kappa s d - A*)^2] = Risk(0) - 2 kappa Gamma + kappa^2 E[s^2 d^2]
    Gamma = E[s d (A* - M)]

so modulation helps if and only if Gamma > 0 and 0 < kappa < 2 Gamma / E[s^2 d^2]; the best kappa is
Gamma / E[s^2 d^2] and gains Gamma^2 / E[s^2 d^2]. Nothing but a simulation knows A*; a step says it as
`optimal_advantage`.

s, w0 and d are those that acted on each step: s after the clip at 2 and the controls, and s = w0 = 0 where the
singleton rule took over. So the equation is exact as long as no weight is cut at 0 or 1 (`weight_clip_share`). In the
additive map M = A^E + w0 A^S and d = w0 A^S, exact likewise; the sigmoid map is linear at first order only, with d
scaled by its slope w0 (1 - w0). `--scale` is left out on both sides.
"""


from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from strop.core.records import Metric

if TYPE_CHECKING:
    from strop.core.credit.gaca import GacaOptions, Weights
    from strop.core.credit.gigpo import CreditParts, Floats, StepBatch


@dataclass(slots=True)
class Moments:
    """Means, variances and the correlation of pairs that arrive in blocks; blocks merge without cancellation (Chan)."""

    n: int = 0
    mean_x: float = 0.0
    mean_y: float = 0.0
    xx: float = 0.0
    yy: float = 0.0
    xy: float = 0.0

    def add(self, x: Floats, y: Floats | None = None) -> None:
        """Adds a block of pairs; pairs with a NaN are left out. Without `y`, of single values."""
        import numpy as np

        y = x if y is None else y
        known = ~(np.isnan(x) | np.isnan(y))
        x, y = x[known], y[known]
        if not len(x):
            return
        mean_x, mean_y = float(x.mean()), float(y.mean())
        total = self.n + len(x)
        step_x, step_y = mean_x - self.mean_x, mean_y - self.mean_y
        shared = self.n * len(x) / total
        self.xx += float(((x - mean_x) ** 2).sum()) + step_x * step_x * shared
        self.yy += float(((y - mean_y) ** 2).sum()) + step_y * step_y * shared
        self.xy += float(((x - mean_x) * (y - mean_y)).sum()) + step_x * step_y * shared
        self.mean_x += step_x * len(x) / total
        self.mean_y += step_y * len(x) / total
        self.n = total

    @property
    def mean(self) -> float | None:
        """The mean of x, None of nothing."""
        return self.mean_x if self.n else None

    @property
    def std(self) -> float | None:
        """The deviation of x over all values (ddof 0), None of nothing."""
        return math.sqrt(self.xx / self.n) if self.n else None

    @property
    def correlation(self) -> float | None:
        """Pearson's r, None where one side does not vary."""
        spread = math.sqrt(self.xx) * math.sqrt(self.yy)
        return self.xy / spread if spread > 0 else None


@dataclass(slots=True)
class Alignment:
    """The sums behind the improvement condition, over the steps whose optimal advantage is known."""

    n: int = 0
    gamma: float = 0.0
    curvature: float = 0.0
    risk_fixed: float = 0.0
    risk_used: float = 0.0
    error_d: float = 0.0
    dd: float = 0.0

    def add(
        self, parts: CreditParts, weights: Weights, advantage_R: Floats, optimal_R: Floats, options: GacaOptions
    ) -> None:
        """Adds a batch; `advantage_R` is what the estimator gave, scale included."""
        import numpy as np

        known = ~np.isnan(optimal_R)
        if not known.any():
            return
        episode, step, score, base, target = (
            values[known] for values in (parts.episode_R, parts.step_R, weights.score_R, weights.base_R, optimal_R)
        )
        apart = step if options.map == "additive" else step - episode
        fixed = episode + base * apart
        slope = {"additive": base, "sigmoid": base * (1 - base)}.get(options.map, 1.0) * score * apart
        self.n += len(target)
        self.gamma += float((slope * (target - fixed)).sum())
        self.curvature += float((slope**2).sum())
        self.risk_fixed += float(((fixed - target) ** 2).sum())
        if options.scale:
            self.risk_used += float(((advantage_R[known] / options.scale - target) ** 2).sum())
        self.error_d += float(((episode - target) * apart).sum())
        self.dd += float((apart**2).sum())

    def metrics(self, kappa: float) -> list[Metric]:
        """Gamma, E[s^2 d^2], the best strength and its gain, the risks, and whether `kappa` beats fixed mixing."""
        if not self.n:
            return []
        gamma, curvature = self.gamma / self.n, self.curvature / self.n
        best = gamma / curvature if curvature > 0 else None
        values: dict[str, float | int | None] = {
            "gamma": gamma,
            "score_curvature": curvature,
            "best_modulation": best,
            "best_modulation_gain": None if best is None else gamma * best,
            "best_constant_weight": -self.error_d / self.dd if self.dd > 0 else None,
            "risk_fixed_weight": self.risk_fixed / self.n,
            "risk_used_weight": self.risk_used / self.n,
            "modulation_improves": int(best is not None and 0 < kappa < 2 * best),
        }
        return [Metric(name=name, value=value, n=self.n) for name, value in values.items()]


@dataclass(slots=True)
class Diagnosis:
    """Running figures over a stream of step-level credit; memory does not grow with the stream."""

    weight: Moments = field(default_factory=Moments)
    score: Moments = field(default_factory=Moments)
    nll_apart: Moments = field(default_factory=Moments)
    nll_and_step: Moments = field(default_factory=Moments)
    nll_and_tokens: Moments = field(default_factory=Moments)
    alignment: Alignment = field(default_factory=Alignment)
    anchor_sizes: Counter[int] = field(default_factory=Counter)
    num_steps: int = 0
    num_clipped: int = 0

    def add_parts(self, batch: StepBatch, parts: CreditParts, num_tokens_R: Floats) -> None:
        """Adds what any step-level estimator has."""
        import numpy as np

        sizes, counts = np.unique(parts.anchor_size_R, return_counts=True)
        self.anchor_sizes.update(dict(zip(sizes.tolist(), counts.tolist(), strict=True)))
        self.num_steps += len(parts.step_R)
        self.nll_and_step.add(batch.nll_R, abs(parts.step_R))
        self.nll_and_tokens.add(batch.nll_R, num_tokens_R)

    def add_weights(
        self, batch: StepBatch, parts: CreditParts, weights: Weights, advantage_R: Floats, optimal_R: Floats,
        options: GacaOptions,
    ) -> None:  # fmt: skip
        """Adds what GACA has besides."""
        import numpy as np

        self.weight.add(weights.weight_R)
        self.score.add(weights.score_R)
        self.num_clipped += int(weights.is_clipped_R.sum())
        trajectory_R, known = batch.trajectory_R, ~np.isnan(batch.nll_R)
        count = np.maximum(np.bincount(trajectory_R, known), 1)
        mean = np.bincount(trajectory_R, np.where(known, batch.nll_R, 0.0)) / count
        self.nll_apart.add(batch.nll_R - mean[trajectory_R])
        self.alignment.add(parts, weights, advantage_R, optimal_R, options)

    def metrics(self, *, with_weights: bool) -> list[Metric]:
        """The figures so far, without those of the improvement condition; None where nothing was seen."""
        n = self.num_steps
        found = [
            Metric(name="singleton_share", value=self.anchor_sizes[1] / n if n else None, n=n),
            *(Metric(name="anchor_size_share", value=count / n, n=n, of=of) for of, count in self._size_bins()),
            Metric(name="corr_nll_step_advantage", value=self.nll_and_step.correlation, n=self.nll_and_step.n),
            Metric(name="corr_nll_tokens", value=self.nll_and_tokens.correlation, n=self.nll_and_tokens.n),
        ]
        if with_weights:
            found += [
                Metric(name="weight_mean", value=self.weight.mean, n=self.weight.n),
                Metric(name="weight_std", value=self.weight.std, n=self.weight.n),
                Metric(name="weight_clip_share", value=self.num_clipped / n if n else None, n=n),
                Metric(name="score_std", value=self.score.std, n=self.score.n),
                Metric(name="nll_std_within", value=self.nll_apart.std, n=self.nll_apart.n),
            ]
        return found

    def _size_bins(self) -> list[tuple[str, int]]:
        """Steps by the size of their anchor group, in powers of two."""
        bins: Counter[int] = Counter()
        for size, count in self.anchor_sizes.items():
            bins[(size - 1).bit_length()] += count
        named = {b: ("1", "2")[b] if b < 2 else f"{2 ** (b - 1) + 1}-{2**b}" for b in bins}
        return [(f"anchors of {named[b]}", bins[b]) for b in sorted(bins)]
