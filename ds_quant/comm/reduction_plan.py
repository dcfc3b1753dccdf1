"""Plan a reduction once, from sizes alone; every step then runs it: [Note: two hops] of reduce.py.

segment  consecutive elements of one gradient that one rank sums, its reducer
slice    part of all segments; one slice crosses between the nodes while the next is inside them.
         The gradient slices of zero/gradients.py are something else: they come in as segments
hop      one exchange of a reduction, among the ranks of a node or between nodes
row      the segments bound for one rank of a hop, in one message
own      contribution that a rank adds as it is, in fp32, without a message

[Note: number of slices] With n slices a reduction takes longer + shorter / n + n * overhead: the
seconds of the longer and of the shorter hop, and the cost of a slice beyond its bytes. This is
least for n = sqrt(shorter / overhead). On the host a slice is two messages and five kernel calls,
for any number of tensors and ranks: 0.13 ms for a layer of Llama-7B on 4 x 8 ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from ds_quant.codec.bound import VECTORS_PER_ELEMENT
from ds_quant.codec.codec import Codec, GroupCodec
from ds_quant.comm.slots import lay_out, row_vector
from ds_quant.comm.small_tensors import is_tight
from ds_quant.comm.transport import Communicator
from ds_quant.kernels.batch import Encode, Offsets, Recode, Rotate, Sum, Task
from ds_quant.kernels.dispatch import Operations
from ds_quant.kernels.wire import VECTOR_NUMEL, ceil_div, round_up, shard_range

# ---- slices ----


MOST = 16  # slices, unless more are asked for


def presumed_pace(device: torch.device, backend: str) -> float:
    """Return the presumed ``Slicing.pace`` of links that nobody has measured.

    Inside a node 8-bit codes are presumed to move at 300 GB/s with NCCL, else at 20 GB/s. A slice
    is presumed to cost the host 0.1 ms beyond its bytes and latency, and 0.5 ms on CUDA, where it
    launches kernels on several streams. These are orders of magnitude, not fitted to any link.
    """
    has_nvlink = device.type == "cuda" and "nccl" in backend
    seconds_per_element = 1 / (3e11 if has_nvlink else 2e10)
    overhead_seconds = 1e-4 if device.type == "cpu" else 5e-4
    return seconds_per_element / overhead_seconds


@dataclass(frozen=True, kw_only=True)
class Slicing:
    """The number of slices: fixed, or sqrt(elements x pace). See [Note: number of slices].

    count: fixed number; None: depends on the elements.
    pace: the shorter hop's seconds per element over a slice's overhead in seconds.
    """

    count: int | None = None
    pace: float = presumed_pace(torch.device("cpu"), "gloo")

    def slices(self, numel: int) -> int:
        """Return the number of slices for ``numel`` elements of this rank's input."""
        if self.count is not None:
            return self.count
        return max(1, min(MOST, round(math.sqrt(numel * self.pace))))


# ---- inputs of a plan ----


@dataclass(frozen=True, kw_only=True)
class ReductionHop:
    """One exchange of a reduction over a group of ranks.

    communicator: the ranks of the exchange.
    divisor: rank r of the group is bound for index r // divisor % size of the communicator.
    full_precision_own: True if a rank adds its own contribution as it is.
    slicing: read from the last of two hops; one hop has one slice.
    """

    communicator: Communicator
    divisor: int = 1
    full_precision_own: bool = False
    slicing: Slicing = Slicing()

    def receiver_of(self, rank: int) -> int:
        """Return the index within the communicator of the rank that takes data for ``rank``."""
        return rank // self.divisor % self.communicator.size


class GradientSpec(NamedTuple):
    """How a gradient is sent.

    codecs: of every hop.
    block: elements of a rotation block, 0 for no rotation.
    flips: 0 for no sign flips, 1 for the stream's, OWN_SIGNS for those of every sender of the last
        hop.
    delivery: codec of sums on their way to an owner; None under ZeRO-3, where reducers are owners.
    """

    codecs: tuple[Codec, ...]
    block: int = 0
    flips: int = 0
    delivery: Codec | None = None

    @property
    def unit(self) -> int:
        """Granularity in elements at which a segment can be cut without changing a group."""
        group_sizes = [codec.group_size for codec in self.codecs if isinstance(codec, GroupCodec)]
        return math.lcm(VECTOR_NUMEL, *group_sizes, self.block or 1)


class Segment(NamedTuple):
    """Consecutive elements of one gradient, to be summed by one rank.

    tensor: index of its tensor. start: its first element in the tensor.
    gradient: index of its spec and RNG state.
    first: its first element in the gradient, by which random bits are addressed.
    reducer: the rank that sums it.
    total: first element of its sum, on the reducer.
    vector: first vector of its random bits; None: that of ``BoundCodec.at(first)``.
    slot: capacity of its slot in elements, if more than ``numel``; rows of shards all have the
        length of a full shard.
    """

    tensor: int
    start: int
    numel: int
    gradient: int
    first: int
    reducer: int
    total: int = 0
    vector: int | None = None
    slot: int = 0

    def part(self, start: int, stop: int, *, reducer: int | None = None) -> Segment:
        """Return elements [start, stop) of the segment. reducer: sums them; None: as before."""
        return self._replace(
            start=self.start + start,
            numel=stop - start,
            first=self.first + start,
            reducer=self.reducer if reducer is None else reducer,
            total=self.total + start,
        )


def shards_of(tensor: int, numel: int, ranks: int, *, plain: bool, small: bool) -> list[Segment]:
    """Return the shards of a tensor as segments, each summed by its rank.

    plain: True over one hop without rotations and full-precision own contributions. Slots then have
        the length of a full shard.
    small: True for a small tensor, whose slots have that length too.
    """
    width = ceil_div(numel, ranks)
    shards = []
    for rank in range(ranks):
        start, stop = shard_range(numel, ranks, rank)
        shards.append(
            Segment(
                tensor=tensor,
                start=start,
                numel=stop - start,
                gradient=tensor,
                first=start,
                reducer=rank,
                vector=row_vector(rank, stop - start, width) if plain else None,
                slot=width if plain or small else 0,
            )
        )
    return shards


# ---- plans ----


# Buffers of the operations: the outgoing message, own contributions in fp32, the incoming message,
# own contributions of the previous hop, the sums; then the tensors.
WIRE, OWN, ARRIVED, OWN_BEFORE, SUMS, TENSORS = range(6)


class SliceHop(NamedTuple):
    """One hop of one slice.

    sent, received: bytes to and from every rank.
    encode: encodes the message and makes the own contributions; on CUDA in the same launch.
    own_numel: elements of the own contributions.
    """

    sent: list[int]
    received: list[int]
    encode: Operations
    own_numel: int


class SlicePlan(NamedTuple):
    """The hops of one slice, and its sums.

    final_sums: adds up the messages of the last hop, rotated back and scaled.
    partial_sums: of a deferred reduction, see [Note: partial sums] of reduce.py: adds up the
        messages of the first hop, still rotated, into elements [start, stop) of the partial sums.
    partial_ranges: of a deferred reduction, (gradient, start, stop) of every segment in the partial
        sums.
    """

    hops: list[SliceHop]
    final_sums: Operations
    partial_sums: Operations
    start: int
    stop: int
    partial_ranges: list[tuple[int, int, int]]


class ReductionPlan:
    """The operations and messages of a reduction of segments, the same in all steps.

    specs: of every gradient.
    scale: factor of the sums.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        specs: Sequence[GradientSpec],
        hops: Sequence[ReductionHop],
        *,
        scale: float,
    ) -> None:
        self.hops = hops
        self._specs = specs
        self._scale = scale
        self._slices = _slices(segments, specs, hops)

    @cached_property
    def slices(self) -> list[SlicePlan]:
        """Slices whose hops follow each other."""
        return self._compile(deferred=False)

    @cached_property
    def deferred_slices(self) -> list[SlicePlan]:
        """The same slices over two hops, with partial sums kept between them."""
        return self._compile(deferred=True)

    def _compile(self, deferred: bool) -> list[SlicePlan]:
        plans: list[SlicePlan] = []
        partial_end = 0
        for segments in self._slices:
            compiler = _Compiler(segments, self._specs, self.hops, self._scale)
            plans.append(compiler.compile(deferred, partial_end))
            partial_end = plans[-1].stop
        return plans

    @property
    def partial_numel(self) -> int:
        """Elements of the partial sums of this rank, fp32."""
        return self.deferred_slices[-1].stop if self.deferred_slices else 0


def _slices(
    segments: Sequence[Segment], specs: Sequence[GradientSpec], hops: Sequence[ReductionHop]
) -> list[list[Segment]]:
    """Distribute the segments over slices by sizes alone, so all ranks cut alike.

    Small segments are whole in the first slice: see [Note: small tensors] of small_tensors.py.
    """
    total = sum(segment.numel for segment in segments)
    count = hops[-1].slicing.slices(total) if len(hops) > 1 else 1
    slices: list[list[Segment]] = [[] for _ in range(count)]
    units = [spec.unit for spec in specs]
    is_small = [is_tight(spec.codecs[-1]) for spec in specs]
    for segment in segments:
        if is_small[segment.gradient]:
            slices[0].append(segment)
            continue
        numel = segment.numel
        unit = units[segment.gradient]
        borders = [numel * i // count // unit * unit for i in range(count)] + [numel]
        for members, (start, stop) in zip(slices, pairwise(borders), strict=True):
            if start < stop or segment.slot:
                members.append(segment.part(start, stop))
    return [members for members in slices if members]


class _Compiler:
    """Plans the hops of one slice, one after the other.

    Segments are named by their indices in the slice, hops by their depth, of which the first has 0.
    An offset is the first element of a segment in a buffer of fp32 values, a slot the first byte of
    a segment in a row or message.
    """

    def __init__(
        self,
        segments: list[Segment],
        specs: Sequence[GradientSpec],
        hops: Sequence[ReductionHop],
        scale: float,
    ) -> None:
        self._segments = segments
        self._specs = specs
        self._hops = hops
        self._scale = scale
        # Elements of whole rotation blocks.
        self._padded_numels = [
            round_up(segment.numel, specs[segment.gradient].block or 1) for segment in segments
        ]
        # Of the previous hop: the slots in each incoming row, the bytes of such a row, and the
        # offsets of own contributions.
        self._slots: dict[int, int] = {}
        self._row_bytes = 0
        self._own_offsets: dict[int, int] = {}
        # Offsets in the partial sums, once they are planned.
        self._partial_offsets: dict[int, int] | None = None

    def compile(self, deferred: bool, partial_start: int) -> SlicePlan:
        """Plan all hops.

        deferred: True to keep partial sums between the hops.
        partial_start: first element of this slice in the partial sums.
        """
        remaining = list(range(len(self._segments)))  # segments that this rank still adds up
        slice_hops: list[SliceHop] = []
        partial_sums: list[Task] = []
        partial_ranges: list[tuple[int, int, int]] = []
        partial_numel = 0
        for depth, hop in enumerate(self._hops):
            rows: list[list[int]] = [[] for _ in range(hop.communicator.size)]  # by receiver
            for index in remaining:
                receiver = hop.receiver_of(self._segments[index].reducer)
                rows[receiver].append(index)
            slice_hops.append(self._slice_hop(rows, depth))
            remaining = rows[hop.communicator.rank]
            if deferred and depth == 0:
                partial_offsets, partial_numel = self._end_to_end(remaining)
                for index, offset in partial_offsets.items():
                    partial_sums.append(self._partial_sum(index, 1, offset))
                    start = partial_start + offset
                    stop = start + self._padded_numels[index]
                    partial_ranges.append((self._segments[index].gradient, start, stop))
                self._partial_offsets = partial_offsets
        final_sums = [self._final_sum(index) for index in remaining if self._segments[index].numel]
        return SlicePlan(
            slice_hops,
            final_sums=Operations(final_sums),
            partial_sums=Operations(partial_sums),
            start=partial_start,
            stop=partial_start + partial_numel,
            partial_ranges=partial_ranges,
        )

    def _end_to_end(self, indices: Iterable[int]) -> tuple[dict[int, int], int]:
        """Return offsets of segments that follow each other, and the elements of them all."""
        offsets: dict[int, int] = {}
        end = 0
        for index in indices:
            offsets[index] = end
            end += round_up(self._padded_numels[index], VECTOR_NUMEL)
        return offsets, end

    def _slice_hop(self, rows: list[list[int]], depth: int) -> SliceHop:
        """Plan one hop; ``rows``: the segments bound for each rank."""
        hop = self._hops[depth]
        rank = hop.communicator.rank
        own_row = rows[rank]
        outgoing = list(rows)
        if hop.full_precision_own:
            outgoing[rank] = []
        layouts = [lay_out(self._size(index, depth) for index in row) for row in outgoing]
        sent = [nbytes for _, nbytes in layouts]
        row_starts = accumulate(sent, initial=0)
        encode: list[Task] = []
        for row, (slots, _), row_start in zip(outgoing, layouts, row_starts, strict=False):
            for index, slot in zip(row, slots, strict=True):
                if self._segments[index].numel:
                    encode.append(self._encode(index, row_start + slot, depth))
        encode.sort(key=lambda task: task[0].stream)  # tasks of one gradient become one job
        own_offsets: dict[int, int] = {}
        own_numel = 0
        if hop.full_precision_own and depth and self._partial_offsets is not None:
            # Own contributions are read from the partial sums.
            own_offsets = {index: self._partial_offsets[index] for index in own_row}
        elif hop.full_precision_own:
            own_offsets, own_numel = self._end_to_end(own_row)
            for index, offset in own_offsets.items():
                encode.append(self._own_contribution(index, offset, depth))
        slots, self._row_bytes = lay_out(self._size(index, depth) for index in own_row)
        self._slots = dict(zip(own_row, slots, strict=True))
        self._own_offsets = own_offsets
        received = [self._row_bytes] * hop.communicator.size
        if hop.full_precision_own:
            received[rank] = 0
        return SliceHop(sent, received, Operations(encode), own_numel)

    def _size(self, index: int, depth: int) -> tuple[Codec, int]:
        """Return the codec of a segment's slot and its capacity in elements."""
        segment = self._segments[index]
        codec = self._specs[segment.gradient].codecs[depth]
        return codec, max(self._padded_numels[index], segment.slot)

    def _encode(self, index: int, slot: int, depth: int) -> Task:
        """Plan the encoding of a segment into the message, from byte ``slot`` on."""
        segment = self._segments[index]
        spec = self._specs[segment.gradient]
        vector = segment.vector
        if vector is None:
            vector = VECTORS_PER_ELEMENT * segment.first
        if depth == 0:
            from_tensor = Encode(
                spec.codecs[0],
                segment.numel,
                values=TENSORS + segment.tensor,
                wire=WIRE,
                stream=segment.gradient,
                block=spec.block,
                flips=bool(spec.flips),
            )
            return from_tensor, Offsets(values=segment.start, wire=slot, vector=vector)
        if self._partial_offsets is not None:
            from_partial_sum = Encode(
                spec.codecs[depth],
                self._padded_numels[index],  # rotated already
                values=OWN_BEFORE,
                wire=WIRE,
                stream=segment.gradient,
            )
            start = self._partial_offsets[index]
            return from_partial_sum, Offsets(values=start, wire=slot, vector=vector)
        sources, own_place = self._sources(depth)
        recode = Recode(
            spec.codecs[depth - 1],
            spec.codecs[depth],
            segment.numel,
            wire_in=ARRIVED,
            wire=WIRE,
            stream=segment.gradient,
            sources=sources,
            stride=self._row_bytes,
            own_row=own_place,
            own=OWN_BEFORE,
            block=spec.block,
        )
        return recode, self._arrived(index)._replace(wire=slot, vector=vector)

    def _own_contribution(self, index: int, offset: int, depth: int) -> Task:
        """Plan this rank's own contribution: its rotated values, or its sum of the previous hop."""
        segment = self._segments[index]
        spec = self._specs[segment.gradient]
        if depth:
            partial_sum, offsets = self._partial_sum(index, depth, offset)
            return partial_sum._replace(fuse_with=spec.codecs[depth]), offsets
        rotate = Rotate(
            spec.codecs[0],
            segment.numel,
            values=TENSORS + segment.tensor,
            rotated=OWN,
            stream=segment.gradient,
            block=spec.block,
            flips=bool(spec.flips),
        )
        return rotate, Offsets(values=segment.start, rotated=offset)

    def _partial_sum(self, index: int, depth: int, offset: int) -> tuple[Sum, Offsets]:
        """Plan the sum of the messages of the hop before ``depth``, still rotated and unscaled."""
        segment = self._segments[index]
        sources, own_place = self._sources(depth)
        operation = Sum(
            self._specs[segment.gradient].codecs[depth - 1],
            self._padded_numels[index],
            wire_in=ARRIVED,
            values=OWN,
            stream=segment.gradient,
            sources=sources,
            stride=self._row_bytes,
            own_row=own_place,
            own=OWN_BEFORE,
        )
        return operation, self._arrived(index)._replace(values=offset)

    def _final_sum(self, index: int) -> Task:
        """Plan the sum of the messages of the last hop, rotated back and scaled."""
        segment = self._segments[index]
        spec = self._specs[segment.gradient]
        sources, own_place = self._sources(len(self._hops))
        operation = Sum(
            spec.codecs[len(self._hops) - 1],
            segment.numel,
            wire_in=ARRIVED,
            values=SUMS,
            stream=segment.gradient,
            sources=sources,
            stride=self._row_bytes,
            own_row=own_place,
            own=OWN_BEFORE,
            block=spec.block,
            flips=spec.flips,
            scale=self._scale,
        )
        return operation, self._arrived(index)._replace(values=segment.total)

    def _arrived(self, index: int) -> Offsets:
        """Return the offsets of a segment in the incoming messages and own contributions."""
        return Offsets(wire_in=self._slots[index], own=self._own_offsets.get(index, 0))

    def _sources(self, depth: int) -> tuple[int, int | None]:
        """Return the number of incoming rows of the hop before ``depth``, and the rank index whose
        contribution is this rank's own instead of a row; None if all contributions are rows.
        """
        hop = self._hops[depth - 1]
        if hop.full_precision_own:
            return hop.communicator.size - 1, hop.communicator.rank
        return hop.communicator.size, None
