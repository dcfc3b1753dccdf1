"""Plan a reduction once, from sizes alone; every step then runs it: [Note: two hops] of reduce.py.

While one slice crosses between the nodes, the next is inside them. With n slices that takes
longer + shorter / n + n * overhead: the two hops' seconds, and what a slice costs beyond its bytes.
It takes least with n = sqrt(shorter / overhead). To the host a slice is two messages and five calls
of kernels, of however many tensors and ranks: 0.13 ms for a layer of Llama-7B on 4 x 8 ranks.
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
from ds_quant.comm.message import is_tight, lay_out, row_vector
from ds_quant.comm.transport import Communicator
from ds_quant.kernels.batch import Encode, Recode, Rotate, Sum, Task
from ds_quant.kernels.dispatch import Operations
from ds_quant.kernels.wire import VECTOR_NUMEL, ceil_div, round_up, shard_range

# ---- slices ----


MOST = 16  # slices, unless more are asked for


def presumed_pace(device: torch.device, backend: str) -> float:
    """The pace of slices between links that nobody has measured: 8 bits inside a node at 300 GB/s
    where NCCL carries them, else at 20 GB/s. Beyond its bytes and the links' latency a slice costs
    the host 0.1 ms, and 0.5 ms where its few calls launch CUDA kernels on several streams: orders
    of magnitude, not fitted to any link.
    """
    nvlink = device.type == "cuda" and "nccl" in backend
    return 1 / (3e11 if nvlink else 2e10) / (1e-4 if device.type == "cpu" else 5e-4)


@dataclass(frozen=True, kw_only=True)
class Slicing:
    """Number of slices: fixed (``count``), or sqrt(elements x ``pace``), with ``pace`` the shorter
    hop's seconds per element over a slice's overhead in seconds.
    """

    count: int | None = None
    pace: float = presumed_pace(torch.device("cpu"), "gloo")

    def slices(self, numel: int) -> int:
        """Number of slices for ``numel`` elements of this rank's input."""
        if self.count is not None:
            return self.count
        return max(1, min(MOST, round(math.sqrt(numel * self.pace))))


# ---- plans ----


# Buffers of the operations: the message that is made, fp32 values that this rank adds as they are,
# the message and those values of the hop before, the sums; then the tensors.
WIRE, OWN, ARRIVED, OWN_BEFORE, SUMS, TENSORS = range(6)


@dataclass(frozen=True, kw_only=True)
class ReductionHop:
    """One exchange of a reduction over a larger group of ranks.

    divisor: rank r of the larger group has the place r // divisor % link.size in ``link``.
    full_precision_own: whether a rank adds its own contribution as it is.
    slicing: of a reduction whose last of two hops this is.
    """

    communicator: Communicator
    divisor: int = 1
    full_precision_own: bool = False
    slicing: Slicing = Slicing()

    def place(self, rank: int) -> int:
        """Index within ``link`` of the rank that takes data bound for ``rank``."""
        return rank // self.divisor % self.communicator.size


class GradientSpec(NamedTuple):
    """How a gradient is sent: its codec on every hop, the block of its rotation, 0 for none,
    whether signs flip before it (OWN_SIGNS: every sender of the last hop has its own), and the
    codec of sums on their way to an owner.
    """

    codecs: tuple[Codec, ...]
    block: int = 0
    flips: int = 0
    delivery: Codec | None = None  # None under ZeRO-3, where reducers are owners

    @property
    def unit(self) -> int:
        """Granularity in elements at which a segment can be cut without changing a group."""
        sizes = [c.group_size for c in self.codecs if isinstance(c, GroupCodec)]
        return math.lcm(VECTOR_NUMEL, *sizes, self.block or 1)


class Segment(NamedTuple):
    """Consecutive elements of one gradient, to be summed by rank ``reducer``.

    slot: elements that its slot has room for on one hop, if that are more: rows of shards are as
    long for a short or empty last one.
    """

    tensor: int
    start: int  # in the tensor
    numel: int
    gradient: int  # its form and streams
    first: int  # in the gradient: names the random bits
    reducer: int
    total: int = 0  # where its sum begins, on the reducer
    vector: int | None = None  # of its random bits; None: as ``BoundCodec.at`` has ``first``
    slot: int = 0

    def part(self, start: int, stop: int) -> Segment:
        """Return elements [start, stop) of the segment."""
        return self._replace(
            start=self.start + start,
            numel=stop - start,
            first=self.first + start,
            total=self.total + start,
        )


def shards_of(tensor: int, numel: int, ranks: int, *, plain: bool, small: bool) -> list[Segment]:
    """The shards of a tensor as segments, each summed by its rank; its gradient is ``tensor``, too.

    plain: over one hop without rotations and exact own contributions; then slots have room for a
    full shard, and so they have of small tensors.
    """
    width, shards = ceil_div(numel, ranks), []
    for rank in range(ranks):
        start, stop = shard_range(numel, ranks, rank)
        shard = Segment(tensor, start, stop - start, tensor, start, rank)
        if plain:
            shard = shard._replace(vector=row_vector(rank, stop - start, width))
        shards.append(shard._replace(slot=width) if plain or small else shard)
    return shards


class Step(NamedTuple):
    """One hop of one slice. ``encode`` also makes the ``kept`` fp32 values that are added as they
    are: on CUDA in the same launch.
    """

    sent: list[int]
    received: list[int]
    encode: Operations
    own: int


class SlicePlan(NamedTuple):
    """The hops of one slice, and the sums at the end.

    Of a reduction that rests between its two hops, see [Note: partial sums] of reduce.py:
    ``partial`` adds up what the first hop has brought, rotated, for [start, stop) of what waits.
    """

    steps: list[Step]
    total: Operations
    partial: Operations
    start: int
    stop: int


class ReductionPlan:
    """The operations and messages of a reduction of segments, the same in all steps.

    forms: of every gradient. ``scale`` multiplies the sums.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        specs: Sequence[GradientSpec],
        hops: Sequence[ReductionHop],
        *,
        scale: float,
    ) -> None:
        self.hops, self._specs, self._scale = hops, specs, scale
        self._parts = _slices(segments, specs, hops)

    @cached_property
    def slices(self) -> list[SlicePlan]:
        """Both hops at once."""
        return self._compile(deferred=False)

    @cached_property
    def deferred_slices(self) -> list[SlicePlan]:
        """The same slices of a reduction over two hops, with a rest between them."""
        return self._compile(deferred=True)

    def _compile(self, deferred: bool) -> list[SlicePlan]:
        found, end = [], 0
        for part in self._parts:
            compiler = _Compiler(part, self._specs, self._scale)
            found.append(compiler.compile(self.hops, deferred, end))
            end = found[-1].stop
        return found

    @property
    def partial_numel(self) -> int:
        """Elements that this rank holds between the hops, fp32."""
        return self.deferred_slices[-1].stop if self.deferred_slices else 0


def _slices(
    segments: Sequence[Segment], specs: Sequence[GradientSpec], hops: Sequence[ReductionHop]
) -> list[list[Segment]]:
    """Distribute the segments over slices by their sizes alone, so that all ranks cut alike.
    Small ones are whole in the first: see [Note: small tensors] of message.py.
    """
    total = sum(segment.numel for segment in segments)
    count = hops[-1].slicing.slices(total) if len(hops) > 1 else 1
    slices: list[list[Segment]] = [[] for _ in range(count)]
    units, small = [spec.unit for spec in specs], [is_tight(spec.codecs[-1]) for spec in specs]
    for segment in segments:
        if small[segment.gradient]:
            slices[0].append(segment)
            continue
        numel, unit = segment.numel, units[segment.gradient]
        borders = [numel * i // count // unit * unit for i in range(count)] + [numel]
        for part, (start, stop) in zip(slices, pairwise(borders), strict=True):
            if start < stop or segment.slot:
                part.append(segment.part(start, stop))
    return [part for part in slices if part]


class _Compiler:
    """Plans the hops of one slice."""

    def __init__(
        self, segments: list[Segment], specs: Sequence[GradientSpec], scale: float
    ) -> None:
        self._segments, self._specs, self._scale = segments, specs, scale
        self._on_wire = [round_up(s.numel, specs[s.gradient].block or 1) for s in segments]
        # Of the hop before: where segments lie in a row, its bytes, and their kept values.
        self._columns: dict[int, int] = {}
        self._row_bytes = 0
        self._own_offsets: dict[int, int] = {}
        # Where the partial sums of the first hop rest.
        self._partial_offsets: dict[int, int] | None = None

    def compile(self, hops: Sequence[ReductionHop], deferred: bool, start: int) -> SlicePlan:
        """``waits``: between the hops; ``start``: where this slice begins in what waits."""
        here = list(range(len(self._segments)))  # still to be added up by this rank
        steps, partial, end = [], [], 0
        for depth, hop in enumerate(hops):
            # By the rank that they go to.
            rows: list[list[int]] = [[] for _ in range(hop.communicator.size)]
            for index in here:
                rows[hop.place(self._segments[index].reducer)].append(index)
            steps.append(self._step(rows, depth, hops))
            here = rows[hop.communicator.rank]
            if deferred and depth == 0:
                partial_offsets, end = self._end_to_end(here)
                partial = [
                    self._sum(i, hops, 1, OWN, place) for i, place in partial_offsets.items()
                ]
                self._partial_offsets = partial_offsets
        total = [self._sum(i, hops, len(hops), SUMS) for i in here if self._segments[i].numel]
        return SlicePlan(steps, Operations(total), Operations(partial), start, start + end)

    def _end_to_end(self, indices: Iterable[int]) -> tuple[dict[int, int], int]:
        """Places of fp32 values of segments, and their end."""
        places, end = dict[int, int](), 0
        for index in indices:
            places[index], end = end, end + round_up(self._on_wire[index], VECTOR_NUMEL)
        return places, end

    def _step(self, rows: list[list[int]], depth: int, hops: Sequence[ReductionHop]) -> Step:
        hop, mine = hops[depth], hops[depth].communicator.rank
        leaving = [
            [] if hop.full_precision_own and place == mine else row
            for place, row in enumerate(rows)
        ]
        layouts = [lay_out(self._size(index, depth) for index in row) for row in leaving]
        sent = [nbytes for _, nbytes in layouts]
        begins = accumulate(sent, initial=0)
        encode = [
            self._encode(index, begin + slot, depth, hops)
            for row, (slots, _), begin in zip(leaving, layouts, begins, strict=False)
            for index, slot in zip(row, slots, strict=True)
            if self._segments[index].numel
        ]
        encode.sort(key=lambda task: task[0].stream)  # those of one gradient form rows
        own, end = dict[int, int](), 0
        if hop.full_precision_own and depth and self._partial_offsets is not None:
            # Added where it rests.
            own = {index: self._partial_offsets[index] for index in rows[mine]}
        elif hop.full_precision_own:
            own, end = self._end_to_end(rows[mine])
            encode += [self._own(index, place, depth, hops) for index, place in own.items()]
        slots, self._row_bytes = lay_out(self._size(index, depth) for index in rows[mine])
        self._columns, self._own_offsets = dict(zip(rows[mine], slots, strict=True)), own
        received = [self._row_bytes] * hop.communicator.size
        if hop.full_precision_own:
            received[mine] = 0
        return Step(sent, received, Operations(encode), end)

    def _size(self, index: int, depth: int) -> tuple[Codec, int]:
        """Codec and elements of a segment's slot."""
        segment = self._segments[index]
        codec = self._specs[segment.gradient].codecs[depth]
        return codec, max(self._on_wire[index], segment.slot)

    def _encode(self, index: int, start: int, depth: int, hops: Sequence[ReductionHop]) -> Task:
        segment = self._segments[index]
        codecs, block, flips, _ = self._specs[segment.gradient]
        vector = segment.vector
        if vector is None:
            vector = VECTORS_PER_ELEMENT * segment.first
        if depth == 0:
            tensor, numel = TENSORS + segment.tensor, segment.numel
            how = segment.gradient, block, bool(flips)
            operation = Encode(codecs[0], numel, tensor, WIRE, *how)
            return operation, (segment.start, start, vector)
        if self._partial_offsets is not None:  # rotated already
            numel = self._on_wire[index]
            operation = Encode(codecs[depth], numel, OWN_BEFORE, WIRE, segment.gradient)
            return operation, (self._partial_offsets[index], start, vector)
        how = {"wire": WIRE, "stream": segment.gradient, "block": block}
        how |= self._sources(hops[depth - 1])
        operation = Recode(*codecs[depth - 1 : depth + 1], segment.numel, **how)
        return operation, (self._columns[index], start, self._own_offsets.get(index, 0), vector)

    def _own(self, index: int, place: int, depth: int, hops: Sequence[ReductionHop]) -> Task:
        """Plan this rank's exact contribution: rotated values, or the sum of what has arrived so
        far.
        """
        segment = self._segments[index]
        codecs, block, flips, _ = self._specs[segment.gradient]
        if depth:
            operation, places = self._sum(index, hops, depth, OWN, place)
            return operation._replace(fuse_with=codecs[depth]), places
        how = segment.numel, TENSORS + segment.tensor, OWN, segment.gradient, block, bool(flips)
        return Rotate(codecs[0], *how), (segment.start, place)

    def _sum(
        self, index: int, hops: Sequence[ReductionHop], depth: int, into: int, place: int = 0
    ) -> Task:
        """Plan the sum of what arrived on the hop before ``depth``; the last one is rotated back
        and scaled.
        """
        segment = self._segments[index]
        codecs, block, flips, _ = self._specs[segment.gradient]
        how = {"numel": self._on_wire[index]}
        if into == SUMS:
            place = segment.total
            how = {"numel": segment.numel, "block": block, "flips": flips, "scale": self._scale}
        how |= {"values": into, "stream": segment.gradient, **self._sources(hops[depth - 1])}
        places = self._columns[index], place, self._own_offsets.get(index, 0)
        return Sum(codecs[depth - 1], **how), places

    def _sources(self, hop: ReductionHop) -> dict[str, int | None]:
        """Sources of an operation that adds up what arrived on a hop."""
        return {
            "wire_in": ARRIVED,
            "sources": hop.communicator.size - hop.full_precision_own,
            "stride": self._row_bytes,
            "place": hop.communicator.rank if hop.full_precision_own else None,
            "own": OWN_BEFORE,
        }
