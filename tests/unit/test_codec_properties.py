"""What QSDP needs of its quantizers, whatever the data: bounds, unbiasedness, variances.

d is the step of a group. Statistics use fixed keys, so a passing test passes always; tolerances
are 4 to 5 standard deviations of the estimator, derived beside each.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_quant.codec.bound import decode, decode_sum, encode
from ds_quant.codec.codec import GroupCodec
from ds_quant.kernels import random_bits, reference
from tests.codecs import codecs
from tests.torch_kernels import only_torch

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


# --- training on quantized weights only
