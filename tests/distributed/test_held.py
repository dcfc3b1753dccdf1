"""Reductions that rest between their hops, on gloo ranks: several micro-steps cross nodes once.

The stated order of the sums, all fp32: ranks of a node in rank order, then micro-steps, then nodes.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from ds_quant.codec.bound import Rotation
from ds_quant.comm.reduce import GradientSums, Reduction
from ds_quant.comm.reduction_plan import Form, Segment, Slicing
from tests.distributed.harness import run
from tests.distributed.messages import own_sums
from tests.distributed.test_hops import (
    CODECS,
    INT4,
    INT8,
    NUMELS,
    codings_of,
    fabric_of,
    gradient,
    route_of,
)

CPU = torch.device("cpu")
pytestmark = pytest.mark.distributed

MICRO_STEPS = 3
GRADIENTS = 2 * len(NUMELS)
CASES = [
    (name, rotated, slices, together)
    for name in CODECS
    for rotated in (False, True)
    for slices in (1, 5)
    for together in (True, False)  # the last first hop with the second one
]


def values_of(rank: int, world: int, micro: int, *, gridded: bool) -> list[torch.Tensor]:
    """Gridded: only one micro-step has other values than zeros, so that sums stay on the grid."""
    if gridded:
        scale = float(micro == 1)
        return [scale * gradient(p, rank, world, gridded=True) for p in range(GRADIENTS)]
    return [gradient(p, rank + 100 * micro, world, gridded=False) for p in range(GRADIENTS)]


def _held_rank(node_size: int) -> dict[tuple, tuple]:
    """By case: sums (None where another rank's), bytes inside and between nodes, messages."""
    results = {}
    fabric, traffic = fabric_of(node_size)
    rank, world = fabric.whole.rank, fabric.whole.size
    for case in CASES:
        name, rotated, slices, together = case
        route = [
            replace(hop, slicing=Slicing(count=slices))
            for hop in route_of(fabric, node_size, exact_own=True)
        ]
        rotation = Rotation(block=32) if rotated else None
        segments = [
            Segment(p, 0, NUMELS[p % len(NUMELS)], p, 0, (p + 1) % world) for p in range(GRADIENTS)
        ]
        form = Form(CODECS[name], rotation.block if rotation else 0)
        sums = GradientSums(segments, [form] * GRADIENTS, route, fabric.whole, scale=0.5)
        held, total = sums.held_room(CPU).fill_(torch.nan), sums.room(CPU).fill_(torch.nan)
        how = codings_of(rank, CODECS[name]), [rotation] * GRADIENTS
        before, calls = dict(traffic.received["gradients"]), traffic.collectives["gradients"]
        for micro in range(MICRO_STEPS):
            values = values_of(rank, world, micro, gridded=name != "fp32")
            last = total if together and micro == MICRO_STEPS - 1 else None
            Reduction(sums.plan, values, *how, last, held=held, fresh=micro == 0).wait()
        if not together:
            sums.begin(None, *how, into=total, held=held).wait()
        after = traffic.received["gradients"]
        found = own_sums(segments, sums, total)
        results[case] = (
            [None if s is None else s.numpy() for s in found],
            {link: after[link] - before[link] for link in before},
            traffic.collectives["gradients"] - calls,
        )
    return results


@functools.cache
def held(nodes: int, node_size: int) -> list[dict[tuple, tuple]]:
    return run(_held_rank, nodes * node_size, node_size)


def plain_sum(place: int, nodes: int, node_size: int, *, gridded: bool) -> np.ndarray:
    """Over ranks of a node, then micro-steps, then nodes; halved."""
    world = nodes * node_size
    total = None
    for node in range(nodes):
        kept = None
        for micro in range(MICRO_STEPS):
            partial = None
            for rank in range(node * node_size, (node + 1) * node_size):
                value = values_of(rank, world, micro, gridded=gridded)[place]
                partial = value if partial is None else partial + value
            kept = partial if kept is None else kept + partial
        total = kept if total is None else total + kept
    return (total * 0.5).numpy()


TOPOLOGIES = [(2, 2), (3, 2)]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("case", [case for case in CASES if not case[1]])
def test_sums_over_micro_steps_and_ranks_are_the_plain_ones_bit_for_bit(
    case: tuple, topology: tuple[int, int]
) -> None:
    """With an identity codec for any values, with 8 and 4 bits for values on both grids."""
    world = topology[0] * topology[1]
    for rank, results in enumerate(held(*topology)):
        for place, got in enumerate(results[case][0]):
            if (place + 1) % world != rank:
                assert got is None
                continue
            expected = plain_sum(place, *topology, gridded=case[0] != "fp32")
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("slices", [1, 5])
def test_a_rotation_rests_with_the_sums(slices: int, topology: tuple[int, int]) -> None:
    """As one without a rest, see test_hops.py, with as many more additions."""
    world = topology[0] * topology[1]
    limit = 40 * 2.0**-24 * 6 * world * MICRO_STEPS
    for rank, results in enumerate(held(*topology)):
        for place, got in enumerate(results["fp32", True, slices, True][0]):
            if (place + 1) % world == rank:
                expected = plain_sum(place, *topology, gridded=False)
                np.testing.assert_allclose(got, expected, rtol=0, atol=limit)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_bytes_cross_once(topology: tuple[int, int]) -> None:
    """Inside a node every micro-step brings the same, between nodes they bring one together."""
    nodes, node_size = topology
    world = nodes * node_size
    for rank, results in enumerate(held(*topology)):
        intra = inter = 0
        for place in range(GRADIENTS):
            numel, reducer = NUMELS[place % len(NUMELS)], (place + 1) % world
            if reducer % node_size == rank % node_size:
                intra += MICRO_STEPS * (node_size - 1) * INT8.wire_bytes(numel)
            if reducer == rank:
                inter += (nodes - 1) * INT4.wire_bytes(numel)
        for together in (True, False):
            _, received, calls = results["int8/int4", False, 1, together]
            assert received == {"intra": intra, "inter": inter}
            assert calls == MICRO_STEPS + 1
