"""Rest between the two hops of a reduction, so that several micro-steps cross between nodes once.

[Note: held sums] The first hop sums over the ranks of a node in every micro-step. What it brings is
added, in fp32 and in micro-step order, to what this rank holds for every node: a rank of a node of
G holds one G-th of a bucket. The second hop takes the whole at the last micro-step. Sums are linear
and so is a rotation, so what is held stays rotated; signs must then be those of one optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ds_quant.codec.bound import Coding, Rotation
from ds_quant.comm.message import unpack
from ds_quant.comm.operations import Streams
from ds_quant.comm.reduce import OwnerSums, Pipeline, exchange_of
from ds_quant.comm.reduction_plan import HeldSlice, ReductionPlan


class HeldReduction(Pipeline):
    """The hops of a plan, the first one, or the second one alone, by way of what is held.

    Args:
        held: (plan.held_numel,) fp32, as the first hop leaves it and the second one takes it.
        tensors: those of the plan's segments, 1-D contiguous; None leaves out the first hop.
        fresh: whether nothing is held yet; then the first hop overwrites.
        sums: as for ``Reduction``; None leaves out the second hop.
        codings, rotations: as for ``Reduction``. The rotations are those of all micro-steps.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        held: Tensor,
        codings: Sequence[tuple[Coding, ...]],
        rotations: Sequence[Rotation | None],
        *,
        tensors: Sequence[Tensor] | None = None,
        fresh: bool = False,
        sums: Tensor | None = None,
    ) -> None:
        self._inner, self._outer = (hop.link for hop in plan.hops)
        self._held, self._fresh, self._sums = held, fresh, sums
        self._streams = [Streams(hop, rotations) for hop in zip(*codings, strict=True)]
        exchanges = (tensors is not None) + (sums is not None)
        super().__init__([self._reduce(part, tensors) for part in plan.held], exchanges)

    def _reduce(self, part: HeldSlice, tensors: Sequence[Tensor] | None) -> Iterator[None]:
        """Yields after every exchange it has posted."""
        held = self._held[part.start : part.stop]
        nothing, (near, far) = held[:0], self._streams
        if tensors is not None:
            link, step, kept = self._inner, part.first, nothing
            if step.kept:
                kept = link.empty(step.kept, dtype=torch.float32, device=held.device)
            buffers = [kept, nothing, nothing, nothing, *tensors]
            tensors = ()
            exchange = exchange_of(link, step, buffers, near, (step.own, near))
            del buffers
            yield
            arrived = exchange.wait()
            self._add(part, arrived, kept, held)
        if self._sums is not None:
            step = part.second
            exchange = exchange_of(
                self._outer, step, [nothing, nothing, held, nothing], far, (step.own, far)
            )
            yield
            buffers = [nothing, nothing, exchange.wait(), held, self._sums]
            unpack(self._outer, part.total, buffers, far)

    def _add(self, part: HeldSlice, arrived: Tensor, kept: Tensor, held: Tensor) -> None:
        """Add what the first hop has brought."""
        link, nothing = self._inner, held[:0]
        with link.decoding():
            into = held
            if not self._fresh:
                into = link.empty(held.numel(), dtype=torch.float32, device=held.device)
            part.partial.run([nothing, into, arrived, kept, nothing], self._streams[0])
            if not self._fresh:
                held.add_(into)


def add_up_held(
    sums: OwnerSums,
    held: Tensor,
    codings: Sequence[tuple[Coding, ...]],
    rotations: Sequence[Rotation | None],
    tensors: Sequence[Tensor] | None = None,
) -> Tensor:
    """As ``sums.add_up``, with what is held; ``tensors`` None: of nothing else."""
    totals = sums.room(held.device)
    HeldReduction(sums.plan, held, codings, rotations, tensors=tensors, sums=totals).wait()
    sums.deliver(totals, codings)
    return totals
