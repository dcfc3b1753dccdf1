"""Gathers of weights on many ranks of one process against wire_oracle.py: every message and every
value that a rank decodes, of ZeRO-3's shards, of the node shard and of what single ranks own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch

from ds_quant.codec.bound import BoundCodec
from ds_quant.codec.codec import CastCodec, Codec, GroupCodec
from ds_quant.comm.message import GatherSlice, Message
from ds_quant.comm.node_rows import RowArena, ShardRows, exchange, gather
from ds_quant.comm.rows import all_gather
from ds_quant.comm.traffic import Traffic
from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.wire import shard_range
from tests.codecs import codecs, format_of
from tests.unit import wire_oracle as oracle
from tests.world import SimulatedRank, World

TOPOLOGIES = ((2, 2), (1, 3), (4, 1), (3, 2), (1, 1))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NUMELS = (1, 0, 2, 3, 97, 1021, 640)  # also none, and fewer than ranks
STEP = 3
SENT: list[tuple[Codec, int]] = [
    (codec, NUMELS[i % len(NUMELS)])
    for i, codec in enumerate(
        [*[CastCodec(DTYPES[0], True)] * 7, *codecs(levels="uniform"), *map(CastCodec, DTYPES)]
    )
]


def weights(place: int, numel: int, dtype: torch.dtype, rank: int = 0) -> torch.Tensor:
    draw = np.random.default_rng((place, numel, rank))
    return torch.from_numpy(draw.normal(size=numel)).to(dtype)


def bound_codec(place: int, codec: Codec, rank: int, *, difference: bool = False) -> BoundCodec:
    """Ranks share the bits of a shift and no others."""
    shared = getattr(codec, "rounding", "") == "random_shift"
    takes_none = getattr(codec, "rounding", "nearest") == "nearest"
    key = 1000 * place + (0 if shared else rank + 1)
    return BoundCodec(codec, None if takes_none else Address(key, STEP), difference=difference)


def row_of(values: torch.Tensor, place: int, codec: Codec, rank: int, first: int = 0) -> bytes:
    found = bound_codec(place, codec, rank).address
    stream = (found.key, found.step) if found else (0, 0)
    return oracle.row_of(values.float().numpy(), format_of(codec), stream, first)


def read(row: bytes, codec: Codec, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(oracle.read(row, format_of(codec), numel).copy()).to(dtype)


def equal(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return found.dtype == wanted.dtype and torch.equal(found, wanted)


def piece(place: int, codec: Codec, numel: int, room: int) -> oracle.Piece:
    """A slot of a gather."""
    small = isinstance(codec, CastCodec) and codec.tight
    return oracle.Piece(tensor=place, start=0, stop=numel, reducer=0, formats=(format_of(codec),),
                        room=room, small=small)  # fmt: skip


# ---- ZeRO-3 ----


def shard(values: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    return values[slice(*shard_range(values.numel(), ranks, rank))]


def gather_all(
    rank: SimulatedRank, dtype: torch.dtype, *, turn: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The message and one of the same tensors backwards; odd ranks wait for the latter first if
    they ``turn``.
    """
    hierarchy = rank.run.world.hierarchy
    posted = []
    for order in (1, -1):
        sent = list(enumerate(SENT))[::order]
        shards = [shard(weights(i, n, dtype), hierarchy.size, rank.number) for i, (_, n) in sent]
        found = [bound_codec(i, codec, rank.number) for i, (codec, _) in sent]
        posted.append(all_gather(shards, [n for _, (_, n) in sent], found, hierarchy))
    waits = reversed(posted) if turn and rank.number % 2 else posted
    for pending in waits:
        pending.wait()
    assert all(pending.wait() is pending.wait() for pending in posted)
    return posted[0].wait(), posted[1].wait()[::-1]


@pytest.fixture
def filled_memory():
    """torch.empty returns NaN or 255."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("filled_memory")
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shards_are_gathered_as_the_page_says(
    topology: tuple[int, int], dtype: torch.dtype
) -> None:
    world = World(*topology)
    ranks = len(world.ranks)
    turn = topology[0] > 1 < topology[1]  # with one level all wait in one order
    found = world.all(partial(gather_all, dtype=dtype, turn=turn))
    rows, wanted = [{} for _ in range(ranks)], []
    for place, (codec, numel) in enumerate(SENT):
        values, decoded = weights(place, numel, dtype), []
        for rank in range(ranks):
            own = shard(values, ranks, rank)
            row = row_of(own, place, codec, rank)
            rows[rank][piece(place, codec, len(own), -(-numel // ranks))] = row
            decoded.append(read(row, codec, len(own), dtype))
        wanted.append(torch.cat(decoded))
    for one, backwards in found:
        assert [i for i, w in enumerate(wanted) if not equal(one[i], w)] == []
        assert [i for i, w in enumerate(wanted) if not equal(backwards[i], w)] == []
    check_messages(world, rows)


def check_messages(world: World, rows: Sequence[dict[oracle.Piece, bytes]]) -> None:
    """Compare the messages of the first of two gathers, and the bytes of each link."""
    topology = world.ranks[0].run.topology
    nodes, places = topology.levels()
    levels = [*map(tuple, places), *map(tuple, nodes)]
    if len(nodes) == 1 or len(places) == 1:
        levels = [tuple(range(topology.world))]
    received = [{"intra": 0, "inter": 0} for _ in world.ranks]
    for link in levels:
        rounds = world.messages(link)
        assert len(rounds) == 2
        for mine, receiver in enumerate(link):
            for sent in rounds:
                for message, sender in zip(sent[mine], link, strict=True):
                    near = topology.node_of(sender) == topology.node_of(receiver)
                    received[receiver]["intra" if near else "inter"] += (
                        len(message) if sender != receiver else 0
                    )
            for message, sender in zip(rounds[0][mine], link, strict=True):
                if tuple(link) in map(tuple, nodes) and len(levels) > 1:
                    first = world.messages(places[sender % topology.node_size])[0]
                    assert message == b"".join(first[0]), "rows are sent on as they came"
                else:
                    assert oracle.holds(message, rows[sender], 0)
    for rank, counted in zip(world.ranks, received, strict=True):
        assert rank.run.traffic.received["weights"] == counted
        assert rank.run.traffic.collectives["weights"] == 2 * (1 + (len(levels) > 1))


def test_nothing_to_send_starts_no_collective() -> None:
    def nothing(rank: SimulatedRank) -> list[torch.Tensor]:
        empty = torch.empty(0, dtype=torch.bfloat16)
        return all_gather(
            [empty], [0], [bound_codec(0, SENT[0][0], 0)], rank.run.world.hierarchy
        ).wait()

    world = World(1, 2)
    assert all(found[0].numel() == 0 for found in world.all(nothing))
    assert [rank.run.traffic.collectives["weights"] for rank in world.ranks] == [0, 0]


@pytest.mark.parametrize(("node_size", "reach"), [(4, "intra"), (2, "inter"), (1, "inter")])
def test_part_of_the_world_is_counted_by_node(node_size: int, reach: str) -> None:
    """Ranks 0 and 3."""
    world = World(4 // node_size, node_size)
    counters = [Traffic(), Traffic()]
    links = [world.communicator([0, 3], index, counters[index]) for index in range(2)]
    arriving = [link.all_gather(torch.zeros(48).byte(), role="weights") for link in links]
    for traffic, pending in zip(counters, arriving, strict=True):
        assert len(pending.wait()) == 96
        assert traffic.received["weights"] == {"intra": 0, "inter": 0} | {reach: 48}


# ---- node shard ----

BF16 = torch.bfloat16
NODE_NUMELS = (
    (1, 2, 5, 1000, 5003),
    (960, 4800, 96),
)  # the rows of the latter are sent as they lie
DIFFERENCE = GroupCodec(bits=4, group_size=2048, range="absmax", rounding="stochastic")
INT8 = GroupCodec(bits=8, group_size=128, range="absmax", rounding="stochastic")
ROUNDS = 3


def keep(rank: SimulatedRank, numels: Sequence[int]) -> list[list[torch.Tensor]]:
    """Return the weights that a rank gathers in its node after every exchange.

    They are exact, and in 8 bits. They are the rank's own: it may write there.
    """
    topology, hierarchy = rank.run.topology, rank.run.world.hierarchy
    where = {"nodes": topology.nodes, "node_size": topology.node_size,
             "local": rank.number % topology.node_size, "dtype": BF16,
             "arena": RowArena(1 << 14, partial(torch.zeros, dtype=torch.uint8))}  # fmt: skip
    kept, seen = [ShardRows.allocate(numel, **where) for numel in numels], []
    for step in range(ROUNDS):
        shards = [shard(weights(i, n, BF16, step), topology.world, rank.number)
                  for i, n in enumerate(numels)]  # fmt: skip
        differs = [
            bound_codec(i, DIFFERENCE, rank.number, difference=True) for i in range(len(shards))
        ]
        exchange(kept, shards, differs, hierarchy.inter or hierarchy.flat).wait()
        for codec in (CastCodec(BF16), INT8):
            sent = [bound_codec(i, codec, rank.number) for i in range(len(shards))]
            found = gather(kept, sent, hierarchy.intra).wait()
            seen.append([values.clone() for values in found])
            for values in found:
                values.zero_()
    return seen


@pytest.mark.usefixtures("filled_memory")
@pytest.mark.parametrize("topology", [(2, 2), (3, 2), (4, 1), (3, 1)], ids=str)
@pytest.mark.parametrize("numels", NODE_NUMELS, ids=str)
def test_a_node_shard_holds_what_the_page_says(
    topology: tuple[int, int], numels: Sequence[int]
) -> None:
    """Differences are added to what every node holds; inside a node it is sent on."""
    (nodes, node_size), ranks = topology, topology[0] * topology[1]
    seen = World(*topology).all(partial(keep, numels=numels))
    for place, numel in enumerate(numels):
        held, width = torch.zeros(numel).to(BF16), -(-numel // ranks)
        for step in range(ROUNDS):
            new = weights(place, numel, BF16, step)
            for rank in range(ranks):
                cut = slice(*shard_range(numel, ranks, rank))
                row = row_of(new[cut].float() - held[cut].float(), place, DIFFERENCE, rank)
                found = read(row, DIFFERENCE, len(held[cut]), torch.float32)
                held[cut] = (held[cut].float() + found).to(BF16)
            inner = held.clone()
            for rank in range(ranks) if node_size > 1 else ():
                cut, node = slice(*shard_range(numel, ranks, rank)), rank // node_size
                for reader in range(nodes):  # the row of a node is read from every node's copy
                    sender = reader * node_size + rank % node_size
                    length = len(held[cut])
                    first = node * -(-width // 8) if length == width else 16 * node * width
                    row = row_of(held[cut], place, INT8, sender, first)
                    if reader == 0:
                        inner[cut] = read(row, INT8, length, BF16)
            for rank, results in enumerate(seen):
                assert equal(results[2 * step][place], held), (rank, numel, step)
                if rank < node_size:
                    assert equal(results[2 * step + 1][place], inner), (rank, numel, step)


# ---- of single owners ----

LAYOUTS = {
    "even": lambda ranks: [(rank, 300) for rank in range(ranks)],
    "one owner": lambda ranks: [(ranks - 1, 1099)],
    "two owners": lambda ranks: [(0, 500), (0, 0), (0, 3), (ranks - 1, 1), (ranks - 1, 2048)],
    "nothing": lambda ranks: [(0, 0)],
}


@pytest.mark.parametrize("codec", [INT8, CastCodec(torch.float32), DIFFERENCE], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_parts_of_owners_are_gathered_as_the_page_says(
    topology: tuple[int, int], layout: str, codec: Codec
) -> None:
    parts = LAYOUTS[layout](topology[0] * topology[1])

    def from_owners(rank: SimulatedRank) -> list[torch.Tensor]:
        hierarchy = rank.run.world.hierarchy
        planned = [
            GatherSlice(owner, codec, n, i, (i, 0), (i, 0)) for i, (owner, n) in enumerate(parts)
        ]
        how = {"rank": rank.number, "ranks": hierarchy.size, "node_size": hierarchy.node_size}
        values = [
            weights(i, n, torch.float32) if owner == rank.number else torch.full((n,), torch.nan)
            for i, (owner, n) in enumerate(parts)
        ]
        found = [bound_codec(i, codec, rank.number) for i in range(len(parts))]
        pending = Message(planned, **how).gather(hierarchy, values, found, lambda: values)
        assert all(v.isnan().all() for v, (owner, _) in zip(values, parts, strict=True)
                   if owner != rank.number), "changed before it was waited for"  # fmt: skip
        return pending.wait()

    world = World(*topology)
    for values in world.all(from_owners):
        for i, (owner, numel) in enumerate(parts):
            row = row_of(weights(i, numel, torch.float32), i, codec, owner)
            assert equal(values[i], read(row, codec, numel, torch.float32))
    hops = 2 if topology[0] > 1 < topology[1] else 1
    messages = {rank.run.traffic.collectives["weights"] for rank in world.ranks}
    assert messages == {0 if layout == "nothing" else hops}
