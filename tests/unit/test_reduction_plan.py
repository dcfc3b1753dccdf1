"""A reduction is worked out once; what a step costs the host then depends on neither shards
nor ranks.
"""

from __future__ import annotations

import pytest
import torch

from ds_quant.codec.bound import Coding, Rotation
from ds_quant.codec.codec import CastCodec, Codec, GroupCodec
from ds_quant.comm.reduce import GradientSums, Reduction
from ds_quant.comm.reduction_plan import Form, LinkHop, Segment, Slicing
from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.wire import shard_range
from tests import needs
from tests.unit.links import Echo, calls_of

INT8 = GroupCodec(bits=8, group_size=128, range="absmax", rounding="stochastic")
INT4 = GroupCodec(bits=4, group_size=128, range="absmax", rounding="stochastic")
BF16 = CastCodec(torch.bfloat16)
CASES: dict[str, tuple[tuple[Codec, Codec], int]] = {
    "8 and 4 bits, rotated": ((INT8, INT4), 32),
    "8 bits": ((INT8, INT8), 0),
    "full precision": ((BF16, BF16), 0),
}
NUMELS = (3 * 128 * 128, 128 * 128, 5000)  # the last one ends in a short shard


def cost_of(
    case: str, nodes: int, node_size: int, slices: int = 1, *, held: bool = False
) -> tuple[int, int]:
    """Python calls in the package of one step as a rank in the middle, and its messages. With
    ``held``: of the first micro-step and the last.
    """
    rank, ranks = nodes * node_size // 2 + 1, nodes * node_size
    route = (
        LinkHop(link=Echo(node_size, rank % node_size), exact_own=True),
        LinkHop(
            link=Echo(nodes, rank // node_size),
            divisor=node_size,
            exact_own=True,
            slicing=Slicing(count=slices),
        ),
    )
    codecs, block = CASES[case]
    codings = [
        tuple(Coding(codec, Address(key=tensor, step=1)) for codec in codecs)
        for tensor in range(len(NUMELS))
    ]
    rotations = [Rotation(block=block) if block else None] * len(NUMELS)
    segments = []
    for tensor, numel in enumerate(NUMELS):
        for reducer in range(ranks):
            start, stop = shard_range(numel, ranks, reducer)
            segments.append(Segment(tensor, start, stop - start, tensor, start, reducer))
    whole = Echo(ranks, rank)
    sums = GradientSums(segments, [Form(codecs, block)] * len(NUMELS), route, whole, scale=0.5)
    plan, own = sums.plan, sums.room("cpu")
    tensors = [torch.randn(numel).bfloat16() for numel in NUMELS]

    def step() -> None:
        how = codings, rotations
        if not held:
            Reduction(plan, tensors, *how, own).wait()
            return
        values = torch.empty(plan.held_numel)
        Reduction(plan, tensors, *how, None, held=values, fresh=True).wait()
        Reduction(plan, tensors, *how, own, held=values).wait()

    calls = calls_of(step)
    return calls, sum(len(hop.link.payloads) for hop in route) // 2


@needs.native_kernels
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_calls_of_a_step_do_not_grow_with_the_ranks(case: str, held: bool) -> None:
    few, _ = cost_of(case, 2, 2, held=held)
    for nodes, node_size in ((8, 8), (16, 8)):
        many, messages = cost_of(case, nodes, node_size, held=held)
        assert messages == 2 + held
        assert many <= 1.5 * few, f"{few} calls at 2 x 2, {many} at {nodes} x {node_size}"


@needs.native_kernels
def test_a_slice_costs_as_much_as_a_reduction_whatever_it_holds() -> None:
    case = "8 and 4 bits, rotated"
    whole, _ = cost_of(case, 4, 4)
    sliced, messages = cost_of(case, 4, 4, slices=8)
    assert messages == 2 * 8
    assert sliced <= 8 * whole
