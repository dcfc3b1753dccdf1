"""Messages of two-level reductions, caught on real links and read by wire_oracle.py, which was
written from docs/wire_format.md alone: the sums are ours, bit for bit.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from ds_quant.codec.codec import GroupCodec
from tests.distributed.harness import run
from tests.distributed.messages import own_sums
from tests.distributed.models import Regression, build, settings, train_step
from tests.unit import wire_oracle as oracle

pytestmark = pytest.mark.distributed

NODE_SIZE, RANKS = 2, 4
LEVELS = [[(0, 1), (2, 3)], [(0, 2), (1, 3)]]
Message = tuple[list[int], bytes]  # bytes for every place of the link, end to end
Messages = dict[tuple[int, ...], list[Message]]  # by the ranks of the link
Kind = tuple[tuple[oracle.Format | None, ...], int]  # formats by hop, block of the rotation
Signs = np.ndarray | None  # of the elements of a block


class Uneven(Regression):
    """Has matrices of which the last ranks get less or nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny, self.thin = nn.Linear(3, 3, bias=False), nn.Linear(5, 1, bias=False)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(x) + self.tiny(x[:, :3]).sum(1, keepdim=True) + self.thin(x[:, :5])


class Call(NamedTuple):
    """One reduction on one rank: whole tensors, their kinds and sign flips, owners (ZeRO-1/2), what
    this rank got of them, and the messages it sent.
    """

    tensors: list[np.ndarray]
    kinds: list[Kind]
    signs: list[Signs]
    owners: list[int]
    sums: list[np.ndarray | None]
    scale: float
    messages: Messages


def kind_of(codings: Any, rotation: Any) -> Kind:
    formats = [
        oracle.Format(
            bits=c.codec.bits, group=c.codec.group_size,
            minmax=c.codec.range == "minmax", gaussian=c.codec.range == "gaussian",
        ) if isinstance(c.codec, GroupCodec) else None for c in codings
    ]  # fmt: skip
    return tuple(formats), rotation.block if rotation else 0


def signs_of(rotation: Any) -> Signs:
    if rotation is None or rotation.signs is None:
        return None
    return oracle.signs_of(rotation.signs.key, rotation.signs.step, rotation.block)


def flipped(values: np.ndarray, signs: Signs) -> np.ndarray:
    return values if signs is None else values * np.resize(signs, values.size)


def fp32(values: torch.Tensor) -> np.ndarray:
    return values.detach().reshape(-1).float().numpy().copy()


def catch() -> Messages:
    """What the links of this process are given from now on."""
    from ds_quant.comm.transport import Link

    caught: Messages = defaultdict(list)
    original = Link.all_to_all

    def all_to_all(link: Any, payload: torch.Tensor, *, sent: Any, **how: Any) -> Any:
        caught[tuple(link.ranks)].append((list(sent), payload.numpy().tobytes()))
        return original(link, payload, sent=sent, **how)

    Link.all_to_all = all_to_all
    return caught


def taken(caught: Messages) -> Messages:
    messages = dict(caught)
    caught.clear()
    return messages


def reduced_to_shards(block: dict[str, Any]) -> list[Call]:
    """Every bucket of a step under ZeRO-3."""
    from ds_quant.zero.gradients import ShardReduction

    engine = build(settings(3, block, zero={"overlap_comm": False}), Uneven)
    caught, calls, original = catch(), [], ShardReduction.__call__

    def reduce(self: Any, ours: Any, params: Any, tensors: Any, group: Any = None) -> Any:
        whole = [fp32(t) for t in tensors]
        shards = original(self, ours, params, tensors, group)
        binding = self._binding
        route, kinds, signs = binding.route(group), [], []
        for p, t in zip(params, tensors, strict=True):
            found = binding.param_of(p).gradient_streams(t.dtype, rank=0, hops=len(route))
            how = found.codings(0, 0)
            kinds.append(kind_of(*how))
            signs.append(signs_of(how[1]))
        got = [fp32(s) for s in shards]
        calls.append(Call(whole, kinds, signs, [], got, 1 / RANKS, taken(caught)))
        return shards

    ShardReduction.__call__ = reduce
    train_step(engine, 0)
    return calls


def reduced_to_owners(block: dict[str, Any]) -> list[Call]:
    """Every bucket of a step under ZeRO-2."""
    from ds_quant.comm.reduce import GradientSums, Reduction

    engine = build(settings(2, block, zero={"reduce_bucket_size": 20_000}), Uneven)
    caught, calls = catch(), []
    made, begin, wait = GradientSums.__init__, GradientSums.begin, Reduction.wait

    def make(self: Any, shares: Any, *rest: Any, scale: float, balanced: bool) -> None:
        self.seen = list(shares), scale
        made(self, shares, *rest, scale=scale, balanced=balanced)

    def start(self: Any, tensors: Any, codings: Any, rotations: Any, **how: Any) -> Any:
        shares, scale = self.seen
        values = [fp32(tensors[s.tensor].view(-1)[s.start : s.start + s.numel]) for s in shares]
        under_way = begin(self, tensors, codings, rotations, **how)

        def note() -> None:
            wait(under_way)
            kinds = [kind_of(codings[s.gradient], rotations[s.gradient]) for s in shares]
            signs = [signs_of(rotations[s.gradient]) for s in shares]
            sums = own_sums(shares, self, how["into"])
            got = [None if found is None else fp32(found) for found in sums]
            owners = [s.reducer for s in shares]
            calls.append(Call(values, kinds, signs, owners, got, scale, taken(caught)))

        under_way.wait = note
        return under_way

    GradientSums.__init__, GradientSums.begin = make, start
    train_step(engine, 0)
    return calls


# ---- the receiving side, from the page ----


def received(calls: list[Call], link: tuple[int, ...], rank: int, nth: int) -> dict[int, bytes]:
    """By place in the link, what the n-th exchange of a call brings to a rank."""
    mine, found = link.index(rank), {}
    for place, source in enumerate(link):
        sent, payload = calls[source].messages[link][nth]
        start = sum(sent[:mine])
        found[place] = payload[start : start + sent[mine]]
    return found


def link_of(level: int, rank: int) -> tuple[int, ...]:
    return next(link for link in LEVELS[level] if rank in link)


def sums_of(
    calls: list[Call],
    tensors: list[list[np.ndarray]],
    signs: list[Signs],
    pieces: list[oracle.Piece],
    count: Any,
) -> dict[oracle.Piece, np.ndarray]:
    """The final sum of every part, read off the messages of both hops."""
    found = {}
    for nth, parts in enumerate(oracle.slices(pieces, count)):
        for rank in range(RANKS):
            node, local = divmod(rank, NODE_SIZE)
            own = {}
            for p in parts:
                if p.reducer % NODE_SIZE == local:
                    values = flipped(tensors[rank][p.tensor][p.start : p.stop], signs[p.tensor])
                    own[p] = oracle.rotate(values, p.h) if p.h else values
            inside = received(calls, link_of(0, rank), rank, nth)
            partial = oracle.add_up(own, local, inside, 0)
            last = {p: values for p, values in partial.items() if p.reducer == rank}
            between = received(calls, link_of(1, rank), rank, nth)
            for p, total in oracle.add_up(last, node, between, 1).items():
                last_sum = oracle.finished(p, total, calls[rank].scale)
                found[p] = flipped(last_sum, signs[p.tensor])
    return found


def joined(found: dict[oracle.Piece, np.ndarray], tensor: int, reducer: int | None) -> np.ndarray:
    parts = [p for p in found if p.tensor == tensor and reducer in (None, p.reducer)]
    values = [found[p] for p in sorted(parts, key=lambda p: p.start)]
    return np.concatenate([np.zeros(0, np.float32), *values])


TWO_LEVELS = [
    {"scheme": "sdp4bit", "node_size": NODE_SIZE, "min_numel": 1},
    {"scheme": "sdp4bit", "node_size": NODE_SIZE, "min_numel": 1, "slices": 3},
    {"scheme": "qsdp", "node_size": NODE_SIZE, "min_numel": 1, "slices": 2},
    {"scheme": "eden3", "node_size": NODE_SIZE, "min_numel": 1, "slices": 2},
]
NAMES = ["sdp4bit", "3 slices", "qsdp", "eden3"]


@pytest.mark.parametrize("block", TWO_LEVELS, ids=NAMES)
def test_shards_are_read_off_the_messages_as_the_page_says(block: dict[str, Any]) -> None:
    for calls in zip(*run(reduced_to_shards, RANKS, block), strict=True):
        kinds, tensors = calls[0].kinds, [call.tensors for call in calls]
        pieces = [
            piece
            for i, (formats, h) in enumerate(kinds)
            for piece in oracle.shards(i, tensors[0][i].size, RANKS, formats, h)
        ]
        pieces.sort(key=lambda piece: piece.small)  # small ones behind all others
        found = sums_of(calls, tensors, calls[0].signs, pieces, block.get("slices"))
        for rank, call in enumerate(calls):
            for i, shard in enumerate(call.sums):
                np.testing.assert_array_equal(joined(found, i, rank), shard)


@pytest.mark.parametrize("block", TWO_LEVELS, ids=NAMES)
def test_owners_read_sums_off_the_messages_as_the_page_says(block: dict[str, Any]) -> None:
    ways = set()
    for calls in zip(*run(reduced_to_owners, RANKS, block), strict=True):
        owners, kinds = calls[0].owners, calls[0].kinds
        runs, members = [], []
        for i, (owner, values, kind) in enumerate(
            zip(owners, calls[0].tensors, kinds, strict=True)
        ):
            small = oracle.is_small(kind[0], values.size)
            if runs and small and runs[-1][0] == owner and runs[-1][2:] == kind:
                runs[-1] = owner, runs[-1][1] + values.size, *kind
                members[-1].append((i, values.size))
            else:
                runs.append((owner, values.size, *kind))
                members.append([(i, values.size)])
        pieces = oracle.split_small(oracle.owner_pieces(runs, RANKS, NODE_SIZE), members)
        tensors = [call.tensors for call in calls]
        found = sums_of(calls, tensors, calls[0].signs, pieces, block.get("slices"))
        whole = {p: joined({q: v for q, v in found.items() if p.tensor == q.tensor
                            and p.start <= q.start < p.stop}, p.tensor, None)
                 for p in pieces}  # fmt: skip
        away = [p for p in pieces if p.reducer != owners[p.tensor]]
        ways.add(bool(away))
        for rank, call in enumerate(calls):
            for source in range(RANKS):
                coming = [p for p in away if p.reducer == source and owners[p.tensor] == rank]
                if away and source != rank:
                    message = received(calls, tuple(range(RANKS)), rank, 0)[source]
                    read_delivery(message, coming, whole)
            for i, owner in enumerate(owners):
                if owner == rank:
                    parts = {p: v for p, v in whole.items() if p.tensor == i}
                    np.testing.assert_array_equal(joined(parts, i, None), call.sums[i])
    if block["scheme"] == "qsdp":
        assert True in ways, "some sums are delivered"


def read_delivery(
    message: bytes, coming: list[oracle.Piece], whole: dict[oracle.Piece, np.ndarray]
) -> None:
    """Replace sums by what the owner decodes."""
    position = 0
    for p in coming:
        fmt, n = oracle.delivered(p.formats[1]), p.stop - p.start
        position = position if p.small else oracle.pad16(position)
        whole[p] = oracle.read(message[position:], fmt, n)
        position += 4 * n if p.small else oracle.row_bytes(fmt, n)
    assert oracle.pad16(position) == len(message)
