"""Tensors for the tests of collectives: on and off the quantization grid, rebuilt on any rank.

On the grid every scale is a power of two and every group holds the ends of its range, so that
encode and decode are exact in every rounding mode and whole collectives compare with ``==``.
What a rank returns must cross a pipe, so results travel as NumPy arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ds_quant.codec.bound import Coding
from ds_quant.codec.codec import CastCodec, Codec, GroupCodec
from ds_quant.comm.reduce import GradientSums
from ds_quant.comm.reduction_plan import Form, LinkHop, Segment, shards_of
from ds_quant.comm.topology import Topology
from ds_quant.comm.traffic import Traffic
from ds_quant.comm.transport import Link, Pending
from ds_quant.kernels.random_bits import Role, address
from ds_quant.kernels.wire import shard_range

Runs = Iterable[tuple[int, int]]  # [start, stop) of the rows that a codec sees one by one


@dataclass(frozen=True)
class Item:
    """One tensor of a message; ``seed`` also names its random bits."""

    numel: int
    codec: Codec
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def on_grid(self, runs: Runs, *, rank: int = 0) -> torch.Tensor:
        """(numel,) values of ``rank`` that the codec keeps when it encodes each run as a row."""
        values = np.zeros(self.numel)
        draw = np.random.default_rng((self.seed, rank))
        step = self.codec.group_size if isinstance(self.codec, GroupCodec) else 1 << 20
        for start, stop in runs:
            middle = start + (stop - start) // step * step
            for first, last in ((start, middle), (middle, stop)):  # full groups, the short one
                if first < last:
                    size = min(step, last - first)
                    groups = _grid_groups((last - first) // size, size, self.codec, draw)
                    values[first:last] = groups.reshape(-1)
        return torch.from_numpy(values).to(self.dtype)

    def on_both_grids(self, runs: Runs, *, rank: int, world: int) -> torch.Tensor:
        """(numel,) fp32 values of ``rank`` whose sum over ``world`` ranks also survives a second
        encode of the runs in 8 bits.

        The ranks take turns to fill a group, the others hold zeros there. Below 8 bits the values
        are the ends of the range (and 0), multiples of both codecs' largest codes.
        """
        values = np.zeros(self.numel)
        turn = 0
        for start, stop in runs:
            draw = np.random.default_rng((self.seed, start))
            for first in range(start, stop, self.codec.group_size):
                size = min(self.codec.group_size, stop - first)
                group = _grid_groups(1, size, self.codec, draw)[0]
                if self.codec.bits < 8:
                    group = _ends(group, self.codec)
                if turn % world == rank:
                    values[first : first + size] = group
                turn += 1
        return torch.from_numpy(values).float()

    def off_grid(self, *, rank: int = 0, spread: float = 0.0) -> torch.Tensor:
        """(numel,) normal values; ``spread`` is the standard deviation of their log10 scale."""
        draw = np.random.default_rng((self.seed, rank))
        values = draw.normal(size=self.numel) * 10.0 ** (spread * draw.normal(size=self.numel))
        return torch.from_numpy(values).to(self.dtype)

    def coding(self, rank: int) -> Coding:
        """With the address that this item has on ``rank``."""
        if isinstance(self.codec, CastCodec) or self.codec.rounding == "nearest":
            return Coding(codec=self.codec)
        stream = 0 if self.codec.rounding == "random_shift" else rank + 1
        return Coding(
            codec=self.codec,
            address=address(seed=7, role=Role.GRADIENTS, step=3, parameter=self.seed, rank=stream),
        )


Message = tuple[Item, ...]


def _grid_groups(count: int, numel: int, codec: Codec, draw: np.random.Generator) -> np.ndarray:
    """(count, numel) multiples of a power of two, each row with the ends of its range."""
    step = 2.0 ** draw.integers(-3, 4, (count, 1))
    if isinstance(codec, CastCodec):
        return step * draw.integers(-128, 128, (count, numel))
    ends = draw.permuted(np.tile(np.arange(numel), (count, 1)), axis=1)
    rows = np.arange(count)
    if codec.range == "absmax":
        top = 2 ** (codec.bits - 1) - 1
        codes = draw.integers(-top, top + 1, (count, numel))
        codes[rows, ends[:, 0]] = top * draw.choice([-1, 1], count)
        return step * codes
    top = 2**codec.bits - 1
    codes = draw.integers(0, top + 1, (count, numel))
    if numel > 1:
        codes[rows, ends[:, 0]], codes[rows, ends[:, 1]] = 0, top
    return step * (codes - draw.integers(0, top + 1, (count, 1)))


def _ends(group: np.ndarray, codec: GroupCodec) -> np.ndarray:
    """Every value moved to the nearest end of the range or 0 (absmax), and the range stretched by
    the largest 8-bit code, so that int8 scales are whole too.
    """
    if codec.range == "absmax":
        top = np.abs(group).max()
        return 127 * top * np.round(group / top)
    low, high = group.min(), group.max()
    return 255 * np.where(group - low < (high - low) / 2, low, high)


def shards(numel: int, world: int) -> list[tuple[int, int]]:
    """The runs of ``all_gather`` and ``reduce_scatter``."""
    return [shard_range(numel, world, rank) for rank in range(world)]


def make_link(node_size: int | None = None, process_group: object = None) -> tuple[Link, Traffic]:
    """A link over the default process group and what it counts."""
    traffic, world = Traffic(), torch.distributed.get_world_size()
    topology = Topology(world=world, node_size=node_size or world)
    return Link(process_group, topology=topology, traffic=traffic), traffic


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor, (numel, itemsize) uint8."""
    return tensor.detach().reshape(-1, 1).contiguous().view(torch.uint8).numpy().copy()


def correlation_limit(numel: int) -> float:
    """Five standard deviations of the sample correlation of ``numel`` independent pairs."""
    return 5 / math.sqrt(numel)


def reduce_scatter(
    tensors: Sequence[torch.Tensor], codings: Sequence[Coding], link: Any, *, scale: float
) -> Pending[list[torch.Tensor]]:
    """Post the reduction of tensors over one hop, as under ZeRO-3: each rank gets its shards."""
    hops, rotations = [(coding,) for coding in codings], [None] * len(codings)
    forms = [Form((coding.codec,)) for coding in codings]
    numels = [tensor.numel() for tensor in tensors]
    how = {"plain": True, "small": False}
    shares = [s for i, n in enumerate(numels) for s in shards_of(i, n, link.size, **how)]
    sums = GradientSums(shares, forms, (LinkHop(link=link),), link, scale=scale)
    total = sums.room(tensors[0].device)
    flat = [tensor.reshape(-1) for tensor in tensors]
    under_way = sums.begin(flat, hops, rotations, into=total)
    own = [found for found in own_sums(shares, sums, total) if found is not None]
    return Pending(under_way.wait).then(lambda _: own)


def received_bytes(traffic: Traffic) -> int:
    """Over all links, in all roles."""
    return sum(sum(links.values()) for links in traffic.received.values())


def own_sums(
    shares: Sequence[Segment], sums: GradientSums, total: torch.Tensor
) -> list[torch.Tensor | None]:
    """Views of this rank's sums, by share; None where another rank's."""
    starts = [sums.own.get(place) for place in range(len(shares))]
    pairs = zip(starts, shares, strict=True)
    return [None if start is None else total[start : start + s.numel] for start, s in pairs]
