"""What the numbers of the wire page promise: no bias, errors that average out over ranks and nodes,
contraction. Their bits are those of tests/kernels/test_numbers.py.

d is the step of a group. Statistics use fixed keys, so a passing test passes always; tolerances
are 4 to 5 standard deviations of the estimator, derived beside each.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import pytest
import torch

from ds_quant.codec.bound import Coding, Rotation, decode_sum, encode
from ds_quant.codec.codec import GroupCodec
from ds_quant.kernels.batch import OWN_SIGNS, Encode, Sum
from ds_quant.kernels.dispatch import Operations, Streams
from ds_quant.kernels.random_bits import Address, Role, key_of
from tests.unit.wire_oracle import LEVELS

COIN = GroupCodec(bits=4, group_size=32, rounding="stochastic")


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


def test_averaging_ranks_divides_the_variance_by_their_number() -> None:
    x = normal(1 << 15, seed=15)
    one, eight, same = (
        (mean_of(COIN, x, list(map(of_rank, ranks))) - x) / step_of(COIN, x)
        for ranks in ([0], range(8), [0] * 8)
    )
    # Variance of a sample variance over M elements <= 2 v^2 / M for these light-tailed errors;
    # two of them: relative deviation 2 / sqrt(M) = 1.1 %.
    assert float(eight.var() / one.var()) == pytest.approx(1 / 8, rel=0.055)
    assert float(same.var() / one.var()) == pytest.approx(1.0, rel=1e-3), "equal addresses"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 128, 2048])
def test_nearest_rounding_contracts_on_every_group(bits: int, group_size: int) -> None:
    """||x - C(x)||^2 <= (1 - delta) ||x||^2 with delta = max(1/n, 1 - n / (4 L^2)) for n elements
    and L the largest code: the largest element m is exact, leaving at most
    ||x||^2 - m^2 <= (1 - 1/n) ||x||^2 since an error never exceeds its value; and each error is at
    most m / (2 L), so their sum n m^2 / (4 L^2).
    """
    codec = GroupCodec(bits=bits, group_size=group_size, range="absmax")
    delta = max(1 / group_size, 1 - group_size / (4 * (2 ** (bits - 1) - 1) ** 2))
    half_steps = torch.full((group_size,), 1 / 14).index_fill(0, torch.tensor(0), 1.0)
    for x in (normal(group_size), normal(group_size) ** 7, half_steps, torch.ones(group_size)):
        error, energy = (mean_of(codec, x, [None]) - x).square().sum(), x.double().square().sum()
        # fp32: scale, product and sum round by 2^-24 of m each, here 4 at most per element.
        assert error <= (1 - delta) * energy + group_size * (4 * 2.0**-24) ** 2 * energy


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


def sum_of(x: torch.Tensor, bits: int, step: int = 0, *, own_signs: bool = True) -> torch.Tensor:
    """The sum of nodes' gradients (nodes, numel), numel of whole groups, as its receivers add it
    up: under signs of each node's own, or of all.
    """
    codec, (nodes, numel) = eden(bits), x.shape
    key = partial(key_of, seed=0, role=Role.GRADIENTS, parameter=0)
    block, row = codec.group_size, codec.wire_bytes(numel)
    shared = Rotation(block=block, signs=Address(key(hop=99), step))
    streams = Streams(
        [Coding(codec, Address(key(rank=node + 1), step)) for node in range(nodes)],
        [shared.of(node) if own_signs else shared for node in range(nodes)],
    )
    wire, out = torch.empty(nodes * row, dtype=torch.uint8), torch.empty(numel)
    sends = [
        (Encode(codec, numel, 0, 1, node, block, True), (node * numel, node * row, 0))
        for node in range(nodes)
    ]
    add = Sum(
        codec, numel, wire_in=1, values=2, stream=0, sources=nodes, stride=row, place=None,
        own=2, block=block, flips=OWN_SIGNS if own_signs else 1,
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


@pytest.mark.parametrize("nodes", (2, 4, 8, 16))
@pytest.mark.parametrize("bits", (2, 3))
def test_errors_of_nodes_average_out(bits: int, nodes: int) -> None:
    """Of messages whose errors are independent, |x| = 1 and cosines c: the error of the sum is that
    of one over 1 + (nodes - 1) c. With shared signs more remains of it.
    """
    c, numel = 0.7, 1 << 15
    x = c**0.5 * normal(numel) + (1 - c) ** 0.5 * normal(nodes, numel, seed=1)
    own, shared = (nmse(sum_of(x, bits, own_signs=each), x.sum(0)) for each in (True, False))
    assert own == pytest.approx(NMSE[bits] / (1 + (nodes - 1) * c), rel=0.05)
    assert shared > (1 + nodes / 80) * own
