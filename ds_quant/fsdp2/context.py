"""State that the collectives of all sharded modules of a model share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ds_quant.comm.reduce import GradientSums
from ds_quant.comm.reduction_plan import GradientSpec, Segment
from ds_quant.fsdp2.sharded_module import ShardedModule
from ds_quant.fsdp2.watched_gradients import WatchedGradients
from ds_quant.runtime.partial_sums import PartialSumsMemory
from ds_quant.runtime.plan_cache import PlanCache
from ds_quant.runtime.run import Level, Run


@dataclass(eq=False, kw_only=True)
class Context:
    """The run of a model, and the state that its collectives share.

    before_gather: runs before a module is gathered.
    after_reduction: runs after a reduction of gradients has begun.
    watched: gradients that are searched for NaN and Inf; None if nothing asks for it.
    weights_version: the step, and the number of exchanges of weights in it. Codecs are bound anew
        when it grows.
    partial_sums: their memory, freed by the last backward of a step or by ``discard_gradients``.
    _gradient_sums: plans, which hold no tensors but small tables: emptied when they are full.
    """

    run: Run
    before_gather: Callable[[ShardedModule], None]
    after_reduction: Callable[[], None]
    watched: WatchedGradients | None = None
    weights_version: tuple[int, int] = (0, 0)
    partial_sums: PartialSumsMemory = field(default_factory=PartialSumsMemory)
    _gradient_sums: PlanCache[
        tuple[Level, tuple[Segment, ...], tuple[GradientSpec, ...], float], GradientSums
    ] = field(default_factory=PlanCache)

    def gradient_sums(
        self,
        level: Level,
        segments: tuple[Segment, ...],
        specs: tuple[GradientSpec, ...],
        scale: float,
    ) -> GradientSums:
        """Plan a reduction; layers of equal shapes share one plan."""
        key = level, segments, specs, scale
        known = self._gradient_sums.get(key)
        if known is not None:
            return known
        sums = GradientSums(
            segments,
            specs,
            level.hops,
            level.hierarchy.flat,
            scale,
            in_place=level.replicas == 1,
        )
        return self._gradient_sums.add(key, sums)
