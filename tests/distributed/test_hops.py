"""Reduction and Fabric on real gloo ranks, one and two levels, against sums computed here; and
reductions that rest between their hops: several micro-steps cross nodes once.

One start of the ranks per topology (nodes x ranks per node) plays all cases.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ds_quant.codec.bound import Coding, Rotation
from ds_quant.codec.codec import CastCodec, Codec, GroupCodec
from ds_quant.comm.reduce import GradientSums, Reduction
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
TWO_LEVELS = ((2, 2), (3, 2))
NUMELS = (0, 1, 31, 1000, 5003)
GRADIENTS = 2 * len(NUMELS)
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
        for place in range(GRADIENTS)
    ]


class Case(NamedTuple):
    """``rests``: of several micro-steps that cross once, how the second hop begins: with the last
    first one or alone; None: one micro-step.
    """

    name: str
    rotated: bool
    slices: int
    exact_own: bool
    rests: str | None = None

    @property
    def micro_steps(self) -> int:
        return 1 if self.rests is None else 3


NAMES, SLICES, RESTS, YES_NO = tuple(CODECS), (1, 5), ("together", "alone"), (False, True)
PLAIN = [Case(*each) for each in product(NAMES, [False], SLICES, YES_NO)]
HELD = [Case(*each) for each in product(NAMES, [False], SLICES, [True], RESTS)]
ROTATED = [Case("fp32", True, 1, True)]
HELD_ROTATED = [Case("fp32", True, slices, True, "together") for slices in SLICES]


def values_of(rank: int, world: int, micro: int, case: Case) -> list[torch.Tensor]:
    """Gridded: only one micro-step has other values than zeros, so that sums stay on the grid."""
    if case.name == "fp32":
        return [gradient(p, rank + 100 * micro, world, gridded=False) for p in range(GRADIENTS)]
    scale = float(micro == case.micro_steps // 2)
    return [scale * gradient(p, rank, world, gridded=True) for p in range(GRADIENTS)]


def reduce(case: Case, fabric: Fabric, node_size: int) -> list[torch.Tensor | None]:
    """The gradients one after the other, each on a rank of its own; None where another rank's."""
    rank, world = fabric.whole.rank, fabric.whole.size
    route = [
        replace(hop, slicing=Slicing(count=case.slices))
        for hop in route_of(fabric, node_size, exact_own=case.exact_own)
    ]
    codecs = CODECS[case.name][: len(route)]
    rotation = Rotation(block=32) if case.rotated else None
    segments = [
        Segment(p, 0, NUMELS[p % len(NUMELS)], p, 0, (p + 1) % world) for p in range(GRADIENTS)
    ]
    form = Form(codecs, rotation.block if rotation else 0)
    sums = GradientSums(segments, [form] * GRADIENTS, route, fabric.whole, scale=0.5)
    total, how = sums.room(CPU).fill_(torch.nan), (codings_of(rank, codecs), [rotation] * GRADIENTS)
    if case.rests is None:
        sums.begin(values_of(rank, world, 0, case), *how, into=total).wait()
    else:
        held = sums.held_room(CPU).fill_(torch.nan)
        for micro in range(case.micro_steps):
            is_last = case.rests == "together" and micro == case.micro_steps - 1
            values, into = values_of(rank, world, micro, case), total if is_last else None
            Reduction(sums.plan, values, *how, into, held=held, fresh=micro == 0).wait()
    if case.rests == "alone":
        sums.begin(None, *how, into=total, held=held).wait()
    return own_sums(segments, sums, total)


def _reduce_rank(node_size: int) -> dict[Case, tuple]:
    """By case: sums, bytes inside and between nodes, and messages."""
    results = {}
    fabric, traffic = fabric_of(node_size)
    for case in [*PLAIN, *ROTATED, *(HELD + HELD_ROTATED if fabric.intra else ())]:
        before, calls = dict(traffic.received["gradients"]), traffic.collectives["gradients"]
        found = [None if s is None else s.numpy() for s in reduce(case, fabric, node_size)]
        after = traffic.received["gradients"]
        received = {link: after[link] - before[link] for link in before}
        results[case] = found, received, traffic.collectives["gradients"] - calls
    return results


@functools.cache
def reduced(nodes: int, node_size: int) -> list[dict[Case, tuple]]:
    return run(_reduce_rank, nodes * node_size, node_size)


def plain_sum(place: int, nodes: int, node_size: int, case: Case) -> np.ndarray:
    """fp32, over ranks of a node, then micro-steps, then nodes; halved."""
    world, total = nodes * node_size, None
    for node in range(nodes):
        kept = None
        for micro in range(case.micro_steps):
            partial = None
            for rank in range(node * node_size, (node + 1) * node_size):
                value = values_of(rank, world, micro, case)[place]
                partial = value if partial is None else partial + value
            kept = partial if kept is None else kept + partial
        total = kept if total is None else total + kept
    return (total * 0.5).numpy()


def own_and_expected(
    case: Case, topology: tuple[int, int]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Every sum that a rank got, and the plain one."""
    world = topology[0] * topology[1]
    for rank, results in enumerate(reduced(*topology)):
        for place, got in enumerate(results[case][0]):
            assert (got is not None) == ((place + 1) % world == rank)
            if got is not None:
                yield got, plain_sum(place, *topology, case)


WITH_CASES = [
    *((case, topology) for topology in TOPOLOGIES for case in PLAIN),
    *((case, topology) for topology in TWO_LEVELS for case in HELD),
]


@pytest.mark.parametrize(("case", "topology"), WITH_CASES)
def test_sums_are_the_plain_ones_bit_for_bit(case: Case, topology: tuple[int, int]) -> None:
    """With an identity codec for any values, with 8 and 4 bits for values on both grids."""
    for got, expected in own_and_expected(case, topology):
        np.testing.assert_array_equal(got, expected)


WITH_ROTATION = [
    *((case, topology) for topology in TOPOLOGIES for case in ROTATED),
    *((case, topology) for topology in TWO_LEVELS for case in HELD_ROTATED),
]


@pytest.mark.parametrize(("case", "topology"), WITH_ROTATION)
def test_a_rotation_around_the_hops_changes_rounding_only(
    case: Case, topology: tuple[int, int]
) -> None:
    """32 normal values below 6 each: at most 40 fp32 additions of magnitudes below 32 * 6 * world
    per micro-step, and a division by 32.
    """
    limit = 40 * 2.0**-24 * 6 * topology[0] * topology[1] * case.micro_steps
    for got, expected in own_and_expected(case, topology):
        np.testing.assert_allclose(got, expected, rtol=0, atol=limit)


QUANTIZED = Case("int8/int4", False, 1, True)
TRAFFIC = [
    *((QUANTIZED, topology) for topology in [(2, 2), (2, 1), (1, 4)]),
    *((QUANTIZED._replace(rests=rests), topology) for topology in TWO_LEVELS for rests in RESTS),
]


@pytest.mark.parametrize(("case", "topology"), TRAFFIC)
def test_traffic_is_split_into_the_two_levels(case: Case, topology: tuple[int, int]) -> None:
    """Inside: what the node_size - 1 others send for all nodes, in every micro-step; between: one
    message per node.
    """
    nodes, node_size = topology
    world = nodes * node_size
    for rank, results in enumerate(reduced(*topology)):
        _, received, calls = results[case]
        outer = INT4 if nodes > 1 and node_size > 1 else INT8
        intra = inter = 0
        for place in range(GRADIENTS):
            numel, reducer = NUMELS[place % len(NUMELS)], (place + 1) % world
            if node_size > 1 and reducer % node_size == rank % node_size:
                intra += case.micro_steps * (node_size - 1) * INT8.wire_bytes(numel)
            if nodes > 1 and reducer == rank:
                inter += (nodes - 1) * outer.wire_bytes(numel)
        assert received == {"intra": intra, "inter": inter}
        assert calls == (case.micro_steps + 1 if nodes > 1 and node_size > 1 else 1)


def test_slices_post_more_messages_and_overlap() -> None:
    for results in reduced(2, 2):
        whole, sliced = (results[Case("fp32", False, slices, True)] for slices in SLICES)
        assert sliced[2] > whole[2]


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
