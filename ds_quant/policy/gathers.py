"""Predict how often ZeRO-3 gathers the weights in a micro-step.

[Note: what stays gathered] DeepSpeed gathers a module's parameters for forward and again for
backward, unless they stay gathered in between: if their next use is fewer than
``stage3_max_reuse_distance`` elements away, as half as many at the end of the model are, or if the
prefetcher has passed that use already. At every module it gathers up to
``stage3_prefetch_bucket_size`` elements more, while fewer than ``stage3_max_live_parameters`` are
gathered, so it gets ahead by what exceeds the module. Tied weights, parameters that stay gathered
for good and blocks that are computed again are left out: the first steps are counted, see
``zero.gather_count``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FetchSettings:
    """The keys of ``zero_optimization`` that decide, with DeepSpeed's defaults, in elements."""

    max_reuse_distance: int = 10**9
    max_live_parameters: int = 10**9
    prefetch_bucket_size: int = 5 * 10**7

    def stay(self, numel: int, modules: int) -> float:
        """Return how many elements stay gathered for backward. See [Note: what stays gathered]."""
        ahead = modules * self.prefetch_bucket_size - numel
        return max(self.max_reuse_distance / 2, min(ahead, self.max_live_parameters))

    def gathers(self, numel: int, modules: int) -> float:
        """Gathers of an element per micro-step, on average, with ``numel`` of them in all."""
        return 2.0 - min(1.0, self.stay(numel, modules) / max(1, numel))
