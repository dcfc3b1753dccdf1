"""Collectives for flat buffers whose pieces belong to single ranks, as under ZeRO-1 and 2.

Which rank sums what is decided in owner_plan.py.

May import: torch, codec, coding, collectives, hops, kernels, link, owner_plan, rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ds_quant import hops
from ds_quant.codec import Codec
from ds_quant.coding import Coding
from ds_quant.collectives import between, cut, lay_out
from ds_quant.kernels.dispatch import together
from ds_quant.link import Fabric, Link, by_node
from ds_quant.owner_plan import Piece, delivery_codec
from ds_quant.rotation import Rotation


class Part(NamedTuple):
    """Consecutive elements of one parameter that belong to rank ``owner``, to be gathered.

    values: contiguous, (numel,) or (1, numel), on all ranks. target: likewise, any floating-point
        dtype, what the owner wants them to be; None for what they are. ``coding.address`` is the
        owner's.
    """

    owner: int
    values: Tensor
    coding: Coding
    target: Tensor | None = None


class Share(NamedTuple):
    """Consecutive elements of one parameter whose sum belongs to rank ``owner``.

    ``values`` is 1-D contiguous; ``codings`` has one entry per hop, their addresses this rank's
    own and unique to the share.
    """

    owner: int
    values: Tensor
    codings: tuple[Coding, ...]
    rotation: Rotation | None = None


def reduce_to_owners(
    shares: Sequence[Share],
    pieces: Sequence[Piece],
    route: Sequence[hops.Hop],
    link: Link,
    *,
    scale: float,
) -> list[Tensor | None]:
    """Sum each share over the ranks, times ``scale``, for its owner.

    1. reduce each of ``pieces``, as from ``owner_plan``, on its reducer, over the hops of ``route``
    2. balanced only: encode the sums for the owners, all-to-all over ``link``, the whole group.

    Returns:
        Per share its fp32 sum (numel,) on the owner and None elsewhere.
    """
    if not shares:
        return []
    empties = partial(link.empties, dtype=torch.float32, device=shares[0].values.device)
    totals = empties([s.values.numel() if s.owner == link.rank else None for s in shares])
    wanted = empties([  # what is delivered to others
        p.stop - p.start if p.reducer == link.rank != shares[p.part].owner else None for p in pieces
    ])  # fmt: skip
    for place, p in enumerate(pieces):
        if (total := totals[p.part]) is not None:
            wanted[place] = between(total, p.start, p.stop)
    moved = [_piece(shares[p.part], p) for p in pieces]
    hops.Reduction(moved, route, scale=scale, sums=wanted).wait()
    if any(p.reducer != shares[p.part].owner for p in pieces):
        _deliver(shares, pieces, dict(zip(pieces, wanted, strict=True)), link)
    return totals


def _piece(share: Share, piece: Piece) -> hops.Piece:
    return hops.Piece(
        reducer=piece.reducer,
        values=between(share.values, piece.start, piece.stop),
        codings=share.codings
        if piece.start == 0
        else tuple(c.at(piece.start) for c in share.codings),
        rotation=share.rotation,
    )


def gather_from_owners(parts: Sequence[Part], fabric: Fabric) -> Callable[[], None]:
    """Bring every part, on all ranks and the owner too, to its owner's decoded values.

    1. encode this rank's parts into one row  2. all-gather the rows, asynchronously  3. the
    returned function waits and decodes. Until then ``values`` keep what they hold; only the
    owner's content is read, except that a difference is added to what every rank holds.
    """
    link = fabric.whole
    by_owner: list[list[Part]] = [[] for _ in range(link.size)]
    for part in parts:
        by_owner[part.owner].append(part)
    layouts = [lay_out([(p.coding.codec, p.values.numel()) for p in own]) for own in by_owner]
    nbytes = max(row_bytes for _, row_bytes in layouts)
    if nbytes == 0:
        return lambda: None
    row = link.empty(nbytes, device=parts[0].values.device)
    with link.encoding("weights") as notes, together():
        for part, wire in zip(by_owner[link.rank], cut(row, [layouts[link.rank]]), strict=True):
            wanted = part.values if part.target is None else part.target.to(row.device)
            part.coding.encode(wanted, wire, held=part.values)
            notes.note(part.coding, wanted, wire, held=part.values)
    arriving = fabric.all_gather(row, role="weights")

    def decode() -> None:
        with link.decoding(), together():
            rows = (row for node in by_node(arriving.wait(), link.size) for row in node)
            for row, own, layout in zip(rows, by_owner, layouts, strict=True):
                for part, wire in zip(own, cut(row, [layout]), strict=True):
                    part.coding.decode(wire, part.values)

    return decode


def _deliver(
    shares: Sequence[Share], pieces: Sequence[Piece], sums: dict[Piece, Tensor], link: Link
) -> None:
    """Second hop: move sums from reducers to owners, whose places in ``sums`` are filled."""
    outgoing: list[list[Piece]] = [[] for _ in range(link.size)]  # by owner
    incoming: list[list[Piece]] = [[] for _ in range(link.size)]  # by reducer
    for piece in pieces:
        owner = shares[piece.part].owner
        if piece.reducer == link.rank != owner:
            outgoing[owner].append(piece)
        elif owner == link.rank != piece.reducer:
            incoming[piece.reducer].append(piece)
    sent = [lay_out(_delivered(shares, row)) for row in outgoing]
    received = [lay_out(_delivered(shares, row)) for row in incoming]
    payload = link.empty(sum(n for _, n in sent), device=shares[0].values.device)
    with link.encoding("gradients") as notes, together():
        for piece, out in zip(chain.from_iterable(outgoing), cut(payload, sent), strict=True):
            coding = _delivery(shares[piece.part].codings[-1], piece)
            coding.encode(sums[piece], out)
            notes.note(coding, sums[piece], out)
    exchange = link.all_to_all(
        payload, sent=[n for _, n in sent], received=[n for _, n in received], role="gradients"
    )
    wires = cut(exchange.wait(), received)
    with link.decoding(), together():
        for piece, wire in zip(chain.from_iterable(incoming), wires, strict=True):
            _delivery(shares[piece.part].codings[-1], piece).decode(wire, sums[piece])


def _delivered(shares: Sequence[Share], row: Sequence[Piece]) -> list[tuple[Codec, int]]:
    return [(delivery_codec(shares[p.part].codings[-1].codec), p.stop - p.start) for p in row]


def _delivery(coding: Coding, piece: Piece) -> Coding:
    """Coding of a delivered piece: streams from the upper half of the vector counter."""
    moved = coding.at(piece.start)
    address = moved.address and moved.address._replace(
        first_vector=moved.address.first_vector + (1 << 62)
    )
    return moved._replace(codec=delivery_codec(coding.codec), address=address)
