"""Plan the reduction of gradients under FSDP2 and DDP, and the way back of their sums.

Sums go back to the ranks that hold the same weights: see comm/returned_sums.py. Under DDP these are
all ranks, with replicas under FSDP2 the ranks of equal place in all nodes.

[Note: pieces] Where all ranks hold the weights, every rank sums an equal piece of a parameter;
parameters too small for that have fewer pieces, which take turns: of at least ``PIECE_NUMEL``
elements, or ``EXACT_PIECE_NUMEL`` of those that the scheme leaves in full precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ds_quant.comm.reduce import GradientSums
from ds_quant.comm.reduction_plan import Segment
from ds_quant.comm.returned_sums import Piece, ReturnedSums
from ds_quant.comm.transport import Pending
from ds_quant.runtime.param import (
    GradientCodecs,
    Param,
    bind,
    full_precision_gradient,
    tight_if_small,
)
from ds_quant.runtime.run import Level

PIECE_NUMEL = 1 << 10
EXACT_PIECE_NUMEL = 1 << 7  # in fp32 as many bytes as PIECE_NUMEL in 4 bits


def reduced_codecs(
    level: Level, params: Sequence[Param], dtype: torch.dtype, *, full_precision: bool
) -> list[GradientCodecs]:
    """Return the codecs of gradients on their way to the ranks that sum them.

    full_precision: nothing is quantized in this step.
    """
    hops = len(level.hops)
    gradient_codecs: list[GradientCodecs] = []
    for param in params:
        codecs = full_precision_gradient(dtype, hops)
        if not full_precision:
            codecs = param.gradient_codecs(dtype, rank=level.hierarchy.rank, hops=hops)
        gradient_codecs.append(tight_if_small(param.shape.numel(), codecs, dtype))
    return gradient_codecs


@dataclass(frozen=True, eq=False, kw_only=True)
class ReturnedGradients:
    """The exchange that returns the sums, the same in every step. codecs: of every gradient."""

    codecs: Sequence[GradientCodecs]
    exchange: ReturnedSums

    def send(self, sums: Tensor, output: Tensor, step: int) -> Pending[None]:
        """Begin to fill ``output`` with the sums of all ranks.

        sums: those that this rank has made.
        step: address of the random bits.
        """
        bound_codecs, rotations = bind(self.codecs, step, step)
        return self.exchange.send(sums, output, [codec for (codec,) in bound_codecs], rotations)


def plan_return(
    level: Level,
    params: Sequence[Param],
    dtype: torch.dtype,
    segments: Sequence[Segment],
    sums: GradientSums,
    *,
    full_precision: bool,
    first: int = 0,
) -> ReturnedGradients:
    """Plan the way back of reduced segments, in their order.

    params, dtype: of the gradients. full_precision: as of ``reduced_codecs``.
    first: element of the reduced tensor at which the result begins.
    """
    assert level.returning is not None  # several ranks hold the same weights
    returned_codecs: list[GradientCodecs] = []
    for param in params:
        codecs = full_precision_gradient(dtype, 1)
        if not full_precision:
            codecs = param.returned_codecs(dtype, rank=level.hierarchy.rank)
        returned_codecs.append(tight_if_small(param.shape.numel(), codecs, dtype))
    pieces: list[Piece] = []
    for index, segment in enumerate(segments):
        sender = segment.reducer
        if level.routes.replicas:
            sender, place = divmod(segment.reducer, level.topology.node_size)
            if place != level.shard:
                continue  # of another shard
        piece = Piece(
            sender=sender,
            gradient=segment.gradient,
            numel=segment.numel,
            first=segment.first,
            source=sums.own.get(index, 0),
            target=segment.start - first,
        )
        pieces.append(piece)
    exchange = ReturnedSums(pieces, [codecs.spec for codecs in returned_codecs], level.returning)
    return ReturnedGradients(codecs=returned_codecs, exchange=exchange)


class Placement(NamedTuple):
    """The ranks that sum a parameter: see [Note: pieces].

    num_pieces: into which it is cut. first: rank that sums the first one. ranks: of all.
    """

    num_pieces: int
    first: int
    ranks: int

    def pieces(self, numel: int, unit: int) -> Iterator[tuple[int, int, int]]:
        """Yield (start, stop, rank that sums it) of every piece that is not empty.

        unit: elements of a group or rotation block; pieces begin at multiples of it.
        """
        borders = [
            numel * piece // self.num_pieces // unit * unit for piece in range(self.num_pieces)
        ]
        for piece, (start, stop) in enumerate(pairwise([*borders, numel])):
            if start < stop:
                yield start, stop, (self.first + piece) % self.ranks


def placements(params: Sequence[Param], ranks: int) -> dict[Param, Placement]:
    """Return the placement of every parameter."""
    placed: dict[Param, Placement] = {}
    pieces = 0  # of the parameters so far
    for param in params:
        least = EXACT_PIECE_NUMEL
        if param.is_quantized(param.tensor.dtype):
            least = PIECE_NUMEL
        num_pieces = max(1, min(ranks, param.shape.numel() // least))
        placed[param] = Placement(num_pieces, pieces % ranks, ranks)
        pieces += num_pieces
    return placed
