"""Reduce the buckets of a DDP model: every rank gets the mean over all ranks, of equal bits.

[Note: runs] DDP's first backward has one bucket with the whole model, later ones have buckets of
``bucket_cap_mb``. So a bucket is cut into *runs*: consecutive parameters of at most ``RUN_NUMEL``
elements, or one larger parameter. Memory then depends on the runs alone.

[Note: equal pieces] The ranks that sum a parameter, and the borders of its pieces, do not depend on
the bucket, so neither does a bit of the result: DDP builds its buckets anew after the first
backward of a process, also of one that resumes a run.

[Note: order of the exchanges] A run is reduced to the ranks that sum its parts, and the sums go
back to all ranks (comm/returned_sums.py). While one run takes its next exchange, those before it
take the following ones. The hook itself posts all exchanges, in one order on all ranks. A callback
of a future must not: futures are completed in the order in which messages arrive.

[Note: rounds] A *round* is one pass of the hook over all buckets. Ranks run equal rounds, because
buckets are exchanged in every one. So random bits are addressed by round, parameter and element:
optimizer steps may differ between ranks, for example after ``join()``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed import GradBucket

from ds_quant.comm.profiling import profiler_range
from ds_quant.comm.reduce import GradientSums
from ds_quant.comm.reduction_plan import GradientSpec, Segment
from ds_quant.comm.small_tensors import small_tensors_last
from ds_quant.runtime.param import GradientCodecs, Param, bind
from ds_quant.runtime.plan_cache import PlanCache
from ds_quant.runtime.reductions import (
    ReturnedGradients,
    placements,
    plan_return,
    reduced_codecs,
)
from ds_quant.runtime.run import Run

RUN_NUMEL = 1 << 23  # elements: a bucket of fp32 gradients has 6.6 million by default

_END = object()


@dataclass(frozen=True, eq=False, kw_only=True)
class _Plan:
    """The two exchanges of a run, elements [start, stop) of its bucket."""

    start: int
    stop: int
    gradient_codecs: Sequence[GradientCodecs]
    sums: GradientSums
    returned: ReturnedGradients


class BucketReduction:
    """The reductions of all buckets of a model. See [Note: order of the exchanges]."""

    def __init__(self, run: Run, frozen: Sequence[Param]) -> None:
        """frozen: parameters that DDP may reduce; those of a bucket are added to the run."""
        self._run = run
        self._frozen = {id(param.tensor): param for param in frozen}
        # Plans, which hold no tensors but small tables: emptied when they are full.
        self._plans: PlanCache[tuple[tuple[int, ...], torch.dtype, bool], list[_Plan]]
        self._plans = PlanCache()
        # Oldest first, each with its messages and sums; ``finish`` frees them in every round.
        self._in_flight: list[Iterator[None]] = []
        self._placements = placements(run.params, run.world.hierarchy.size)

    def begin(self, bucket: GradBucket, step: int, then: Callable[[], None]) -> None:
        """Begin to replace the values of a bucket by their mean over all ranks.

        step: address of the random bits.
        then: called when the bucket is reduced.
        """
        buffer = bucket.buffer()
        plans = self._plans_of(bucket)
        for plan in plans:
            on_end = then if plan is plans[-1] else None
            exchanges = self._reduce(plan, buffer[plan.start : plan.stop], step, on_end)
            with profiler_range("reduce", f"bucket {bucket.index()}"):
                next(exchanges)
                self._advance()
            self._in_flight.append(exchanges)

    def finish(self) -> None:
        """Return when all buckets are reduced."""
        while self._in_flight:
            self._advance()

    def _advance(self) -> None:
        """Let every run in flight finish an exchange and post its next one."""
        self._in_flight = [each for each in self._in_flight if next(each, _END) is not _END]

    def _reduce(
        self, plan: _Plan, gradients: Tensor, step: int, then: Callable[[], None] | None
    ) -> Iterator[None]:
        """Reduce a run in place; yields after every exchange that it has posted.

        gradients: (elements,), a view of the bucket. then: called at the end.
        """
        bound_codecs, rotations = bind(plan.gradient_codecs, step, step)
        sums = plan.sums.new_sums(gradients.device)
        reduction = plan.sums.begin([gradients], bound_codecs, rotations, into=sums)
        yield
        if len(plan.sums.plan.hops) > 1:
            reduction.advance()
            yield
        reduction.wait()
        returned = plan.returned.send(sums, gradients, step)
        del reduction, sums
        yield
        returned.wait()
        if then is not None:
            then()

    # ---- plans ----

    def _param_of(self, parameter: Tensor) -> Param:
        """Return the record of a parameter in a bucket, which is equal on all ranks."""
        param = self._run.param_of(parameter)
        if param is None:
            param = self._frozen.pop(id(parameter))
            self._run.add_params([param])
            self._placements |= placements([param], self._run.world.hierarchy.size)
        return param

    def _plans_of(self, bucket: GradBucket) -> list[_Plan]:
        parameters = bucket.parameters()
        dtype = bucket.buffer().dtype
        full = self._run.is_full_precision(self._run.step)
        key = (tuple(map(id, parameters)), dtype, full)
        plans = self._plans.get(key)
        if plans is None:
            params = [self._param_of(parameter) for parameter in parameters]
            plans = self._plans.add(key, [])
            start = 0
            for members in runs_of(params):
                plan = self._plan(members, start, dtype, full)
                plans.append(plan)
                start = plan.stop
            if start != bucket.buffer().numel():
                raise RuntimeError(
                    f"quantized_comm: DDP reduces a bucket of {bucket.buffer().numel()} elements "
                    f"where {start} were expected, of {len(params)} parameters such as "
                    f"{params[0].name}: please report this with the release of torch"
                )
        return plans

    def _plan(self, params: Sequence[Param], start: int, dtype: torch.dtype, full: bool) -> _Plan:
        """Plan a run. full: nothing is quantized."""
        world = self._run.world
        gradient_codecs = reduced_codecs(world, params, dtype, full_precision=full)
        specs = [each.spec for each in gradient_codecs]
        segments = self._segments(params, specs)
        scale = 1 / world.hierarchy.size
        sums = GradientSums(segments, specs, world.hops, world.hierarchy.flat, scale)
        return _Plan(
            start=start,
            stop=start + sum(param.shape.numel() for param in params),
            gradient_codecs=gradient_codecs,
            sums=sums,
            returned=plan_return(world, params, dtype, segments, sums, full_precision=full),
        )

    def _segments(self, params: Sequence[Param], specs: Sequence[GradientSpec]) -> list[Segment]:
        """Return the pieces of parameters that lie end to end, small tensors last."""
        starts = list(accumulate((param.shape.numel() for param in params), initial=0))
        segments: list[Segment] = []
        for index in small_tensors_last([spec.codecs[-1] for spec in specs]):
            numel = params[index].shape.numel()
            whole = Segment(
                tensor=0, start=starts[index], numel=numel, gradient=index, first=0, reducer=0
            )
            pieces = self._placements[params[index]].pieces(numel, specs[index].unit)
            segments += [whole.part(start, stop, reducer=rank) for start, stop, rank in pieces]
        return segments


def runs_of(params: Sequence[Param]) -> Iterator[list[Param]]:
    """Cut the parameters of a bucket: see [Note: runs]."""
    members: list[Param] = []
    numel = 0
    for param in params:
        if members and numel + param.shape.numel() > RUN_NUMEL:
            yield members
            members = []
            numel = 0
        members.append(param)
        numel += param.shape.numel()
    yield members
