"""Differences of paired runs: mean, interval and stopping rule. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

# Student's t for a two-sided 95 % interval, by degrees of freedom.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def student(pairs: int) -> float:
    """Return the half-width of the 95 % interval of a mean, in standard errors."""
    freedom = pairs - 1
    return _T95[freedom - 1] if freedom <= len(_T95) else 1.96 + 2.42 / freedom


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Gaps to the baseline and the interval of their mean.

    pairs: gap of every pair in per cent of the baseline's loss.
    half_width: half-width of the 95 % interval; None for one pair.
    """

    pairs: list[float]
    mean: float
    half_width: float | None

    def is_settled(self, *, interval: float, least: int) -> bool:
        """Return True if no more pairs are needed.

        There must be ``least`` pairs. The half-width must be at most ``interval``, in per cent, or
        a tenth of the gap.
        """
        if len(self.pairs) < max(2, least) or self.half_width is None:
            return False
        return self.half_width <= max(interval, abs(self.mean) / 10)

    def __str__(self) -> str:
        half = "?" if self.half_width is None else f"{self.half_width:.3f}"
        return f"{self.mean:+.3f} % +-{half} ({len(self.pairs)} pairs)"


def gap(ours: Mapping[int, float], baseline: Mapping[int, float]) -> Gap | None:
    """Return the gap of losses by seed, over the common seeds; None if there is none."""
    seeds = sorted(ours.keys() & baseline.keys())
    return of_pairs([100 * (ours[seed] / baseline[seed] - 1) for seed in seeds])


def of_pairs(gaps: Sequence[float]) -> Gap | None:
    """Return mean and interval of gaps in per cent, None if there are none."""
    if not gaps:
        return None
    half_width = None
    if len(gaps) > 1:
        half_width = student(len(gaps)) * stdev(gaps) / len(gaps) ** 0.5
    return Gap(pairs=list(gaps), mean=fmean(gaps), half_width=half_width)
