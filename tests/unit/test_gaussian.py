"""Gaussian levels with EDEN's scale: levels, bytes against the oracle, errors, no bias."""

from __future__ import annotations

import hashlib
import math
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from ds_quant.codec.bound import Rotation, decode, decode_sum, encode
from ds_quant.codec.codec import GroupCodec
from ds_quant.kernels import reference
from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.wire import round_up
from tests import needs
from tests.torch_kernels import only_torch
from tests.unit import wire_oracle as oracle

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gradient_errors  # noqa: E402

BITS = (2, 3, 4)
CODECS = {bits: GroupCodec(bits=bits, group_size=128, range="gaussian") for bits in BITS}
# 1 / (1 - D) - 1 with the distortion D of Lloyd and Max: the scale that removes the bias costs
# that much. Groups of 128 that are measured by their own rms do a little better.
NMSE = {2: 0.1331, 3: 0.03578, 4: 0.00959}


@pytest.fixture(params=["torch", pytest.param("auto", marks=needs.native_kernels)], autouse=True)
def backend(request):
    """The reference, and what works on CPU tensors where it is built."""
    with only_torch() if request.param == "torch" else nullcontext():
        yield request.param


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def encoded(codec: GroupCodec, x: torch.Tensor, rotation: Rotation | None = None) -> torch.Tensor:
    """(rows, bytes); what is not written stays 85."""
    numel = round_up(x.shape[1], rotation.block) if rotation else x.shape[1]
    wire = torch.full((x.shape[0], codec.wire_bytes(numel)), 85, dtype=torch.uint8)
    encode(codec, x, wire, rotation=rotation)
    return wire


def round_trip(codec: GroupCodec, x: torch.Tensor, rotation: Rotation | None = None):
    """(numel,) fp32 of one row."""
    out = torch.empty(x.numel())
    decode_sum(codec, encoded(codec, x.view(1, -1), rotation), out, rotation=rotation)
    return out


def nmse(found: torch.Tensor, x: torch.Tensor) -> float:
    return float((found.double() - x).square().sum() / x.double().square().sum())


# ---- levels ----


@pytest.mark.parametrize("bits", BITS)
def test_levels_are_the_means_of_their_cells(bits: int) -> None:
    """Lloyd and Max: borders halfway, every level the mean of N(0, 1) between its borders."""
    levels = [float(t) for t in oracle.LEVELS[bits]]
    table = reference.gaussian_table(bits, torch.device("cpu"))
    assert table.tolist() == [*(-np.float32(t) for t in levels), *map(np.float32, levels)]
    borders = [0.0, *((a + b) / 2 for a, b in pairwise(levels)), math.inf]
    for (low, high), level in zip(pairwise(borders), levels, strict=True):
        mass = (math.erf(high / 2**0.5) - math.erf(low / 2**0.5)) / 2
        moment = (math.exp(-low * low / 2) - math.exp(-high * high / 2)) / (2 * math.pi) ** 0.5
        assert level == pytest.approx(moment / mass, abs=1e-8)


# ---- bytes ----


def awkward() -> torch.Tensor:
    """(groups, 128): exceptional groups and their neighbours."""
    unit = normal(128, seed=1)
    unit /= unit.abs().max()
    spike = torch.zeros(128)
    spike[77] = -3.0
    planted = [unit.index_fill(0, torch.tensor(5), v) for v in (math.inf, -math.inf, math.nan)]
    scales = (1.0, 2.0**-99, 2.0**-99.5, 2.0**-126, 2.0**126, 2.0**127, 1.9 * 2.0**126, 1e-43)
    groups = [unit * scale for scale in scales]
    groups += [torch.zeros(128), -torch.zeros(128), torch.full((128,), 2.5), spike, *planted]
    groups += [unit * torch.logspace(-38, 0, 128), unit**9, torch.linspace(-1, 1, 128)]
    groups += [torch.full((128,), v) for v in (math.inf, math.nan, torch.finfo(torch.float).max)]
    return torch.stack(groups)


def assert_equals_oracle(bits: int, x: torch.Tensor) -> None:
    codec, fmt = CODECS[bits], oracle.Format(bits=bits, group=128, gaussian=True)
    for row, wire in zip(x, encoded(codec, x), strict=True):
        assert wire.numpy().tobytes() == oracle.encode(row.float().numpy(), fmt)
        found, wanted = (
            torch.empty(1, row.numel()),
            oracle.decode(wire.numpy().tobytes(), fmt, row.numel()),
        )
        decode(codec, wire.view(1, -1), found)
        assert np.array_equal(found.numpy()[0], wanted, equal_nan=True)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("bits", BITS)
def test_bytes_equal_the_oracle(bits: int, dtype: torch.dtype) -> None:
    assert_equals_oracle(bits, (normal(2, 5 * 128) ** 3).to(dtype))
    assert_equals_oracle(bits, awkward().view(1, -1).to(dtype))
    assert_equals_oracle(bits, torch.empty(2, 0, dtype=dtype))


@pytest.mark.parametrize("bits", BITS)
def test_every_bf16_number_equals_the_oracle(bits: int) -> None:
    """All 65536, as neighbours of equal magnitude and beside a large one."""
    every = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16).view(-1, 128).float()
    assert_equals_oracle(bits, every.view(1, -1))
    mixed = every.t().contiguous().view(-1, 128)
    mixed[:, 0] = normal(512) * 2.0**60
    assert_equals_oracle(bits, mixed.view(1, -1))


@pytest.mark.parametrize("bits", BITS)
def test_borders_belong_to_the_lower_level(bits: int) -> None:
    """Values one unit in the last place around every border, among values that fix the rms."""
    levels = [np.float32(t) for t in oracle.LEVELS[bits]]
    near = [np.nextafter(np.float32((a + b) / 2), np.float32(to), dtype=np.float32)
            for a, b in pairwise(levels) for to in (0.0, 9.0)]  # fmt: skip
    x = torch.ones(64, 128)
    x[:, : len(near)] = torch.tensor(near)
    x[:, 64:] += torch.linspace(-1e-3, 1e-3, 64)[:, None]
    assert_equals_oracle(bits, x.view(1, -1))


DIGESTS = {
    2: "031879d46c6257ce",
    3: "885c2026fcd0a352",
    4: "c71d219229ad4804",
}


@pytest.mark.parametrize("bits", BITS)
def test_messages_stay_what_they_are(bits: int) -> None:
    """Numbers that need no generator, with an exceptional group."""
    x = torch.tensor([i * i * 2654435761 % 2**32 * 2.0**-32 - 0.5 for i in range(1000)])
    x[300] = math.inf
    wire = encoded(CODECS[bits], x.view(1, -1), Rotation(block=128, signs=Address(7, 3)))
    assert hashlib.sha256(wire.numpy().tobytes()).hexdigest()[:16] == DIGESTS[bits]


# ---- errors ----


@pytest.mark.parametrize("bits", BITS)
def test_error_on_a_gaussian_is_that_of_lloyd_and_max(bits: int) -> None:
    x = normal(1 << 19)
    found = round_trip(CODECS[bits], x)
    assert 0.95 * NMSE[bits] < nmse(found, x) < 1.002 * NMSE[bits]
    assert CODECS[bits].wire_bytes(x.numel()) * 8 / x.numel() == bits + 0.125


@pytest.mark.parametrize("bits", BITS)
def test_decoded_groups_have_the_part_of_their_input_in_full(bits: int) -> None:
    """<decoded, x> = <x, x>: whatever the signs, nothing of x is lost but rounding of the scale."""
    x = normal(300, 128, seed=3) ** 3
    found = round_trip(CODECS[bits], x.view(-1)).view(300, 128).double()
    ratio = (found * x).sum(1) / x.double().square().sum(1)
    assert (ratio - 1).abs().max() < 2.0**-8 + 1e-6


def bias_of_an_element(bits: int) -> float:
    """Relative bias of element i over its share p_i of the energy of its group.

    A rotated value is z = s + x with the other elements' s, nearly N(0, 1 - p). With the Hermite
    coefficients c1, c3 of the quantizer, x comes back as c1 + c3 x^2 / 6 - c3 p / 2 of itself, and
    as x^2 = p, that is c1 - c3 p / 3; the scale divides by c1.
    """
    levels = oracle.LEVELS[bits]
    borders = [0.0, *((a + b) / 2 for a, b in pairwise(levels)), math.inf]
    c1 = c3 = 0.0
    for (low, high), level in zip(pairwise(borders), levels, strict=True):
        a, b = ((math.exp(-z * z / 2), z) for z in (low, min(high, 99.0)))
        c1 += level * (a[0] - b[0])
        c3 += level * ((a[1] ** 2 - 1) * a[0] - (b[1] ** 2 - 1) * b[0])
    return abs(c3 / (3 * c1))


@pytest.mark.parametrize("bits", BITS)
def test_mean_over_signs_is_the_input(bits: int, backend: str) -> None:
    """10^4 draws of signs. Their mean is off by the error over their number, with 5 standard
    deviations of its 128 squares, and by the bias of `bias_of_an_element`, doubled for what that
    leaves out.
    """
    count, x = 10_000 if backend == "auto" else 1000, normal(128, seed=bits)
    total = torch.zeros(128, dtype=torch.float64)
    for step in range(count):
        total += round_trip(CODECS[bits], x, Rotation(block=128, signs=Address(1, step)))
    share = x.double().square() / x.double().square().sum()
    bias = 2 * bias_of_an_element(bits) ** 2 * float(share.pow(3).sum())
    bound = NMSE[bits] / count * (1 + 5 * (2 / 128) ** 0.5) + bias
    assert nmse((total / count).float(), x) < bound
    lloyd_max = 1 - 1 / (1 + NMSE[bits])  # what is lost without EDEN's scale
    assert nmse((total / count * (1 - lloyd_max)).float(), x) > bound


# ---- signs of every node's own ----


def sum_of(x: torch.Tensor, bits: int, step: int = 0, *, own_signs: bool = True) -> torch.Tensor:
    """The sum of nodes' gradients (nodes, numel)."""
    how = {"step": step, "parameter": 0, "own_signs": own_signs}
    return gradient_errors.sum_of(x, gradient_errors.SCHEMES[f"eden{bits}"], **how)


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


@pytest.mark.parametrize("nodes", (2, 4, 8, 16))
def test_mean_of_sums_over_signs_is_the_sum(nodes: int, backend: str) -> None:
    """Of equal gradients, whose biases add up. Bound as of ``test_mean_over_signs_is_the_input``,
    with as many independent errors as messages: equal ones of more than two nodes exceed it.
    """
    count, x = (2048 if backend == "auto" else 256) // nodes, normal(128, seed=nodes)
    total = torch.zeros(128, dtype=torch.float64)
    for step in range(count):
        total += sum_of(x.expand(nodes, -1), 2, step)
    share = x.double().square() / x.double().square().sum()
    bias = 2 * bias_of_an_element(2) ** 2 * float(share.pow(3).sum())
    bound = NMSE[2] / (count * nodes) * (1 + 5 * (2 / 128) ** 0.5) + bias
    assert nmse((total / (count * nodes)).float(), x) < bound


# ---- what cannot be ----


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"bits": 5}, "bits = 5 with range = 'gaussian': allowed are 2, 3, 4"),
        ({"group_size": 256}, "group_size = 256 with range = 'gaussian': allowed are 128"),
        ({"rounding": "stochastic"}, "rounding = 'stochastic' with range = 'gaussian'"),
        ({"levels": "learned"}, "levels = 'learned' with range = 'gaussian'"),
    ],
)
def test_settings_that_cannot_be_are_refused(fields: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GroupCodec(**{"bits": 4, "group_size": 128, "range": "gaussian"} | fields)


def test_groups_that_are_not_whole_are_refused() -> None:
    codec = CODECS[4]
    wire = torch.zeros(1, codec.wire_bytes(130), dtype=torch.uint8)
    for call in (
        lambda: encode(codec, torch.ones(1, 130), wire),
        lambda: decode(codec, wire, torch.ones(1, 130)),
        lambda: decode_sum(codec, wire, torch.ones(130)),
    ):
        with pytest.raises(ValueError, match="numel = 130 .* multiples of 128, or a rotation"):
            call()
