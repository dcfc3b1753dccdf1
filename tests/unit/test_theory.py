"""The promises of the wire page's numbers, and the theorems of QSDP and SDP4Bit about them: no
bias, errors that average out over nodes, training that ends where it should. Their bits are those
of tests/kernels/test_numbers.py.

d is the step of a group. Statistics use fixed keys, so a passing test passes always; tolerances
are 4 to 5 standard deviations of the estimator, derived beside each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import theory
import torch

from ds_quant.codec.bound import BoundCodec, Rotation, decode_sum, encode
from ds_quant.codec.codec import GroupCodec
from ds_quant.kernels.batch import OWN_SIGNS, Encode, Offsets, Sum
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

BITS = (2, 3, 4, 5)
# 1 / (1 - D) - 1 with the distortion D of Lloyd and Max: the scale that removes the bias costs
# that much. Groups of 128 that are measured by their own rms do a little better.
NMSE = {2: 0.1331, 3: 0.03578, 4: 0.00959, 5: 0.002511}


def eden(bits: int) -> GroupCodec:
    return GroupCodec(bits=bits, group_size=128, range="gaussian")


def nmse(found: torch.Tensor, x: torch.Tensor) -> float:
    return float((found.double() - x).square().sum() / x.double().square().sum())


def cells(bits: int) -> list[tuple[float, float, float]]:
    """Return the borders of every level, which lie halfway, and the level."""
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
        (
            Encode(codec, numel, 0, 1, node, block, True),
            Offsets(values=node * numel, wire=node * row),
        )
        for node in range(nodes)
    ]
    add = Sum(
        codec, numel, wire_in=1, values=2, stream=0, sources=nodes, stride=row, own_row=None,
        own=2, block=block, flips=OWN_SIGNS,
    )  # fmt: skip
    for tasks in (sends, [(add, Offsets())]):
        Operations(tasks).run([x.reshape(-1), wire, out], streams)
    return out


@pytest.mark.parametrize(
    ("bits", "nodes"), [*((bits, 1) for bits in BITS), (2, 2), (2, 4), (2, 8), (2, 16)]
)
def test_mean_over_signs_is_the_sum(bits: int, nodes: int) -> None:
    """Equal gradients, whose biases add up. The mean of 2000 draws of signs is off by the error
    over their number, with 5 standard deviations of its 128 squares, and by the bias of
    `bias_of_an_element`, doubled for the rest. Equal errors of more nodes exceed it.
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


# ---- QSDP: only quantized weights are kept ----


@pytest.mark.parametrize("grid", (0.1, 0.02))
def test_nearest_rounding_stalls_and_unbiased_rounding_does_not(grid: float) -> None:
    """A step is rounded away where it is shorter than half the grid: nearest rounding ends at
    |x_i| <= grid / (2 rate c_i), f = sum of grid^2 / (8 rate^2 c_i), unless x began below that.
    The shift adds grid^2 / 12 per element and step, which the next steps contract by 1 - rate c_i:
    f = sum of c_i grid^2 / 24 / (1 - (1 - rate c_i)^2) in the mean.
    """
    problem = theory.Quadratic(steps=600)
    c, rate = problem.curvature.double(), problem.rate
    kept = torch.minimum(grid / (2 * rate * c), problem.start().double().abs())
    stalled = float((c * kept.square()).sum() / 2)
    noise = float((c * grid**2 / 24 / (1 - (1 - rate * c).square())).sum())
    ends = {}
    for rounding in theory.ROUNDINGS:
        *_, last = values = list(theory.stall(rounding, grid, problem))
        ends[rounding] = sum(values[-200:]) / 200
        if rounding == "nearest":
            assert last == values[-200], "it moves no more"
    assert ends["nearest"] == pytest.approx(stalled, rel=0.25)
    # All elements share a shift, which about 1 / (rate c) steps remember: the mean over 200 steps
    # has a deviation of about 1.4 / sqrt(200 rate) = 0.7 of it.
    assert ends["random_shift"] < (1 + 4 * 0.7) * noise < stalled / 5
    assert ends["stochastic"] < (1 + 4 * 0.7) * noise


# ---- SDP4Bit: contraction of nearest rounding, and differences ----

INT4_2048 = GroupCodec(bits=4, group_size=2048, range="absmax")


def adversarial(numel: int) -> dict[str, torch.Tensor]:
    """Return groups on which a codec has a hard time."""
    draw = np.random.default_rng(numel)
    spike, edge = torch.zeros(numel), torch.full((numel,), 1 / 14)
    spike[numel // 3] = 50.0
    edge[0] = 1.0  # all others half a step of 4 bits away from zero
    alternating = torch.ones(numel)
    alternating[::2] = -1
    return {
        "spike": spike,
        "equal": torch.full((numel,), 0.3),
        "alternating": alternating,
        "half a step": edge,
        "zero": torch.zeros(numel),
        "huge": torch.from_numpy(draw.normal(size=numel) * 1e30).float(),
        "tiny": torch.from_numpy(draw.normal(size=numel) * 1e-25).float(),
        "heavy": torch.from_numpy(draw.standard_t(2, numel)).float(),
        "gaussian": torch.from_numpy(draw.normal(size=numel)).float(),
    }


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 128, 2048])
def test_nearest_rounding_contracts_on_every_group(bits: int, group_size: int) -> None:
    """|x - C(x)|^2 <= (1 - delta) |x|^2 with delta = max(1 / n, 1 - n / (4 L^2)) for n elements and
    a largest code L: the largest element m is exact, and no error exceeds its value, so at most
    |x|^2 - m^2 <= (1 - 1 / n) |x|^2 is left; each error is half a step m / L at most.
    """
    codec = GroupCodec(bits=bits, group_size=group_size, range="absmax")
    largest = 2 ** (bits - 1) - 1
    delta = max(1 / group_size, 1 - group_size / (4 * largest**2))
    for name, values in adversarial(group_size).items():
        exact = values.double()
        error = (theory.coded(values, codec).double() - exact).square().sum()
        energy = exact.square().sum()
        # fp32: scale, product and sum round by 2^-24 of m each, here 4 at most per element.
        assert error <= (1 - delta) * energy + group_size * (4 * 2.0**-24) ** 2 * energy, name


@pytest.mark.parametrize("group_size", [32, 2048])
def test_ends_are_kept_zero_is_exact_and_signs_do_not_matter(group_size: int) -> None:
    codec = GroupCodec(bits=4, group_size=group_size, range="absmax")
    for values in adversarial(group_size).values():
        got, top = theory.coded(values, codec), values.abs().max()
        assert torch.equal(theory.coded(-values, codec), -got)
        assert (got[values.abs() == top].abs() - top).abs().max() <= 2 * 2.0**-24 * top
        assert got.abs().max() <= top * (1 + 2 * 2.0**-24)
        assert not got[values == 0].any()


def test_a_replica_contracts_to_a_fixed_target() -> None:
    """|e'| <= sqrt(1 - delta) |e| and a bf16 rounding, 2^-9 of each weight."""
    target = torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    replica = torch.zeros(4096, dtype=torch.bfloat16)
    delta = max(1 / 2048, 1 - 2048 / (4 * 49))
    for step in range(12):
        before = float((replica.float() - target).norm())
        theory.follow(replica, target, INT4_2048, step=step)
        after = float((replica.float() - target).norm())
        rounding = 2.0**-9 * float(target.norm() + before)
        assert after <= math.sqrt(1 - delta) * before + rounding
        assert after <= before / 4 + rounding  # Gaussian differences do far better than the bound
    assert after <= 2.0**-8 * float(target.norm())


@pytest.mark.parametrize(("lr", "limit"), [(6e-4, 1.15), (1.2e-4, 1.08), (1e-5, 1.03)])
def test_a_replica_of_a_random_walk_loses_hardly_more_than_bf16(lr: float, limit: float) -> None:
    assert 1.0 <= theory.random_walk(lr, INT4_2048) <= limit


def test_the_error_stays_bounded_over_thousands_of_updates() -> None:
    """e' <= half a step of the largest difference, which is an update and the error before: with
    |update| <= u, |e| <= (u + |e|) / 14 and a bf16 rounding of weights below 1, so |e| <= u / 13
    and 14 / 13 * 2^-8. The walk is pulled back to stay below 1.
    """
    draw = torch.Generator().manual_seed(2)
    master = torch.zeros(64)
    replica, codec = master.bfloat16(), GroupCodec(bits=4, group_size=64, range="absmax")
    u = 0.01
    for step in range(3000):
        master = (0.99 * master).clamp(-0.9, 0.9)
        master += u * (2 * torch.rand(64, generator=draw) - 1)
        change = u + 0.01 * 0.9 + 2.0**-8  # the step, the pull and the rounding of the target
        theory.follow(replica, master, codec, step=step)
        error = float((replica.float() - master).abs().max())
        assert error <= change / 13 + 14 / 13 * 2.0**-8 + 2.0**-9


def test_counterexample_replaced_weights_stick_and_differences_converge() -> None:
    """SDP4Bit, counterexample 4.1. The same codec (2 bits) everywhere."""
    ends = theory.counterexample()
    assert ends["replaced by codes"] == 1.0
    assert ends["not quantized"] < 1e-3 and ends["differences"] < 1e-3


# ---- SDP4Bit: gradients over two levels ----


def sources(draw: Callable[[np.random.Generator], np.ndarray], nodes: int = 4) -> torch.Tensor:
    """Return a gradient of 2^15 elements for every rank of nodes of two."""
    rows = [draw(np.random.default_rng(rank)) for rank in range(2 * nodes)]
    return torch.from_numpy(np.stack(rows)).float()


def student(draw: np.random.Generator) -> np.ndarray:
    return draw.standard_t(3, 1 << 15)


def outliers(draw: np.random.Generator) -> np.ndarray:
    """Half a per cent of the elements are a hundred times larger."""
    values = draw.normal(size=1 << 15)
    values[draw.random(1 << 15) < 0.005] *= 100
    return values


@pytest.mark.parametrize("draw", [student, outliers])
def test_smoothing_helps_where_there_are_outliers(draw: Callable[..., np.ndarray]) -> None:
    """One message of 4 bits: errors of .109 against .027 (t3), and .087 against .014."""
    rows = sources(draw)
    assert theory.two_level_error(rows, block=32) < 0.5 * theory.two_level_error(rows, block=0)


def test_smoothing_changes_nothing_for_gaussian_gradients() -> None:
    """.028 with and without, for 4 bits in groups of 128."""
    rows = sources(lambda draw: draw.normal(size=1 << 15))
    plain = theory.two_level_error(rows, block=0)
    assert theory.two_level_error(rows, block=32) == pytest.approx(plain, rel=0.05)
    assert plain == pytest.approx(0.028, rel=0.05)
