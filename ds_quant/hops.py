"""Reduction of pieces over one or two hops, each with a codec of its own.

[Note: two hops] Ranks are numbered node by node, r = node * node_size + local. The first hop sums
over the ranks of a node: rank (n, g) collects from its node what is bound for any (n', g). The
second hop sums those partial sums over the nodes: each byte enters a node once. Between the two a
piece is decoded, added in fp32 and encoded anew (`recode`); a rotation spans both hops.
Own contributions are exact where a hop says so: nobody else sees them, so they need no bits and no
place in a message, and with two nodes that halves the variance of the inter-node hop.

[Note: slices] Large reductions over two hops are cut into slices. While slice i crosses between
the nodes, slice i + 1 is inside them.

May import: torch, codec, coding, collectives, kernels, layout, link, meter, rotation, slicing.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ds_quant.codec import GroupCodec
from ds_quant.coding import Coding, Own
from ds_quant.collectives import Slot, cut, lay_out
from ds_quant.kernels.dispatch import in_order, together
from ds_quant.layout import VECTOR_NUMEL
from ds_quant.link import Exchange, Link
from ds_quant.meter import Notes
from ds_quant.rotation import Rotation
from ds_quant.slicing import Slicing


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One exchange of a reduction over a larger group of ranks.

    divisor: rank r of the larger group has the place r // divisor % link.size in ``link``.
    exact_own: whether a rank adds its own contribution as it is.
    slicing: of a reduction whose last of two hops this is.
    """

    link: Link
    divisor: int = 1
    exact_own: bool = False
    slicing: Slicing = Slicing()

    def place(self, rank: int) -> int:
        """Where in ``link`` the data bound for ``rank`` goes."""
        return rank // self.divisor % self.link.size


class Piece(NamedTuple):
    """Consecutive elements of one parameter, to be summed by rank ``reducer``.

    ``values`` is 1-D contiguous; ``codings`` has one entry per hop, their addresses this rank's.
    """

    reducer: int
    values: Tensor
    codings: tuple[Coding, ...]
    rotation: Rotation | None = None

    @property
    def numel_on_wire(self) -> int:
        """Elements of a message that carries it: whole rotation blocks."""
        numel = self.values.numel()
        return numel if self.rotation is None else self.rotation.padded(numel)


def are_read_late(piece: Piece, hop: Hop) -> bool:
    """Whether this rank adds up its own values of a piece as they are, after the first ``hop``."""
    own = hop.exact_own and hop.place(piece.reducer) == hop.link.rank
    return own and not _is_copied(piece)


def _is_copied(piece: Piece) -> bool:
    """Whether what is added up exactly is an fp32 copy of the values."""
    return isinstance(piece.codings[0].codec, GroupCodec) or piece.rotation is not None


class _Cut(NamedTuple):
    """Part of piece ``index`` from element ``start`` on, a piece itself."""

    index: int
    start: int
    piece: Piece


class Reduction:
    """Every piece on its way to become its sum over all ranks, times ``scale``: see
    [Note: two hops].

    Sums are fp32 in rank order within a hop, nodes in order across hops; ``scale`` is applied once
    at the end. ``sums``: where those of the pieces that this rank reduces are written, (numel,)
    fp32 each; by default new tensors. Once this is made, values may change, but for those that
    ``are_read_late`` names: not before ``wait`` returns.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        hops: Sequence[Hop],
        *,
        scale: float,
        sums: list[Tensor | None] | None = None,
    ) -> None:
        self._sums = sums or _room(pieces, hops)
        self._running: deque[tuple[Iterator[None], int]] = deque()  # and hops still to be posted
        for cuts in _slices(pieces, hops):
            started = _reduce_slice(cuts, hops, scale, self._sums)
            next(started)
            self.advance()
            if len(self._running) > 1:
                self._finish_oldest()
            self._running.append((started, len(hops) - 1))

    def advance(self) -> None:
        """Post the last hop of every slice, waiting for the hops before."""
        for _ in range(len(self._running)):
            steps, hops = self._running.popleft()
            for _ in range(hops):
                next(steps)
            self._running.append((steps, 0))

    def wait(self) -> list[Tensor | None]:
        """Per piece its sum (numel,) fp32 on its reducer; elsewhere what ``sums`` held or None."""
        self.advance()
        while self._running:
            self._finish_oldest()
        return self._sums

    def _finish_oldest(self) -> None:
        steps, _ = self._running.popleft()
        for _ in steps:
            pass


def _room(pieces: Sequence[Piece], hops: Sequence[Hop]) -> list[Tensor | None]:
    """Where the sums of this rank's pieces go; None for those of others."""
    if not pieces:
        return []
    numels = [
        p.values.numel() if all(hop.place(p.reducer) == hop.link.rank for hop in hops) else None
        for p in pieces
    ]
    device = pieces[0].values.device
    return hops[0].link.empties(numels, dtype=torch.float32, device=device)


def _slices(pieces: Sequence[Piece], hops: Sequence[Hop]) -> list[list[_Cut]]:
    """The cuts of each slice. Sizes alone decide, so that all ranks cut alike."""
    total = sum(p.values.numel() for p in pieces)
    count = hops[-1].slicing.slices(total) if len(hops) > 1 else 1
    if count == 1:
        whole = [_Cut(i, 0, p) for i, p in enumerate(pieces) if p.values.numel()]
        return [whole] if whole else []
    slices: list[list[_Cut]] = [[] for _ in range(count)]
    for index, piece in enumerate(pieces):
        numel, unit = piece.values.numel(), _unit(piece)
        borders = [numel * i // count // unit * unit for i in range(count)] + [numel]
        for cuts, (start, stop) in zip(slices, pairwise(borders), strict=True):
            if start < stop:
                codings = tuple(c.at(start) for c in piece.codings)
                part = piece._replace(values=piece.values[start:stop], codings=codings)
                cuts.append(_Cut(index, start, part))
    return [cuts for cuts in slices if cuts]


def _unit(piece: Piece) -> int:
    """Elements after which a piece can be cut without changing a group."""
    sizes = [c.codec.group_size for c in piece.codings if isinstance(c.codec, GroupCodec)]
    return math.lcm(VECTOR_NUMEL, *sizes, piece.rotation.block if piece.rotation else 1)


class _Arrived(NamedTuple):
    """The rows of one piece after a hop, not yet added up."""

    coding: Coding
    wire: Tensor  # (ranks, bytes) uint8
    own: Own | None
    numel: int  # on the wire

    def restored(self, piece: Piece) -> Tensor:
        """Their sum without the rotation of the piece, (numel,) fp32."""
        total = torch.empty(piece.values.numel(), dtype=torch.float32, device=self.wire.device)
        with in_order():
            options = {"own": self.own, "rotation": piece.rotation}
            self.coding.decode_sum(self.wire, total, **options)
        return total


def _reduce_slice(
    cuts: Sequence[_Cut], hops: Sequence[Hop], scale: float, sums: list[Tensor | None]
) -> Iterator[None]:
    """Yields after every exchange it has posted; writes its part of the sums at the end."""
    pieces = [cut.piece for cut in cuts]
    partial: dict[int, Tensor | _Arrived] = {i: p.values for i, p in enumerate(pieces)}
    for depth, hop in enumerate(hops):
        rows: list[list[int]] = [[] for _ in range(hop.link.size)]
        for i in partial:
            rows[hop.place(pieces[i].reducer)].append(i)
        mine = hop.link.rank
        exchange, slots = _post(pieces, partial, depth, hop, rows)
        kept = {}
        if hop.exact_own:
            with hop.link.decoding():
                own = [(pieces[i], partial[i]) for i in rows[mine]]
                kept = dict(zip(rows[mine], _added_up(own, hop.link), strict=True))
        yield
        received = exchange.wait().view(hop.link.size - hop.exact_own, -1)
        columns = received.split([slot.nbytes for slot in slots], dim=1)
        partial = {
            i: _Arrived(
                coding=pieces[i].codings[depth],
                wire=wire,
                own=(mine, kept[i]) if hop.exact_own else None,
                numel=pieces[i].numel_on_wire,
            )
            for i, wire in zip(rows[mine], columns, strict=True)
        }
    with hops[-1].link.decoding(), together():
        for i, arrived in partial.items():
            start, piece, out = cuts[i].start, pieces[i], sums[cuts[i].index]
            if piece.values.numel() != out.numel():
                out = out[start : start + piece.values.numel()]
            options = {"own": arrived.own, "rotation": piece.rotation}
            arrived.coding.decode_sum(arrived.wire, out, scale=scale, **options)


def _added_up(own: Sequence[tuple[Piece, Tensor | _Arrived]], link: Link) -> list[Tensor]:
    """Every partial sum as fp32, rotated; values that are not copied as they are."""
    if not own:
        return []
    numels = [
        piece.numel_on_wire if isinstance(values, _Arrived) or _is_copied(piece) else None
        for piece, values in own
    ]
    totals = link.empties(numels, dtype=torch.float32, device=own[0][0].values.device)
    into, cast = [], []
    for place, (piece, values) in enumerate(own):
        total = totals[place]
        if isinstance(values, _Arrived):
            values.coding.decode_sum(values.wire, total, own=values.own)
        elif total is None:
            totals[place] = values
        elif piece.rotation is not None:
            piece.rotation.forward(values, out=total)
        else:
            into.append(total)
            cast.append(values)
    if into:  # once; else every kernel that adds them would
        torch._foreach_copy_(into, cast)
    return totals


def _post(
    pieces: Sequence[Piece],
    partial: dict[int, Tensor | _Arrived],
    depth: int,
    hop: Hop,
    rows: Sequence[Sequence[int]],
) -> tuple[Exchange, Sequence[Slot]]:
    """Encode every piece for its place, or recode what has arrived, and post the exchange; with it
    the slots of the rows that arrive, one per rank but for an own one that stays exact.
    """
    mine = hop.link.rank
    layouts = [
        lay_out([(pieces[i].codings[depth].codec, pieces[i].numel_on_wire) for i in row])
        for row in rows
    ]
    slots, nbytes = layouts[mine]
    received, leaving = [nbytes] * hop.link.size, list(rows)
    if hop.exact_own:
        received[mine], leaving[mine], layouts[mine] = 0, [], ((), 0)
    sent = [row_bytes for _, row_bytes in layouts]
    payload = hop.link.empty(sum(sent), device=pieces[0].values.device)
    with hop.link.encoding("gradients") as notes, together():
        for i, wire in zip(chain.from_iterable(leaving), cut(payload, layouts), strict=True):
            _encode(pieces[i], depth, partial[i], wire, notes)
    exchange = hop.link.all_to_all(payload, sent=sent, received=received, role="gradients")
    return exchange, slots


def _encode(
    piece: Piece, depth: int, values: Tensor | _Arrived, wire: Tensor, notes: Notes
) -> None:
    coding, rotation = piece.codings[depth], piece.rotation
    if isinstance(values, _Arrived):
        coding.recode(values.coding, values.wire, wire, numel=values.numel, own=values.own)
        values = functools.partial(values.restored, piece)
    else:
        coding.encode(values, wire, rotation=rotation)
    notes.note(coding, values, wire, numel=piece.values.numel(), rotation=rotation)
