"""Reduction of gradients over one or two hops, each with a codec of its own.

[Note: two hops] Ranks are numbered node by node, r = node * node_size + local. The first hop sums
over the ranks of a node: rank (n, g) collects from its node what is bound for any (n', g). The
second hop sums those partial sums over the nodes: each byte enters a node once. Between the two a
segment is decoded, added in fp32 and encoded again (`Recode`); a rotation spans both hops.
Own contributions are exact where a hop says so: nobody else sees them, so they need no bits and no
place in a message, and with two nodes that halves the variance of the inter-node hop.

[Note: slices] Large reductions over two hops are cut into slices. While slice i crosses between
the nodes, slice i + 1 is inside them.

May import: torch, coding, operations, reduction_plan, rotation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ds_quant.coding import Coding
from ds_quant.operations import Streams
from ds_quant.reduction_plan import ReductionPlan, SlicePlan
from ds_quant.rotation import Rotation


class Reduction:
    """Every segment of a plan on its way to become its sum over all ranks: see [Note: two hops].

    Sums are fp32 in rank order within a hop, nodes in order across hops; the plan's scale is
    applied once at the end. Once this is made, values may change.

    Args:
        tensors: those of the plan's segments, 1-D contiguous.
        codings: per gradient one for each hop; the addresses are this rank's own.
        rotations: per gradient.
        sums: (elements,) fp32, where the segments that this rank reduces have their places.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        tensors: Sequence[Tensor],
        codings: Sequence[tuple[Coding, ...]],
        rotations: Sequence[Rotation | None],
        sums: Tensor,
    ) -> None:
        self._plan, self._sums = plan, sums
        by_hop = list(zip(*codings, strict=True))
        self._streams = [
            Streams(hop, rotations, by_hop[max(depth - 1, 0)]) for depth, hop in enumerate(by_hop)
        ]
        self._running: deque[tuple[Iterator[None], int]] = deque()  # and hops still to be posted
        for part in plan.slices:
            started = self._reduce(part, tensors)
            next(started)
            self.advance()
            if len(self._running) > 1:
                self._finish_oldest()
            self._running.append((started, len(plan.hops) - 1))

    def advance(self) -> None:
        """Post the last hop of every slice, waiting for the hops before."""
        for _ in range(len(self._running)):
            steps, hops = self._running.popleft()
            for _ in range(hops):
                next(steps)
            self._running.append((steps, 0))

    def wait(self) -> None:
        """Return when the sums are written."""
        self.advance()
        while self._running:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        steps, _ = self._running.popleft()
        for _ in steps:
            pass

    def _reduce(self, part: SlicePlan, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Yields after every exchange it has posted; writes its part of the sums at the end."""
        nothing, sums = self._sums[:0], self._sums
        arrived = before = nothing
        for depth, (hop, step) in enumerate(zip(self._plan.hops, part.steps, strict=True)):
            link, streams = hop.link, self._streams[depth]
            wire = link.empty(sum(step.sent), device=sums.device)
            kept = nothing
            if step.kept:
                kept = link.empty(step.kept, dtype=torch.float32, device=sums.device)
            buffers = [wire, kept, arrived, before, sums, *tensors]
            tensors = ()
            with link.encoding("gradients") as notes:
                step.encode.run(buffers, streams, notes)
            sizes = {"sent": step.sent, "received": step.received}
            exchange = link.all_to_all(wire, **sizes, role="gradients")
            with link.decoding():
                step.own.run(buffers, self._streams[max(depth - 1, 0)])
            del buffers
            yield
            arrived, before = exchange.wait(), kept
        with self._plan.hops[-1].link.decoding():
            buffers = [nothing, nothing, arrived, before, sums]
            part.total.run(buffers, self._streams[-1])
