"""Reduce gradients of FSDP2: the custom reduce-scatter of every sharded module.

[Note: one backward, one step] With several nodes of several ranks a reduction has two hops. Where
the user says that a backward is not the last one of the optimizer step
(``set_is_last_backward(False)`` or ``set_requires_all_reduce(False)``), only the hop inside the
node runs; FSDP2 gets zeros, which it adds to the gradient. The last backward reduces the partial
sums between the nodes. A user who says nothing has every backward cross between the nodes.

[Note: replicas] With a replica in every node a rank of a node sums its part of a row over the
nodes, and sends it back to them: see comm/returned_sums.py. FSDP2 gets the sum over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from ds_quant.codec.bound import BoundCodec, Rotation
from ds_quant.codec.codec import CastCodec
from ds_quant.comm.reduce import GradientSums, Reduction
from ds_quant.comm.reduction_plan import GradientSpec, Segment
from ds_quant.comm.returned_sums import Piece, ReturnedSums
from ds_quant.comm.slots import row_vector
from ds_quant.comm.small_tensors import SMALL_NUMEL, is_tight, small_tensors_last
from ds_quant.fsdp2.sharded_module import ShardedModule
from ds_quant.kernels.wire import shard_range
from ds_quant.runtime.param import GradientCodecs, Param, full_precision_gradient

if TYPE_CHECKING:
    from ds_quant.fsdp2.front import Front


@dataclass(frozen=True, eq=False, kw_only=True)
class _Plan:
    """The reduction of a sharded module's gradients, the same in every step.

    rows: the parameters that have gradients.
    returned: with replicas, writes the sums of all nodes over the row, with ``returned_codecs``.
    """

    rows: ShardedModule
    gradient_codecs: Sequence[GradientCodecs]
    sums: GradientSums
    returned: ReturnedSums | None = None
    returned_codecs: Sequence[GradientCodecs] = ()


@dataclass
class _PartialSums:
    """Sums of this node, between two backwards of an optimizer step.

    last: the reduction that still adds to them.
    """

    values: Tensor
    last: Reduction


class QuantizedReduceScatter(ReduceScatter):
    """The reduce-scatter of one sharded module: see [Note: one backward, one step]."""

    def __init__(self, front: Front, sharded: ShardedModule) -> None:
        self._front = front
        self._sharded = sharded
        self._plans: dict[tuple[torch.dtype, bool, float, tuple[bool, ...]], _Plan] = {}
        self._partial_sums: _PartialSums | None = None
        self._backwards = 0  # in this optimizer step

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return uninitialized memory."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce ``input_tensor``, (ranks * row,), to this rank's row in ``output_tensor``.

        1. encode the gradients and reduce them over the hops, with the sums written over the row,
        of which padding stays as it is  2. with replicas exchange the sums between all nodes.
        Before the last backward: 1. reduce inside the node  2. return zeros.

        Raises:
            RuntimeError: a parameter has no gradient.
        """
        front = self._front
        plan = self._plan(input_tensor, self._scale(op))
        step = (front.step << 24) + self._backwards
        bound_codecs, rotations = self._bind(plan, step)
        self._backwards += 1
        if front.defers_inter_node and not (front.is_last_backward and self._sharded.crosses):
            self._accumulate(plan, input_tensor, bound_codecs, rotations)
            output_tensor.zero_()
            return
        partial_sums = self._pop_partial_sums()
        total = output_tensor
        if plan.returned is not None:
            total = plan.sums.new_sums(input_tensor.device)
        plan.sums.begin(
            [input_tensor], bound_codecs, rotations, into=total, partial_sums=partial_sums
        ).wait()
        if plan.returned is not None:
            codecs, signs = _bound(plan.returned_codecs, step, step)
            plan.returned.send(total, output_tensor, [bound for (bound,) in codecs], signs)

    @property
    def holds_partial_sums(self) -> bool:
        """True if gradients of an earlier backward wait for the last one."""
        return self._partial_sums is not None

    @property
    def backwards(self) -> int:
        """Backwards so far in this optimizer step."""
        return self._backwards

    def after_step(self) -> None:
        """Begin the next optimizer step."""
        self._backwards = 0

    def discard(self) -> None:
        """Forget the gradients of an accumulation that was abandoned."""
        self._pop_partial_sums()
        self._backwards = 0

    def _scale(self, op: Any) -> float:
        """Return the factor of the sum over all ranks; after ``SUM`` FSDP2 divides, too."""
        factor = self._sharded.divide_factor
        if op == dist.ReduceOp.SUM:
            # FSDP2 divides by the user's factor, else by the ranks of a shard group.
            return 1 / self._front.replicas if factor is None else 1.0
        # A mean, or a sum premultiplied by the inverse of the user's factor.
        return 1 / (factor or self._front.hierarchy.size)

    def _accumulate(
        self,
        plan: _Plan,
        gradients: Tensor,
        bound_codecs: Sequence[tuple[BoundCodec, ...]],
        rotations: Sequence[Rotation | None],
    ) -> None:
        """Add the gradients, summed inside the node, to the partial sums."""
        values = self._pop_partial_sums()
        fresh = values is None
        if values is None:
            values = plan.sums.new_partial_sums(gradients.device)
        last = Reduction(
            plan.sums.plan,
            [gradients],
            bound_codecs,
            rotations,
            None,
            partial_sums=values,
            fresh=fresh,
        )
        self._partial_sums = _PartialSums(values, last)

    def _pop_partial_sums(self) -> Tensor | None:
        if self._partial_sums is None:
            return None
        partial_sums = self._partial_sums
        self._partial_sums = None
        partial_sums.last.wait()
        return partial_sums.values

    def _bind(
        self, plan: _Plan, step: int
    ) -> tuple[Sequence[tuple[BoundCodec, ...]], Sequence[Rotation | None]]:
        """Return the codecs of this backward on every hop, and the rotation of each gradient."""
        # One pattern of signs for all backwards whose rotated values are added up.
        signs_step = self._front.step << 24 if self._front.defers_inter_node else step
        return _bound(plan.gradient_codecs, step, signs_step)

    def _plan(self, gradients: Tensor, scale: float) -> _Plan:
        full = self._front.is_full_precision(self._front.step)
        trained = self._sharded.trained()
        key = (gradients.dtype, full, scale, trained)
        if key not in self._plans:
            rows = self._sharded.part(trained)
            self._require_all(gradients, rows)
            self._plans[key] = self._new_plan(rows, gradients.dtype, full, scale)
        else:
            self._require_all(gradients, self._plans[key].rows)
        return self._plans[key]

    def _require_all(self, gradients: Tensor, rows: ShardedModule) -> None:
        if gradients.numel() != self._front.shards.size * rows.row_numel:
            raise RuntimeError(
                f"quantized_comm: parameters of {rows.name or 'the root'} have no gradient in this "
                "backward: call model.set_reduce_scatter_unused_params(True), with which FSDP2 "
                "reduces zeros for them"
            )

    def _new_plan(self, rows: ShardedModule, dtype: torch.dtype, full: bool, scale: float) -> _Plan:
        front = self._front
        gradient_codecs = [self._gradient_codecs(param, dtype, full) for param in rows.params]
        specs = [codecs.spec for codecs in gradient_codecs]
        segments = self._segments(rows, gradient_codecs)
        sums = front.gradient_sums(tuple(segments), tuple(specs), scale)
        if front.replicas > 1:
            returned_codecs = [self._returned_codecs(param, dtype, full) for param in rows.params]
            returned_specs = [codecs.spec for codecs in returned_codecs]
            return _Plan(
                rows=rows,
                gradient_codecs=gradient_codecs,
                sums=sums,
                returned=self._returned(rows, segments, sums, returned_specs),
                returned_codecs=returned_codecs,
            )
        return _Plan(rows=rows, gradient_codecs=gradient_codecs, sums=sums)

    def _gradient_codecs(self, param: Param, dtype: torch.dtype, full: bool) -> GradientCodecs:
        hops = len(self._front.route)
        if full:
            codecs = full_precision_gradient(dtype, hops)
        else:
            codecs = param.gradient_codecs(dtype, rank=self._front.hierarchy.rank, hops=hops)
        return _tight_if_small(param, codecs, dtype)

    def _returned_codecs(self, param: Param, dtype: torch.dtype, full: bool) -> GradientCodecs:
        if full:
            codecs = full_precision_gradient(dtype, 1)
        else:
            codecs = param.returned_codecs(dtype, rank=self._front.hierarchy.rank)
        return _tight_if_small(param, codecs, dtype)

    def _returned(
        self,
        rows: ShardedModule,
        segments: Sequence[Segment],
        sums: GradientSums,
        specs: Sequence[GradientSpec],
    ) -> ReturnedSums:
        """Plan the way back of this rank's row, in the order of the segments."""
        front = self._front
        inter = front.hierarchy.inter
        assert inter is not None  # several nodes of several ranks
        row_start = front.shards.rank * rows.row_numel
        pieces = []
        for index, segment in enumerate(segments):
            node, local = divmod(segment.reducer, front.topology.node_size)
            if local == front.shards.rank:
                piece = Piece(
                    node=node,
                    gradient=segment.gradient,
                    numel=segment.numel,
                    first=segment.first,
                    source=sums.own.get(index, 0),
                    target=segment.start - row_start,
                )
                pieces.append(piece)
        return ReturnedSums(pieces, specs, inter)

    def _segments(
        self, rows: ShardedModule, gradient_codecs: Sequence[GradientCodecs]
    ) -> list[Segment]:
        """Return every rank's shard of every gradient, small ones last; with replicas a shard in as
        many pieces as there are nodes.
        """
        if self._front.replicas > 1:
            return self._pieces(rows, gradient_codecs)
        route = self._front.route
        plain = len(route) == 1 and not route[0].full_precision_own
        plain = plain and not any(codecs.spec.block for codecs in gradient_codecs)
        last_codecs = [codecs.spec.codecs[-1] for codecs in gradient_codecs]
        segments = []
        for index in small_tensors_last(last_codecs):
            width = rows.widths[index]
            for rank, numel in enumerate(rows.lengths[index]):
                segments.append(
                    Segment(
                        tensor=0,
                        start=rank * rows.row_numel + rows.offsets[index],
                        numel=numel,
                        gradient=index,
                        first=rank * width,
                        reducer=rank,
                        total=rows.offsets[index],
                        vector=row_vector(rank, numel, width) if plain else None,
                        slot=width if plain or is_tight(last_codecs[index]) else 0,
                    )
                )
        return segments

    def _pieces(
        self, rows: ShardedModule, gradient_codecs: Sequence[GradientCodecs]
    ) -> list[Segment]:
        """Cut the shard of every local rank: node n sums the n-th piece."""
        topology = self._front.topology
        segments = []
        for index in small_tensors_last([codecs.spec.codecs[-1] for codecs in gradient_codecs]):
            for local, numel in enumerate(rows.lengths[index]):
                shard_start = local * rows.row_numel + rows.offsets[index]
                for node in range(topology.nodes):
                    start, stop = shard_range(numel, topology.nodes, node)
                    segments.append(
                        Segment(
                            tensor=0,
                            start=shard_start + start,
                            numel=stop - start,
                            gradient=index,
                            first=local * rows.widths[index] + start,
                            reducer=node * topology.node_size + local,
                        )
                    )
        return segments


def _tight_if_small(param: Param, codecs: GradientCodecs, dtype: torch.dtype) -> GradientCodecs:
    """Return codecs without padding for a small tensor in full precision."""
    is_small = param.shape.numel() <= SMALL_NUMEL
    if is_small and isinstance(codecs.spec.codecs[-1], CastCodec):
        return full_precision_gradient(dtype, len(codecs.hops), tight=True)
    return codecs


def _bound(
    gradient_codecs: Sequence[GradientCodecs], step: int, signs_step: int
) -> tuple[Sequence[tuple[BoundCodec, ...]], Sequence[Rotation | None]]:
    """Return the codecs of every gradient on all hops, and its rotation."""
    bound = [codecs.bound_codecs(step, signs_step) for codecs in gradient_codecs]
    return [codecs for codecs, _ in bound], [rotation for _, rotation in bound]
