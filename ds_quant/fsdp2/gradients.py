"""Reduce gradients of FSDP2: the custom reduce-scatter of every sharded module.

[Note: one backward, one step] With several nodes of several ranks a reduction has two hops. Where
the user says that a backward is not the last one of the optimizer step
(``set_is_last_backward(False)``), only the hop inside the node runs; FSDP2 gets zeros, which it
adds to the gradient. The last backward reduces the partial sums between the nodes. A user who says
nothing has every backward cross between the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from ds_quant.codec.bound import BoundCodec, Rotation, full_precision
from ds_quant.codec.codec import CastCodec
from ds_quant.comm.reduce import GradientSums, Reduction
from ds_quant.comm.reduction_plan import Segment
from ds_quant.comm.slots import row_vector
from ds_quant.comm.small_tensors import SMALL_NUMEL, is_tight, small_tensors_last
from ds_quant.fsdp2.sharded_module import ShardedModule
from ds_quant.kernels.batch import Decode
from ds_quant.kernels.dispatch import Operations, RngState
from ds_quant.runtime.param import GradientCodecs, full_precision_gradient

if TYPE_CHECKING:
    from ds_quant.fsdp2.front import Front

_COPY = RngState([full_precision(torch.float32)], [None])


@dataclass(frozen=True, eq=False, kw_only=True)
class _Plan:
    """The reduction of a sharded module's gradients, the same in every step.

    copies: write the sums over this rank's row, of which padding stays as it is.
    """

    gradient_codecs: Sequence[GradientCodecs]
    sums: GradientSums
    copies: Operations


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
        self._plans: dict[tuple[torch.dtype, bool, float], _Plan] = {}
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

        1. encode the gradients and reduce them over the hops  2. write the sums over the row.
        Before the last backward: 1. reduce inside the node  2. return zeros.

        Raises:
            RuntimeError: ``op`` is neither a sum nor a mean.
        """
        front = self._front
        plan = self._plan(input_tensor.dtype, self._scale(op))
        bound_codecs, rotations = self._bind(plan)
        self._backwards += 1
        if front.defers_inter_node and not front.is_last_backward:
            self._accumulate(plan, input_tensor, bound_codecs, rotations)
            output_tensor.zero_()
            return
        partial_sums = self._pop_partial_sums()
        total = plan.sums.new_sums(input_tensor.device)
        plan.sums.begin(
            [input_tensor], bound_codecs, rotations, into=total, partial_sums=partial_sums
        ).wait()
        buffers = [total.view(torch.uint8), output_tensor]
        plan.copies.run(buffers, _COPY, backend=front.hierarchy.backend)

    @property
    def holds_partial_sums(self) -> bool:
        """True if gradients of an earlier backward wait for the last one."""
        return self._partial_sums is not None

    def after_step(self) -> None:
        """Begin the next optimizer step."""
        self._backwards = 0

    def discard(self) -> None:
        """Forget the gradients of an accumulation that was abandoned."""
        self._pop_partial_sums()
        self._backwards = 0

    def _scale(self, op: Any) -> float:
        if op == dist.ReduceOp.SUM:
            return 1.0
        if op == dist.ReduceOp.AVG:
            return 1 / self._front.hierarchy.size
        raise RuntimeError(
            "quantized_comm: set_gradient_divide_factor makes FSDP2 ask for a premultiplied sum, "
            "whose factor cannot be read: call set_force_sum_reduction_for_comms(True) on the same "
            "module, and FSDP2 divides itself"
        )

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
        self, plan: _Plan
    ) -> tuple[Sequence[tuple[BoundCodec, ...]], Sequence[Rotation | None]]:
        """Return the codecs of this backward on every hop, and the rotation of each gradient."""
        step = self._front.step << 24
        # One pattern of signs for all backwards whose rotated values are added up.
        signs_step = step if self._front.defers_inter_node else step + self._backwards
        bound = [
            codecs.bound_codecs(step + self._backwards, signs_step)
            for codecs in plan.gradient_codecs
        ]
        return [codecs for codecs, _ in bound], [rotation for _, rotation in bound]

    def _plan(self, dtype: torch.dtype, scale: float) -> _Plan:
        full = self._front.is_full_precision(self._front.step)
        key = (dtype, full, scale)
        if key not in self._plans:
            self._plans[key] = self._new_plan(dtype, full, scale)
        return self._plans[key]

    def _new_plan(self, dtype: torch.dtype, full: bool, scale: float) -> _Plan:
        front = self._front
        gradient_codecs = [
            self._gradient_codecs(i, dtype, full) for i in range(len(self._sharded.params))
        ]
        specs = [codecs.spec for codecs in gradient_codecs]
        segments = self._segments(gradient_codecs)
        sums = front.gradient_sums(tuple(segments), tuple(specs), scale)
        cast = CastCodec(torch.float32)
        rank = front.hierarchy.rank
        copies = Operations(
            (
                Decode(cast, segments[index].numel, 0, 1, 0),
                (4 * start, segments[index].start - rank * self._sharded.row_numel),
            )
            for index, start in sums.own.items()
            if segments[index].numel
        )
        return _Plan(gradient_codecs=gradient_codecs, sums=sums, copies=copies)

    def _gradient_codecs(self, index: int, dtype: torch.dtype, full: bool) -> GradientCodecs:
        param = self._sharded.params[index]
        hops = len(self._front.route)
        if full:
            codecs = full_precision_gradient(dtype, hops)
        else:
            codecs = param.gradient_codecs(dtype, rank=self._front.hierarchy.rank, hops=hops)
        is_small = param.shape.numel() <= SMALL_NUMEL
        if is_small and isinstance(codecs.spec.codecs[-1], CastCodec):
            return full_precision_gradient(dtype, hops, tight=True)
        return codecs

    def _segments(self, gradient_codecs: Sequence[GradientCodecs]) -> list[Segment]:
        """Return every rank's shard of every gradient, small ones last."""
        sharded, route = self._sharded, self._front.route
        plain = len(route) == 1 and not route[0].full_precision_own
        plain = plain and not any(codecs.spec.block for codecs in gradient_codecs)
        last_codecs = [codecs.spec.codecs[-1] for codecs in gradient_codecs]
        segments = []
        for index in small_tensors_last(last_codecs):
            width = sharded.widths[index]
            for rank, numel in enumerate(sharded.lengths[index]):
                segments.append(
                    Segment(
                        tensor=0,
                        start=rank * sharded.row_numel + sharded.offsets[index],
                        numel=numel,
                        gradient=index,
                        first=rank * width,
                        reducer=rank,
                        vector=row_vector(rank, numel, width) if plain else None,
                        slot=width if plain or is_tight(last_codecs[index]) else 0,
                    )
                )
        return segments
