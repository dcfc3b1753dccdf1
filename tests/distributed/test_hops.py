"""Reduction and Fabric on real gloo ranks, one and two levels, against sums computed here.

One start of the ranks per topology (nodes x ranks per node) plays all cases.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ds_quant.codec.bound import Coding, Rotation
from ds_quant.codec.codec import CastCodec, Codec, GroupCodec
from ds_quant.comm.reduce import GradientSums
from ds_quant.comm.reduction_plan import Form, LinkHop, Segment, Slicing
from ds_quant.comm.topology import Topology
from ds_quant.comm.traffic import Traffic
from ds_quant.comm.transport import Fabric, Link
from ds_quant.kernels.random_bits import Role, address
from tests.distributed.harness import run
from tests.distributed.messages import own_sums

CPU = torch.device("cpu")
pytestmark = pytest.mark.distributed

TOPOLOGIES = ((1, 4), (2, 2), (4, 1), (2, 1), (1, 3), (3, 1))
NUMELS = (0, 1, 31, 1000, 5003)
FP32 = CastCodec(torch.float32)
INT8 = GroupCodec(bits=8, group_size=128, range="absmax", rounding="stochastic")
INT4 = GroupCodec(bits=4, group_size=128, range="absmax", rounding="stochastic")
CODECS: dict[str, tuple[Codec, Codec]] = {"fp32": (FP32, FP32), "int8/int4": (INT8, INT4)}


def fabric_of(node_size: int) -> tuple[Fabric, Traffic]:
    """The links of the default group, as an engine makes them."""
    from deepspeed import comm as dist

    world, traffic = dist.get_world_size(), Traffic()
    topology = Topology(world=world, node_size=node_size)

    def link(group: Any) -> Link:
        return Link(group, topology=topology, traffic=traffic)

    if node_size in (1, world):
        return Fabric(link(None)), traffic
    own = []
    for ranks_of_level in topology.levels():
        groups = [(ranks, dist.new_group(ranks)) for ranks in ranks_of_level]
        own += [link(group) for ranks, group in groups if dist.get_rank() in ranks]
    return Fabric(link(None), own[0], own[1]), traffic


def route_of(fabric: Fabric, node_size: int, *, exact_own: bool) -> tuple[LinkHop, ...]:
    if fabric.intra is None:
        return (LinkHop(link=fabric.whole, exact_own=exact_own),)
    return (
        LinkHop(link=fabric.intra, exact_own=exact_own),
        LinkHop(link=fabric.inter, divisor=node_size, exact_own=exact_own),
    )


def gradient(place: int, rank: int, world: int, *, gridded: bool) -> torch.Tensor:
    """Of piece ``place`` on ``rank``. Gridded: +-127 * 7, whole in 8 and in 4 bits; the ranks take
    turns to fill a group of 128 and the others hold zeros there, so that sums stay on the grid.
    """
    numel = NUMELS[place % len(NUMELS)]
    if not gridded:
        return torch.from_numpy(np.random.default_rng((place, rank)).normal(size=numel)).float()
    signs = np.random.default_rng(place).choice([-1, 1], numel) * 127.0 * 7
    mine = np.arange(numel) // 128 % world == rank
    return torch.from_numpy(np.where(mine, signs, 0.0)).float()


def codings_of(rank: int, codecs: tuple) -> list[tuple[Coding, ...]]:
    return [
        tuple(
            Coding(
                codec=codec,
                address=address(
                    seed=1, role=Role.GRADIENTS, step=2, parameter=place, rank=rank, hop=hop
                ),
            )
            for hop, codec in enumerate(codecs)
        )
        for place in range(2 * len(NUMELS))
    ]


def reduce(
    route: list[LinkHop], codecs: tuple, rotation: Rotation | None, whole: Link
) -> list[torch.Tensor | None]:
    """The gradients one after the other, each on a rank of its own; None where another rank's."""
    rank, world, gridded = whole.rank, whole.size, codecs[0] is INT8
    values = [gradient(p, rank, world, gridded=gridded) for p in range(2 * len(NUMELS))]
    segments = [
        Segment(place, 0, x.numel(), place, 0, (place + 1) % world)
        for place, x in enumerate(values)
    ]
    forms = [Form(codecs, rotation.block if rotation else 0)] * len(values)
    sums = GradientSums(segments, forms, route, whole, scale=0.5)
    total, codings = sums.room(CPU), codings_of(rank, codecs)
    sums.begin(values, codings, [rotation] * len(values), into=total).wait()
    return own_sums(segments, sums, total)


CASES = {
    (name, rotated, sliced, exact_own)
    for name in CODECS
    for rotated in (False, True)
    for sliced in (False, True)
    for exact_own in (False, True)
}


def _reduce_rank(node_size: int) -> dict[tuple, tuple]:
    """By case: sums (None where another rank's), bytes and collectives."""
    results = {}
    fabric, traffic = fabric_of(node_size)
    for name, rotated, sliced, exact_own in sorted(CASES):
        slicing = Slicing(count=5 if sliced else 1)
        route = [replace(hop, slicing=slicing)
                 for hop in route_of(fabric, node_size, exact_own=exact_own)]  # fmt: skip
        codecs = CODECS[name][2 - len(route) :] if name == "fp32" else CODECS[name][: len(route)]
        before = {k: dict(v) for k, v in traffic.received.items()}, traffic.collectives["gradients"]
        sums = reduce(route, codecs, Rotation(block=32) if rotated else None, fabric.whole)
        bytes_ = {
            k: n - before[0]["gradients"][k] for k, n in traffic.received["gradients"].items()
        }
        calls = traffic.collectives["gradients"] - before[1]
        results[name, rotated, sliced, exact_own] = (
            [None if s is None else s.numpy() for s in sums], bytes_, calls,
        )  # fmt: skip
    return results


@functools.cache
def reduced(nodes: int, node_size: int) -> list[dict[tuple, tuple]]:
    return run(_reduce_rank, nodes * node_size, node_size)


def plain_sum(place: int, nodes: int, node_size: int, *, gridded: bool) -> np.ndarray:
    """fp32, in rank order inside a node, then in node order; halved."""
    total = None
    for node in range(nodes):
        partial = None
        for local in range(node_size):
            rank = node * node_size + local
            value = gradient(place, rank, nodes * node_size, gridded=gridded)
            partial = value if partial is None else partial + value
        total = partial if total is None else total + partial
    return (total * 0.5).numpy()


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("exact_own", [False, True])
@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("name", CODECS)
def test_two_hops_give_the_plain_sum_bit_for_bit(
    name: str, sliced: bool, exact_own: bool, topology: tuple[int, int]
) -> None:
    """With an identity codec for any values, with 8 and 4 bits for values on both grids."""
    world = topology[0] * topology[1]
    for rank, results in enumerate(reduced(*topology)):
        sums = results[name, False, sliced, exact_own][0]
        for place, got in enumerate(sums):
            if (place + 1) % world != rank:
                assert got is None
                continue
            expected = plain_sum(place, *topology, gridded=name != "fp32")
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_rotation_around_the_hops_changes_rounding_only(topology: tuple[int, int]) -> None:
    """32 normal values below 6 each: at most 40 fp32 additions of magnitudes below 32 * 6 * world,
    and a division by 32.
    """
    world = topology[0] * topology[1]
    limit = 40 * 2.0**-24 * 6 * world
    for rank, results in enumerate(reduced(*topology)):
        for place, got in enumerate(results["fp32", True, False, True][0]):
            if (place + 1) % world == rank:
                expected = plain_sum(place, *topology, gridded=False)
                np.testing.assert_allclose(got, expected, rtol=0, atol=limit)


@pytest.mark.parametrize("topology", [(2, 2), (2, 1), (1, 4)])
def test_traffic_is_split_into_the_two_levels(topology: tuple[int, int]) -> None:
    """Inside: what the node_size - 1 others send for all nodes; between: one message per node."""
    nodes, node_size = topology
    world = nodes * node_size
    for rank, results in enumerate(reduced(*topology)):
        _, received, calls = results["int8/int4", False, False, True]
        outer = INT4 if nodes > 1 and node_size > 1 else INT8
        intra = inter = 0
        for place in range(2 * len(NUMELS)):
            numel, reducer = NUMELS[place % len(NUMELS)], (place + 1) % world
            if node_size > 1 and reducer % node_size == rank % node_size:
                intra += (node_size - 1) * INT8.wire_bytes(numel)
            if nodes > 1 and reducer == rank:
                inter += (nodes - 1) * outer.wire_bytes(numel)
        assert received == {"intra": intra, "inter": inter}
        assert calls == (2 if nodes > 1 and node_size > 1 else 1)


def test_slices_post_more_messages_and_overlap() -> None:
    for results in reduced(2, 2):
        assert results["fp32", False, True, True][2] > results["fp32", False, False, True][2]


def _gather_rank(node_size: int) -> tuple[np.ndarray, dict[str, int]]:
    fabric, traffic = fabric_of(node_size)
    payload = torch.full((48,), 10 + fabric.whole.rank, dtype=torch.uint8)
    rows = fabric.all_gather(payload, role="weights").wait().reshape(-1)  # by node, then rank
    return rows.numpy(), traffic.received["weights"]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_rows_cross_between_nodes_once(topology: tuple[int, int]) -> None:
    nodes, node_size = topology
    world = nodes * node_size
    for rows, received in run(_gather_rank, world, node_size):
        np.testing.assert_array_equal(rows, np.repeat(np.arange(10, 10 + world), 48))
        assert received["inter"] * node_size == 48 * (world - node_size) if node_size > 1 else True
        assert received["intra"] + received["inter"] == 48 * ((nodes - 1) + (node_size - 1) * nodes)
