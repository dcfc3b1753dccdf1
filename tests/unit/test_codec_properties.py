"""What QSDP needs of its quantizers, whatever the data: bounds, unbiasedness, variances.

d is the step of a group. Statistics use fixed keys, so a passing test passes always; tolerances
are 4 to 5 standard deviations of the estimator, derived beside each.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_quant.codec.bound import decode, decode_sum, encode
from ds_quant.codec.codec import GroupCodec
from ds_quant.kernels import random_bits, reference
from tests.codecs import codecs
from tests.torch_kernels import only_torch

SHIFT = GroupCodec(bits=4, group_size=32, rounding="random_shift")
COIN = GroupCodec(bits=4, group_size=32, rounding="stochastic")
NEAREST = GroupCodec(bits=4, group_size=32)


def address(step: int = 0, *, rank: int = 0) -> random_bits.Address:
    return random_bits.address(
        seed=1, role=random_bits.Role.GRADIENTS, step=step, parameter=3, rank=rank
    )


def round_trip(codec, x, where: random_bits.Address) -> torch.Tensor:
    """Decoded (rows, numel) fp32 of x."""
    wire = torch.empty(x.shape[0], codec.wire_bytes(x.shape[1]), dtype=torch.uint8)
    encode(codec, x, wire, address=where)
    out = torch.empty(x.shape)
    decode(codec, wire, out)
    return out


def step_of(codec, x) -> torch.Tensor:
    """d of each element, in float64, for x (rows, whole groups)."""
    groups = x.double().view(x.shape[0], -1, codec.group_size)
    if codec.range == "minmax":
        d = (groups.amax(2) - groups.amin(2)) / (2**codec.bits - 1)
    else:
        d = groups.abs().amax(2) / (2 ** (codec.bits - 1) - 1)
    return d.repeat_interleave(codec.group_size, dim=1)


def draws(codec, x, count: int) -> torch.Tensor:
    """(count, rows, numel): the same x under `count` addresses."""
    return torch.stack([round_trip(codec, x, address(step)) for step in range(count)])


# --- every single value


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    codec=st.sampled_from(codecs(levels="uniform")),
    groups=st.integers(1, 5),
    exponent=st.integers(-85, 110),
    center=st.sampled_from((0.0, 3.0, -1000.0)),
    power=st.sampled_from((1, 5)),
    seed=st.integers(0, 1 << 40),
)
def test_error_is_at_most_half_a_step_or_less_than_one(
    codec, groups, exponent, center, power, seed
):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(2, groups * 32, generator=generator) ** power + center) * 2.0**exponent
    out = round_trip(codec, x, address(seed)).double()
    d = step_of(codec, x)
    # Roundings of scale, offset, product and decode: each at most 2^-24 of |x| or of the span,
    # 6 of them; stochastic rounding sees u in units of 2^-15, so "less than one" loses nothing.
    slack = (x.abs().amax() + d.amax() * 2**codec.bits).double() * 6 * 2.0**-24
    bound = d if codec.rounding == "stochastic" else d / 2
    assert torch.all((out - x).abs() <= bound + slack)


@pytest.mark.parametrize("codec", codecs(rounding="stochastic"), ids=lambda codec: codec.name)
def test_stochastic_rounding_goes_up_for_exactly_the_fraction_of_all_random_values(
    codec, monkeypatch
):
    """All 65536 random values, through encode: an extreme at elements 0 and 1 makes d = 1."""

    def every_value(address, first, vectors, device):
        return (torch.arange(8 * vectors, dtype=torch.int32) % 65536).view(-1, 8)

    monkeypatch.setattr(reference, "random_bits", every_value)
    codec = replace(codec, group_size=65536)
    unit = 2**15 if codec.bits == 8 else 2**16  # fractions are multiples of 1 / unit
    top = 2 ** (codec.bits - 1) - 1 if codec.range == "absmax" else 2**codec.bits - 1
    low = -top if codec.range == "absmax" else 0
    fractions = (0, 1, 12345, unit // 2, unit - 1)
    floors = sorted({low, -1 if low else 1, top - 1})
    x = torch.tensor([[k + f / unit] for k in floors for f in fractions]).expand(-1, 65536).clone()
    x[:, 0], x[:, 1] = low, top
    with only_torch():  # whose random bits can be replaced
        out = round_trip(codec, x, address())[:, 2:]
    for row, (k, f) in zip(out, ((k, f) for k in floors for f in fractions), strict=True):
        ups = int((row == k + 1).sum())
        assert int((row == k).sum()) + ups == 65534
        # r goes up when frac + r >= 1; r = 0 and r = 1 fell on the extremes, and would round
        # up only for a fraction of (unit - 1) / unit at 16 bits, through r = 1.
        assert ups == min(f * (65536 // unit), 65534)


# --- statistics


@pytest.mark.parametrize("rounding", ("random_shift", "stochastic"))
@pytest.mark.parametrize("bits", (2, 4, 8))
def test_mean_over_addresses_is_the_input(rounding, bits):
    codec = GroupCodec(bits=bits, group_size=32, rounding=rounding)
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(bits))
    count = 1000
    mean = draws(codec, x, count).double().mean(0)
    # Variance of one error: d^2 / 12 for the shift, at most d^2 / 4 for the coin flip.
    deviation = step_of(codec, x) * (1 / ((12 if rounding == "random_shift" else 4) * count)) ** 0.5
    assert torch.all((mean - x).abs() <= 4 * deviation + 1e-6)


def test_nearest_is_biased_where_the_others_are_not():
    """Negative control of the test above: some element stays more than d / 4 off."""
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(4))
    assert torch.any((round_trip(NEAREST, x, address()) - x).abs() > step_of(NEAREST, x) / 4)


def kolmogorov_smirnov(samples: np.ndarray) -> float:
    """sqrt(N) * sup |F_N - F| against the uniform distribution on (-1/2, 1/2)."""
    ordered = np.sort(samples) + 0.5
    grid = np.arange(len(ordered) + 1) / len(ordered)
    return np.sqrt(len(ordered)) * max((grid[1:] - ordered).max(), (ordered - grid[:-1]).max())


def chi_square(rows: np.ndarray, columns: np.ndarray, bins: int = 8) -> float:
    """Statistic of independence of two samples, rows in [0, 1), columns in [-1/2, 1/2]."""
    table = np.histogram2d(rows, columns + 0.5, bins=bins, range=[[0, 1], [0, 1]])[0]
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    return float(((table - expected) ** 2 / np.maximum(expected, 1e-9)).sum())


def errors_and_fractions(codec, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Error / d and fractional part of one element per address, fresh data each time.

    One element only: elements of a call share the shift, so they are no independent samples.
    """
    x = torch.randn(count, 32, generator=torch.Generator().manual_seed(9))
    out = torch.cat([round_trip(codec, x[i : i + 1], address(i)) for i in range(count)])
    d = step_of(codec, x)[:, 0].numpy()
    low = x.amin(1).numpy()
    x, out = x.numpy().astype(np.float64), out.numpy()
    # Element 5 unless it is an extreme, whose fraction is 0 by construction.
    chosen = np.array(
        [
            next(i for i in (5, 6, 7) if row[i] not in extremes)
            for row, extremes in zip(x, zip(x.min(1), x.max(1), strict=True), strict=True)
        ]
    )
    index = np.arange(count)
    value = x[index, chosen]
    return (out[index, chosen] - value) / d, (value - low) / d % 1.0


def test_shift_error_is_uniform_and_independent_of_the_fraction():
    errors, fractions = errors_and_fractions(SHIFT, 3000)
    # 0.1 % quantiles: Kolmogorov distribution 1.95; chi-square with 7 * 7 degrees 85.4.
    assert kolmogorov_smirnov(errors) < 1.95
    assert chi_square(fractions, errors) < 85.4


@pytest.mark.parametrize("codec", (NEAREST, COIN), ids=lambda codec: codec.name)
def test_other_errors_depend_on_the_fraction(codec):
    """Negative control: the statistic sees the dependence of nearest and of the coin flip."""
    errors, fractions = errors_and_fractions(codec, 1000)
    assert chi_square(fractions, errors.clip(-0.5, 0.5)) > 500


def test_shift_error_of_one_fixed_value_is_uniform():
    x = torch.randn(1, 32, generator=torch.Generator().manual_seed(10))
    errors = (draws(SHIFT, x, 1500)[:, 0, 4] - x[0, 4]) / step_of(SHIFT, x)[0, 4]
    assert kolmogorov_smirnov(errors.numpy()) < 1.95


@pytest.mark.parametrize("bits", (5, 8))
@pytest.mark.parametrize(
    "rounding, expected", (("nearest", 1 / 12), ("random_shift", 1 / 12), ("stochastic", 1 / 6))
)
def test_mean_squared_error_is_a_twelfth_or_a_sixth_of_the_squared_step(rounding, expected, bits):
    """Gaussian data on at least 32 levels: fractions are uniform up to far below the tolerance.

    The squared error / d^2 of one element has variance 1/80 - 1/144 = 1/180 (uniform error), or
    less than E e^4 < E e^2 = 1/6 (coin flip). Given the shift, elements are independent.
    """
    codec = GroupCodec(bits=bits, group_size=1024, rounding=rounding)
    x = torch.randn(200, 1024, generator=torch.Generator().manual_seed(11))
    errors = (round_trip(codec, x, address()) - x).double() / step_of(codec, x)
    deviation = ((1 / 180 if expected == 1 / 12 else 1 / 6) / errors.numel()) ** 0.5
    assert abs(float(errors.square().mean()) - expected) < 5 * deviation


def test_coin_flip_error_is_u_times_one_minus_u():
    """E (Q - v)^2 = d^2 u (1 - u), element by element."""
    rows = 4000
    x = torch.randn(1, 32, generator=torch.Generator().manual_seed(12))
    out = round_trip(COIN, x.expand(rows, 32), address())
    d = step_of(COIN, x)
    u = (x.double() - x.amin()) / d % 1.0
    measured = ((out - x).double() / d).square().mean(0)
    # One squared error is (1-u)^2 with probability u, else u^2: variance u (1-u) (1-2u)^2 <= 1/16.
    assert torch.all((measured - u * (1 - u)).abs() < 5 * (1 / 16 / rows) ** 0.5)


@pytest.mark.parametrize("bits", (2, 4, 8))
def test_error_stays_below_kappa_and_the_bound_is_tight(bits):
    """E|Q - g|^2 <= (B/4) d^2 <= kappa |g|^2, kappa = B / (2 (2^b - 1)^2); qsdp.md 2.2 item 6.

    Worst case: +a, -a and zeros. 2^b - 1 is odd, so zero lies halfway between two levels and
    every zero errs by exactly d/2: the ratio is (B - 2) / B of the bound, with no variance.
    """
    size = 1024
    codec = GroupCodec(bits=bits, group_size=size, rounding="stochastic")
    kappa = size / (2 * (2**bits - 1) ** 2)
    worst = torch.zeros(4, size)
    worst[:, 100], worst[:, 900] = 3.0, -3.0
    heavy = torch.randn(64, size, generator=torch.Generator().manual_seed(13)) ** 5
    for x, low, high in ((worst, 0.995, 1.0), (heavy, 0.0, 1.0)):
        squared = (round_trip(codec, x, address()) - x).double().square().sum(1)
        ratio = squared / (kappa * x.double().square().sum(1))
        # 1e-5: fp32 roundings of a value next to its error of at least a / 255.
        assert low <= float(ratio.mean()) <= high + 1e-5


def test_symmetric_coin_flip_obeys_the_l1_lemma():
    """On a grid anchored at zero: E|Q - v|^2 <= d |v|_1 and E|Q|_0 <= |v|_1 / d (item 5)."""
    codec = GroupCodec(bits=4, group_size=1024, range="absmax", rounding="stochastic")
    rows = 200
    x = torch.randn(1, 1024, generator=torch.Generator().manual_seed(14)) ** 3
    out = round_trip(codec, x.expand(rows, -1), address()).double()
    d, norm = step_of(codec, x)[0, 0], x.double().abs().sum()
    nonzero = (out != 0).double().sum(1)
    # 1024 independent coins: deviations of the row mean <= d^2 sqrt(1024) / 4 and sqrt(1024) / 2.
    assert float((out - x).square().sum(1).mean()) <= d * norm + 5 * d**2 * 8 / rows**0.5
    assert float(nonzero.mean()) <= norm / d + 5 * 16 / rows**0.5


def mean_over_ranks(ranks: list[int]) -> torch.Tensor:
    """Mean of the decoded gradients of ranks that hold equal gradients, minus the gradient."""
    x = torch.randn(1, 1 << 15, generator=torch.Generator().manual_seed(15))
    wire = torch.empty(len(ranks), COIN.wire_bytes(x.shape[1]), dtype=torch.uint8)
    for row, rank in enumerate(ranks):
        encode(COIN, x, wire[row : row + 1], address=address(rank=rank))
    out = torch.empty(x.shape[1])
    decode_sum(COIN, wire, out, scale=1 / len(ranks))
    return ((out - x) / step_of(COIN, x)).double()


def test_averaging_ranks_divides_the_variance_by_their_number():
    one, eight = mean_over_ranks([0]), mean_over_ranks(list(range(8)))
    # Variance of a sample variance over M elements <= 2 v^2 / M for these light-tailed errors;
    # two of them: relative deviation 2 / sqrt(M) = 1.1 %.
    assert float(eight.var() / one.var()) == pytest.approx(1 / 8, rel=0.055)


def test_equal_addresses_on_all_ranks_would_average_nothing():
    """Negative control: a seed shared by the ranks leaves the variance of one rank."""
    one, same = mean_over_ranks([0]), mean_over_ranks([0] * 8)
    assert float(same.var() / one.var()) == pytest.approx(1.0, rel=1e-3)


def test_bits_depend_on_the_address_and_not_on_the_message():
    """Row r of a message is the row that travels alone with first_vector moved by r rows."""
    x = torch.randn(5, 100, generator=torch.Generator().manual_seed(16))
    together = round_trip(COIN, x, address())
    base = address()
    for row in range(5):
        alone = random_bits.Address(key=base.key, step=base.step, first_vector=row * 13)
        assert torch.equal(round_trip(COIN, x[row : row + 1], alone)[0], together[row])
    same = round_trip(COIN, x[:1].expand(2, -1), address())
    assert not torch.equal(same[0], same[1])
    assert not torch.equal(round_trip(COIN, x, address(rank=1)), together)
    assert not torch.equal(round_trip(COIN, x, address(step=1)), together)


# --- training on quantized weights only


def descend(rounding: str, d: float, steps: int) -> list[float]:
    """f along x <- Q(x - lr grad f), f = 1/2 sum lambda (x - c)^2 in 50 dimensions.

    Two anchors next to the weights fix the range, and with it the step d. qsdp.md 2.3.
    """
    codec = GroupCodec(bits=8, group_size=64, rounding=rounding)
    generator = torch.Generator().manual_seed(17)
    eigenvalues = torch.linspace(1, 4, 50)
    center = torch.randn(50, generator=generator)
    half = 255 * d / 2
    group = torch.zeros(1, 52)
    group[0, :50] = torch.round(torch.randn(50, generator=generator) / d + 0.5) * d - d / 2
    losses = []
    for step in range(steps):
        group[0, 50], group[0, 51] = -half, half
        x = group[0, :50]
        losses.append(float((eigenvalues * (x - center).square()).sum() / 2))
        x -= 0.02 * eigenvalues * (x - center)
        group = round_trip(codec, group, address(step))
    return losses


def test_nearest_rounding_stalls_where_unbiased_rounding_converges():
    """With lr |grad| < d/2 nearest returns to where it was; the others reach their noise floor.

    Floor of the shift: noise d^2/12 per step and coordinate, contraction 1 - lr lambda, hence
    f = 1/2 sum lambda (d^2/12) / (1 - (1 - lr lambda)^2) ~ 50 d^2 / (48 lr) to first order.
    The coin flip errs by u (1-u) d^2 <= d lr |grad|, which is less near the minimum.
    """
    d = 0.5
    nearest = descend("nearest", d, 50)
    # lr |grad| <= 0.02 * 4 * |x - c| < 0.25 for |x - c| < 3.1, the largest coordinate here.
    assert nearest[-1] == nearest[0]
    floor = 50 * d**2 / (48 * 0.02)
    shift, coin = (np.mean(descend(r, d, 800)[400:]) for r in ("random_shift", "stochastic"))
    # Shared shifts correlate the coordinates, so the mean over 400 steps (about 20 correlation
    # times at lambda = 2.5) still varies by tens of per cent: a factor of 2 is allowed.
    assert floor / 2 < shift < 2 * floor < nearest[-1]
    assert coin < shift
