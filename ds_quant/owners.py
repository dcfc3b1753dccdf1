"""Collectives for flat buffers whose pieces belong to single ranks, as under ZeRO-1 and 2.

[Note: direct or balanced] A bucket of ZeRO-1/2 usually belongs to one or two owners. Sending every
owner its part at once (*direct*) then makes one rank receive the whole bucket from everybody,
which can cost more than the 16-bit all-reduce it replaces. *Balanced* cuts the bucket evenly over
the ranks, reduces each cut on its rank and delivers the sums to the owners in 8 bits. Which one is
used is decided per bucket by the bytes that the slowest rank receives: sizes only, so that all
ranks decide alike.

May import: torch, codec, collectives, layout, rng.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ds_quant.codec import Codec, GroupCodec
from ds_quant.collectives import Coding, lay_out
from ds_quant.layout import ceil_div
from ds_quant.link import Link


@dataclass(frozen=True, kw_only=True)
class Part:
    """Consecutive elements of one parameter that belong to rank ``owner``.

    ``values`` is 1-D contiguous. ``coding.address`` is this rank's own, unique to the part.
    """

    owner: int
    values: Tensor
    coding: Coding


class Shape(NamedTuple):
    """What all ranks know of a part."""

    owner: int
    numel: int
    codec: Codec


class Piece(NamedTuple):
    """Elements [start, stop) of part ``part``, summed by rank ``reducer``."""

    part: int
    start: int
    stop: int
    reducer: int


def reduce_to_owners(parts: Sequence[Part], link: Link, *, scale: float) -> list[Tensor | None]:
    """Sum each part over the ranks, times ``scale``, for its owner.

    1. choose direct or balanced  2. encode each piece for its reducer, all-to-all, decode and add
    in fp32 in source-rank order  3. balanced only: encode the sums for the owners, all-to-all.

    Returns:
        Per part its fp32 sum (numel,) on the owner and None elsewhere.
    """
    shapes = tuple(Shape(p.owner, p.values.numel(), p.coding.codec) for p in parts)
    pieces = plan(shapes, link.size)
    sums = _reduce_pieces(parts, pieces, link, scale)
    if any(piece.reducer != shapes[piece.part].owner for piece in pieces):
        _deliver(parts, pieces, sums, link)
    owned: list[Tensor | None] = []
    for index, part in enumerate(parts):
        mine = [sums[p] for p in pieces if p.part == index] if part.owner == link.rank else None
        owned.append(None if mine is None else _joined(mine, part.values))
    return owned


def _joined(sums: list[Tensor], values: Tensor) -> Tensor:
    if len(sums) == 1:
        return sums[0]
    return torch.cat(sums) if sums else values.new_empty(0, dtype=torch.float32)


def gather_from_owners(parts: Sequence[Part], link: Link) -> Callable[[], None]:
    """Overwrite every part, on all ranks and the owner too, by its owner's decoded values.

    1. encode this rank's parts into one row  2. all-gather the rows, asynchronously  3. the
    returned function waits and decodes. Until then ``values`` keep what they hold; they must exist
    on all ranks, only the owner's content is read.
    """
    by_owner = [[p for p in parts if p.owner == rank] for rank in range(link.size)]
    layouts = [lay_out([(p.coding.codec, p.values.numel()) for p in own]) for own in by_owner]
    nbytes = max(row_bytes for _, row_bytes in layouts)
    if nbytes == 0:
        return lambda: None
    row = torch.empty(nbytes, dtype=torch.uint8, device=parts[0].values.device)
    for part, (start, size) in zip(by_owner[link.rank], layouts[link.rank][0], strict=True):
        _encode(part.values, part.coding, row[start : start + size])
    exchange = link.all_gather(row, role="weights")

    def decode() -> None:
        rows = exchange.wait().view(link.size, -1)
        for rank, own in enumerate(by_owner):
            for part, (start, size) in zip(own, layouts[rank][0], strict=True):
                wire = rows[rank : rank + 1, start : start + size]
                part.coding.codec.decode(wire, part.values.view(1, -1), levels=part.coding.levels)

    return decode


@lru_cache(maxsize=4096)
def plan(shapes: tuple[Shape, ...], ranks: int) -> tuple[Piece, ...]:
    """The pieces of the cheaper exchange: see [Note: direct or balanced]."""
    direct = tuple(Piece(i, 0, s.numel, s.owner) for i, s in enumerate(shapes) if s.numel)
    balanced = _cut_evenly(shapes, ranks)
    cheaper = inbound_bytes(shapes, direct, ranks) <= inbound_bytes(shapes, balanced, ranks)
    return direct if cheaper else balanced


def inbound_bytes(shapes: Sequence[Shape], pieces: Sequence[Piece], ranks: int) -> int:
    """Bytes that the rank which receives most gets from others, both hops together."""
    inbound = [0] * ranks
    for piece in pieces:
        shape = shapes[piece.part]
        numel = piece.stop - piece.start
        inbound[piece.reducer] += (ranks - 1) * shape.codec.wire_bytes(numel)
        if piece.reducer != shape.owner:
            inbound[shape.owner] += delivery_codec(shape.codec).wire_bytes(numel)
    return max(inbound, default=0)


def delivery_codec(codec: Codec) -> Codec:
    """Codec of the second hop: at least 8 bits, as its error is not averaged over the ranks."""
    return replace(codec, bits=8) if isinstance(codec, GroupCodec) else codec


def _cut_evenly(shapes: Sequence[Shape], ranks: int) -> tuple[Piece, ...]:
    """Cut the parts, laid end to end, into ``ranks`` runs of equal length."""
    width = ceil_div(sum(s.numel for s in shapes), ranks)
    pieces, position = [], 0
    for index, shape in enumerate(shapes):
        start = 0
        while start < shape.numel:
            reducer = (position + start) // width
            stop = min(shape.numel, (reducer + 1) * width - position)
            pieces.append(Piece(index, start, stop, reducer))
            start = stop
        position += shape.numel
    return tuple(pieces)


def _reduce_pieces(
    parts: Sequence[Part], pieces: Sequence[Piece], link: Link, scale: float
) -> dict[Piece, Tensor]:
    """First hop: fp32 sums of the pieces that this rank reduces."""
    rows = [[p for p in pieces if p.reducer == rank] for rank in range(link.size)]
    layouts = [lay_out([(parts[p.part].coding.codec, p.stop - p.start) for p in r]) for r in rows]
    sent = [nbytes for _, nbytes in layouts]
    payload = torch.empty(sum(sent), dtype=torch.uint8, device=parts[0].values.device)
    base = 0
    for row, (slots, nbytes) in zip(rows, layouts, strict=True):
        for piece, (start, size) in zip(row, slots, strict=True):
            part = parts[piece.part]
            target = payload[base + start : base + start + size]
            _encode(part.values[piece.start : piece.stop], part.coding.at(piece.start), target)
        base += nbytes
    mine = sent[link.rank]
    exchange = link.all_to_all(payload, sent=sent, received=[mine] * link.size, role="gradients")
    received = exchange.wait().view(link.size, mine)
    sums = {}
    for piece, (start, size) in zip(rows[link.rank], layouts[link.rank][0], strict=True):
        coding = parts[piece.part].coding
        sums[piece] = torch.empty(
            piece.stop - piece.start, dtype=torch.float32, device=payload.device
        )
        coding.codec.decode_sum(
            received[:, start : start + size], sums[piece], scale=scale, levels=coding.levels
        )
    return sums


def _deliver(
    parts: Sequence[Part], pieces: Sequence[Piece], sums: dict[Piece, Tensor], link: Link
) -> None:
    """Second hop: move sums from reducers to owners, adding the received ones to ``sums``."""
    outgoing = [_between(parts, pieces, link.rank, owner) for owner in range(link.size)]
    incoming = [_between(parts, pieces, reducer, link.rank) for reducer in range(link.size)]
    sent = [lay_out(_delivered(parts, row)) for row in outgoing]
    received = [lay_out(_delivered(parts, row)) for row in incoming]
    payload = torch.empty(sum(n for _, n in sent), dtype=torch.uint8, device=parts[0].values.device)
    base = 0
    for row, (slots, nbytes) in zip(outgoing, sent, strict=True):
        for piece, (start, size) in zip(row, slots, strict=True):
            coding = _delivery(parts[piece.part].coding, piece)
            _encode(sums[piece], coding, payload[base + start : base + start + size])
        base += nbytes
    exchange = link.all_to_all(
        payload, sent=[n for _, n in sent], received=[n for _, n in received], role="gradients"
    )
    wire, base = exchange.wait(), 0
    for row, (slots, nbytes) in zip(incoming, received, strict=True):
        for piece, (start, size) in zip(row, slots, strict=True):
            sums[piece] = torch.empty(
                piece.stop - piece.start, dtype=torch.float32, device=payload.device
            )
            codec = delivery_codec(parts[piece.part].coding.codec)
            codec.decode(
                wire[base + start : base + start + size].view(1, -1), sums[piece].view(1, -1)
            )
        base += nbytes


def _between(
    parts: Sequence[Part], pieces: Sequence[Piece], reducer: int, owner: int
) -> list[Piece]:
    """Pieces that ``reducer`` must deliver to another rank, ``owner``."""
    if reducer == owner:
        return []
    return [p for p in pieces if p.reducer == reducer and parts[p.part].owner == owner]


def _delivered(parts: Sequence[Part], row: Sequence[Piece]) -> list[tuple[Codec, int]]:
    return [(delivery_codec(parts[p.part].coding.codec), p.stop - p.start) for p in row]


def _delivery(coding: Coding, piece: Piece) -> Coding:
    """Coding of a piece on the second hop: streams from the upper half of the vector counter."""
    return replace(coding.at(piece.start + (1 << 62)), codec=delivery_codec(coding.codec))


def _encode(values: Tensor, coding: Coding, wire: Tensor) -> None:
    """values (numel,) -> wire (bytes,)."""
    coding.codec.encode(
        values.view(1, -1), wire.view(1, -1), address=coding.address, levels=coding.levels
    )
