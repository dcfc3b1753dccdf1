"""What the numbers of the wire page promise: no bias, errors that average out over nodes. Their
bits are those of tests/kernels/test_numbers.py.

d is the step of a group. Statistics use fixed keys, so a passing test passes always; tolerances
are 4 to 5 standard deviations of the estimator, derived beside each.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import pytest
import torch

from ds_quant.codec.bound import BoundCodec, Rotation, decode_sum, encode
from ds_quant.codec.codec import GroupCodec
from ds_quant.kernels.batch import OWN_SIGNS, Encode, Sum
from ds_quant.kernels.dispatch import Operations, RngState
from ds_quant.kernels.random_bits import Address, Role, key_of
from tests.unit.wire_oracle import LEVELS


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mean_of(codec: GroupCodec, x: torch.Tensor, where: list[Address | None]) -> torch.Tensor:
    """(numel,) fp64: the mean of what x, (numel,), decodes to under every address."""
    wire = torch.empty(len(where), codec.wire_bytes(len(x)), dtype=torch.uint8)
    for row, each in zip(wire, where, strict=True):
        encode(codec, x[None], row[None], address=each)
    out = torch.empty(len(x))
    decode_sum(codec, wire, out, scale=1 / len(where))
    return out.double()


def of_rank(rank: int = 0, step: int = 0) -> Address:
    return Address(key_of(seed=1, role=Role.GRADIENTS, parameter=3, rank=rank), step)


def step_of(codec: GroupCodec, x: torch.Tensor) -> torch.Tensor:
    """d of each element of whole minmax groups, fp64."""
    groups = x.double().view(-1, codec.group_size)
    d = (groups.amax(1) - groups.amin(1)) / (2**codec.bits - 1)
    return d.repeat_interleave(codec.group_size)


@pytest.mark.parametrize("rounding", ("random_shift", "stochastic"))
@pytest.mark.parametrize("bits", (2, 4, 8))
def test_mean_over_addresses_is_the_input(rounding: str, bits: int) -> None:
    codec, x, count = GroupCodec(bits=bits, group_size=32, rounding=rounding), normal(64), 1000
    mean = mean_of(codec, x, [of_rank(step=step) for step in range(count)])
    # Variance of one error: d^2 / 12 for the shift, at most d^2 / 4 for the coin flip.
    deviation = step_of(codec, x) * (1 / ((12 if rounding == "random_shift" else 4) * count)) ** 0.5
    assert torch.all((mean - x).abs() <= 4 * deviation + 2e-6)


# ---- Gaussian levels with EDEN's scale ----

BITS = (2, 3, 4)
# 1 / (1 - D) - 1 with the distortion D of Lloyd and Max: the scale that removes the bias costs
# that much. Groups of 128 that are measured by their own rms do a little better.
NMSE = {2: 0.1331, 3: 0.03578, 4: 0.00959}


def eden(bits: int) -> GroupCodec:
    return GroupCodec(bits=bits, group_size=128, range="gaussian")


def nmse(found: torch.Tensor, x: torch.Tensor) -> float:
    return float((found.double() - x).square().sum() / x.double().square().sum())


def cells(bits: int) -> list[tuple[float, float, float]]:
    """Of every level its borders, which lie halfway, and itself."""
    levels = LEVELS[bits]
    borders = [0.0, *((a + b) / 2 for a, b in pairwise(levels)), math.inf]
    return [(*pair, level) for pair, level in zip(pairwise(borders), levels, strict=True)]


@pytest.mark.parametrize("bits", BITS)
def test_levels_are_the_means_of_their_cells(bits: int) -> None:
    """Lloyd and Max: every level is the mean of N(0, 1) between its borders."""
    for low, high, level in cells(bits):
        mass = (math.erf(high / 2**0.5) - math.erf(low / 2**0.5)) / 2
        moment = (math.exp(-low * low / 2) - math.exp(-high * high / 2)) / (2 * math.pi) ** 0.5
        assert level == pytest.approx(moment / mass, abs=1e-8)


@pytest.mark.parametrize("bits", BITS)
def test_error_on_a_gaussian_is_that_of_lloyd_and_max(bits: int) -> None:
    x = normal(1 << 19)
    assert 0.95 * NMSE[bits] < nmse(mean_of(eden(bits), x, [None]), x) < 1.002 * NMSE[bits]


def bias_of_an_element(bits: int) -> float:
    """Relative bias of element i over its share p_i of the energy of its group.

    A rotated value is z = s + x with the other elements' s, nearly N(0, 1 - p). With the Hermite
    coefficients c1, c3 of the quantizer, x comes back as c1 + c3 x^2 / 6 - c3 p / 2 of itself, and
    as x^2 = p, that is c1 - c3 p / 3; the scale divides by c1.
    """
    c1 = c3 = 0.0
    for low, high, level in cells(bits):
        a, b = ((math.exp(-z * z / 2), z) for z in (low, min(high, 99.0)))
        c1 += level * (a[0] - b[0])
        c3 += level * ((a[1] ** 2 - 1) * a[0] - (b[1] ** 2 - 1) * b[0])
    return abs(c3 / (3 * c1))


def sum_of(x: torch.Tensor, bits: int, step: int) -> torch.Tensor:
    """The sum of nodes' gradients (nodes, numel), numel of whole groups, each under signs of its
    own.
    """
    codec, (nodes, numel) = eden(bits), x.shape
    key = partial(key_of, seed=0, role=Role.GRADIENTS, parameter=0)
    block, row = codec.group_size, codec.wire_bytes(numel)
    shared = Rotation(block=block, signs=Address(key(hop=99), step))
    streams = RngState(
        [BoundCodec(codec, Address(key(rank=node + 1), step)) for node in range(nodes)],
        [shared.of(node) for node in range(nodes)],
    )
    wire, out = torch.empty(nodes * row, dtype=torch.uint8), torch.empty(numel)
    sends = [
        (Encode(codec, numel, 0, 1, node, block, True), (node * numel, node * row, 0))
        for node in range(nodes)
    ]
    add = Sum(
        codec, numel, wire_in=1, values=2, stream=0, sources=nodes, stride=row, own_row=None,
        own=2, block=block, flips=OWN_SIGNS,
    )  # fmt: skip
    for tasks in (sends, [(add, (0, 0, 0))]):
        Operations(tasks).run([x.reshape(-1), wire, out], streams)
    return out


@pytest.mark.parametrize(
    ("bits", "nodes"), [*((bits, 1) for bits in BITS), (2, 2), (2, 4), (2, 8), (2, 16)]
)
def test_mean_over_signs_is_the_sum(bits: int, nodes: int) -> None:
    """Of equal gradients, whose biases add up: of 2000 draws of signs it is off by the error over
    their number, with 5 standard deviations of its 128 squares, and by the bias of
    `bias_of_an_element`, doubled for what that leaves out. Equal errors of more nodes exceed it.
    """
    count, x = 2000, normal(128, seed=bits)
    total = torch.zeros(128, dtype=torch.float64)
    for step in range(count // nodes):
        total += sum_of(x.expand(nodes, -1), bits, step)
    share = x.double().square() / x.double().square().sum()
    bias = 2 * bias_of_an_element(bits) ** 2 * float(share.pow(3).sum())
    bound = NMSE[bits] / count * (1 + 5 * (2 / 128) ** 0.5) + bias
    assert nmse(total / count, x) < bound
    lloyd_max = 1 - 1 / (1 + NMSE[bits])  # what is lost without EDEN's scale
    assert nmse(total / count * (1 - lloyd_max), x) > bound
