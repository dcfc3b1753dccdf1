"""Reduce gradients: the part that all ZeRO stages share.

[Note: one reduction] DeepSpeed fills a *bucket* with gradients. A bucket is cut into *gradient
slices*: one rank gets the mean of each. Under ZeRO-3 every rank gets its shard of every gradient;
under ZeRO-1 and 2 the rank that owns a part of the flat partition gets that part. The *layout* of a
bucket says how it is reduced. It follows from the parameters of the bucket alone and is planned
when the bucket is first seen. Buckets of equal sizes share a plan, because layers are alike.

shard_gradients.py has ZeRO-3, owner_gradients.py has ZeRO-1 and 2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ds_quant.codec.bound import BoundCodec, Rotation
from ds_quant.codec.codec import CastCodec
from ds_quant.comm.reduce import GradientSums, Reduction
from ds_quant.comm.reduction_plan import ReductionHop, Segment
from ds_quant.comm.transport import Communicator
from ds_quant.kernels.batch import Decode, Offsets
from ds_quant.kernels.dispatch import Operations
from ds_quant.kernels.wire import VECTOR_NUMEL, round_up
from ds_quant.runtime.param import (
    GradientCodecs,
    Param,
    full_precision_gradient,
    tight_if_small,
)
from ds_quant.runtime.plan_cache import PlanCache
from ds_quant.zero.front import EngineFront
from ds_quant.zero.partial_gradients import Member, PartialBucket, PartialGradients

# ---- layout of a bucket ----


class GradientSlice(NamedTuple):
    """Elements of a gradient whose mean one rank gets.

    member: key of the slice among the partial sums.
    segment: its place in the bucket and its rank; the layout sets its ``gradient``.
    """

    member: Member
    gradient_codecs: GradientCodecs
    segment: Segment


class OwnSum(NamedTuple):
    """A slice that this rank gets, and the first element of its sum in the buffer of sums."""

    member: Member
    segment: Segment
    offset: int


@dataclass(frozen=True, eq=False, kw_only=True)
class BucketLayout:
    """How a bucket is reduced in every step.

    gradient_codecs: of each gradient.
    members: keys of all slices, in the order of the bucket.
    own_sums: slices that this rank gets, in the order of their sums. A member may have two,
        because a parameter that is used twice may be in a bucket twice.
    dtype: of the sums, unless reduced partial sums are added to them.
    """

    gradient_codecs: Sequence[GradientCodecs]
    reduction: GradientSums
    members: tuple[Member, ...]
    own_sums: Sequence[OwnSum]
    dtype: torch.dtype

    def shards(self, total: Tensor) -> list[Tensor]:
        """View the sums by tensor. ZeRO-3 only, where this rank has a shard of each."""
        by_tensor: dict[int, Tensor] = {}
        for own, padded in zip(self.own_sums, total.split(self._padded_numels), strict=True):
            numel = own.segment.numel
            if padded.numel() != numel:
                padded = padded[:numel]
            by_tensor[own.segment.tensor] = padded
        return [by_tensor[tensor] for tensor in range(len(by_tensor))]

    @cached_property
    def _padded_numels(self) -> list[int]:
        """Elements from each own sum to the next, as ``GradientSums`` lays them out."""
        return [round_up(own.segment.numel, VECTOR_NUMEL) for own in self.own_sums]

    @cached_property
    def sum_ranges(self) -> dict[Member, slice]:
        """Range of each own member in the buffer of sums; of two, the first one."""
        ranges: dict[Member, slice] = {}
        for own in reversed(self.own_sums):
            ranges[own.member] = slice(own.offset, own.offset + own.segment.numel)
        return ranges

    @cached_property
    def digest(self) -> int:
        """An int64 that is equal on ranks whose bucket has the same members in the same order."""
        text = repr([(param.index, owner) for param, owner in self.members])
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    @cached_property
    def copy_to_bucket(self) -> Operations:
        """Copy the sums over the slices of this rank. Buffers: the sums as bytes, the bucket."""
        sums_codec = CastCodec(torch.float32)
        tasks = []
        for _, segment, offset in self.own_sums:
            bucket_buffer = 1 + segment.tensor
            decode = Decode(sums_codec, segment.numel, 0, bucket_buffer, 0)
            first_byte = torch.float32.itemsize * offset
            tasks.append((decode, Offsets(wire=first_byte, values=segment.start)))
        return Operations(tasks)


# ---- a running reduction ----


class PendingSums(NamedTuple):
    """Sums of a bucket whose reduction is running.

    reduction: None if there is nothing to reduce.
    total: buffer of the sums, fp32 or ``layout.dtype``; None before the boundary of gradient
        accumulation, when only partial sums are made.
    reduced: partial sums that were reduced between the nodes before, to be added to the total.
    """

    layout: BucketLayout
    reduction: Reduction | None
    total: Tensor | None
    reduced: Mapping[Member, Tensor]

    def advance(self) -> None:
        """Post the remaining messages. Waits for those that they depend on."""
        if self.reduction is not None:
            self.reduction.advance()

    def wait(self) -> Tensor | None:
        """Return the total, None before the boundary of gradient accumulation."""
        if self.reduction is not None:
            self.reduction.wait()
        if self.total is None:
            return None
        for member, values in self.reduced.items():
            if member in self.layout.sum_ranges:  # else another rank's, without elements
                self.total[self.layout.sum_ranges[member]].add_(values)
        return self.total


class GradientReducer:
    """Plans and begins the reductions of one engine.

    partial_gradients: None if gradients take both hops in every micro-step.
    """

    def __init__(self, front: EngineFront, partial_gradients: PartialGradients | None) -> None:
        self._front = front
        self._run = front.run
        self._partial_gradients = partial_gradients
        # Plans, which hold no tensors but small tables: emptied when they are full.
        self._layouts: PlanCache[Hashable, BucketLayout] = PlanCache()
        self._sums: PlanCache[Hashable, GradientSums] = PlanCache()

    def _plan(
        self,
        key: Hashable,
        slices: Sequence[GradientSlice],
        communicator: Communicator,
        *,
        scale: float,
        balanced: bool,
        sums_dtype: torch.dtype = torch.float32,
    ) -> BucketLayout:
        """Plan the reduction of a bucket and remember it.

        key: all facts that the slices follow from.
        scale: factor of the sums.
        balanced: True to let other ranks than the owners add up some sums, see ``GradientSums``.
        sums_dtype: see ``BucketLayout.dtype``.
        """
        gradient_codecs, segments = _by_gradient(slices)
        specs = tuple([codecs.spec for codecs in gradient_codecs])
        hops = self._run.level(communicator.process_group).hops
        sizes = segments, specs, hops, communicator, scale
        sums = self._sums.get(sizes)
        if sums is None:
            sums = GradientSums(
                segments,
                specs,
                hops,
                communicator,
                scale,
                balanced=balanced,
            )
            self._sums.add(sizes, sums)
        own_sums = [
            OwnSum(slices[index].member, segments[index], offset)
            for index, offset in sums.own.items()
        ]
        layout = BucketLayout(
            gradient_codecs=gradient_codecs,
            reduction=sums,
            members=tuple(dict.fromkeys(part.member for part in slices)),
            own_sums=own_sums,
            dtype=sums_dtype,
        )
        return self._layouts.add(key, layout)

    def _gradient_codecs(
        self, param: Param, dtype: torch.dtype, numel: int, hops: int, rank: int
    ) -> GradientCodecs:
        """Return the codecs of ``numel`` elements of a gradient in this step.

        hops: their number.
        rank: of the sender.
        """
        if self._run.is_full_precision(self._front.step):
            codecs = full_precision_gradient(dtype, hops)
        else:
            codecs = param.gradient_codecs(dtype, rank=rank, hops=hops)
        return tight_if_small(numel, codecs, dtype)

    def _begin(
        self, layout: BucketLayout, tensors: Sequence[Tensor], hops: Sequence[ReductionHop]
    ) -> PendingSums:
        """Begin to reduce a bucket. Afterwards the tensors may change.

        Gradients usually take both hops in every micro-step: steps 1 and 6. If they are sent
        between the nodes once per optimizer step, [Note: partial gradients], a micro-step before
        the boundary takes steps 1, 3 and 4 and the last one steps 1, 3, 5 and 6.
        """
        front, store = self._front, self._partial_gradients
        sums = layout.reduction
        device = tensors[0].device

        # 1. Bind the codecs to this micro-step. Partial sums stay rotated while they are added
        #    up, so all micro-steps of an optimizer step share one pattern of sign flips.
        step = front.gradient_step
        crosses_once = store is not None and len(hops) == 2
        signs_step = front.engine.global_steps << 24 if crosses_once else step
        bound_codecs, rotations = zip(
            *[codecs.bound_codecs(step, signs_step) for codecs in layout.gradient_codecs],
            strict=True,
        )
        partial_sums: Tensor | None = None
        reduced: Mapping[Member, Tensor] = {}

        if store is not None and crosses_once:
            # 2. A bucket of zeros stands for parameters without a gradient at the boundary. Zeros
            #    need no message: reduce the partial sums of earlier micro-steps, and return them.
            if store.only_zeros(layout.members):
                store.pop(None, layout.members)  # a bucket of zeros has none of its own
                zeros = sums.new_sums(device).zero_()
                return PendingSums(layout, None, zeros, store.pop_reduced(layout.members))

            # 3. Continue the partial sums of earlier micro-steps.
            bucket = store.pop(layout, layout.members)
            if bucket is not None:
                bucket.reduction.wait()
                partial_sums = bucket.values

            # 4. Before the boundary: add the gradients up inside the node, and keep the result.
            if not front.engine.is_gradient_accumulation_boundary():
                bucket = _accumulate(layout, tensors, bound_codecs, rotations, partial_sums)
                store.keep(layout, bucket)
                return PendingSums(layout, bucket.reduction, None, {})

            # 5. At the boundary: collect sums of parameters that were in other buckets before.
            reduced = store.pop_reduced(layout.members)

        # 6. Reduce over all hops. The last hop starts from the partial sums, if there are any.
        total = sums.new_sums(device, torch.float32 if reduced else layout.dtype)
        reduction = sums.begin(
            tensors,
            bound_codecs,
            rotations,
            into=total,
            partial_sums=partial_sums,
        )
        return PendingSums(layout, reduction, total, reduced)


def _by_gradient(
    slices: Sequence[GradientSlice],
) -> tuple[list[GradientCodecs], tuple[Segment, ...]]:
    """Number the gradients of the slices.

    Returns:
        the codecs of every gradient, and the segments of the slices with the number of theirs.
    """
    gradient_codecs: list[GradientCodecs] = []
    # A tensor may hold many gradients, each with codecs of its own. Small ones share their codecs
    # (``tight_if_small``), and so a number.
    number_of: dict[tuple[int, int], int] = {}
    segments = []
    for _, codecs, segment in slices:
        number = number_of.setdefault((id(codecs), segment.tensor), len(gradient_codecs))
        if number == len(gradient_codecs):
            gradient_codecs.append(codecs)
        segments.append(segment._replace(gradient=number))
    return gradient_codecs, tuple(segments)


def _accumulate(
    layout: BucketLayout,
    tensors: Sequence[Tensor],
    bound_codecs: Sequence[tuple[BoundCodec, ...]],
    rotations: Sequence[Rotation | None],
    partial_sums: Tensor | None,
) -> PartialBucket:
    """Begin to sum the tensors inside the node, and to add the result to the partial sums."""
    device = tensors[0].device
    is_first = partial_sums is None
    values = layout.reduction.new_partial_sums(device) if partial_sums is None else partial_sums
    intra_node = Reduction(
        layout.reduction.plan,
        tensors,
        bound_codecs,
        rotations,
        None,
        partial_sums=values,
        fresh=is_first,
    )

    def reduce_between_nodes() -> Iterator[tuple[Member, Tensor]]:
        intra_node.wait()
        total = layout.reduction.new_sums(device)
        layout.reduction.begin(
            None, bound_codecs, rotations, into=total, partial_sums=values
        ).wait()
        for member in layout.members:
            if member not in layout.sum_ranges:  # another rank's
                yield member, total[:0]
        for member, segment, offset in layout.own_sums:
            yield member, total[offset : offset + segment.numel]

    return PartialBucket(
        members=layout.members,
        values=values,
        reduction=intra_node,
        reduce_between_nodes=reduce_between_nodes,
    )


def note_finite(flags: list[tuple[str, Tensor]], param: Param, reduced: Tensor) -> None:
    """Note on the device if a reduced gradient is finite."""
    flags.append((param.name, torch.isfinite(reduced).all()))
