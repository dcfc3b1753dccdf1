"""SDP4Bit's theory as tests: contraction of nearest rounding and error feedback.

Unbiasedness and the independence of streams are in test_codec_properties.py. Here d is a group's
size, L its largest code, m its largest magnitude and s = m / L its step.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ds_quant.codec.bound import decode, encode
from ds_quant.codec.codec import GroupCodec
from ds_quant.kernels.random_bits import Role, address

INT4_2048 = GroupCodec(bits=4, group_size=2048, range="absmax")


def coded(values: torch.Tensor, codec: GroupCodec, *, step: int = 0, rank: int = 0) -> torch.Tensor:
    """Decoded values, (numel,) fp32."""
    where = address(seed=1, role=Role.GRADIENTS, step=step, parameter=0, rank=rank + 1)
    wire = torch.empty(1, codec.wire_bytes(values.numel()), dtype=torch.uint8)
    out = torch.empty(1, values.numel())
    encode(codec, values.view(1, -1), wire, address=where)
    decode(codec, wire, out)
    return out[0]


def adversarial(numel: int) -> dict[str, torch.Tensor]:
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
    """||x - C(x)||^2 <= (1 - delta) ||x||^2 with delta = max(1/d, 1 - d / (4 L^2)): the largest
    element is exact, leaving at most ||x||^2 - m^2 <= (1 - 1/d) ||x||^2 since an error never
    exceeds its value; and each error is at most s / 2, so their sum d m^2 / (4 L^2).
    """
    codec = GroupCodec(bits=bits, group_size=group_size, range="absmax")
    largest = 2 ** (bits - 1) - 1
    delta = max(1 / group_size, 1 - group_size / (4 * largest**2))
    for name, values in adversarial(group_size).items():
        exact = values.double()
        error = (coded(values, codec).double() - exact).square().sum()
        energy = exact.square().sum()
        # fp32: scale, product and sum round by 2^-24 of m each, here 4 at most per element.
        assert error <= (1 - delta) * energy + group_size * (4 * 2.0**-24) ** 2 * energy, name


@pytest.mark.parametrize("group_size", [32, 2048])
def test_ends_are_kept_zero_is_exact_and_signs_do_not_matter(group_size: int) -> None:
    codec = GroupCodec(bits=4, group_size=group_size, range="absmax")
    for values in adversarial(group_size).values():
        got, top = coded(values, codec), values.abs().max()
        assert torch.equal(coded(-values, codec), -got)
        assert (got[values.abs() == top].abs() - top).abs().max() <= 2 * 2.0**-24 * top
        assert got.abs().max() <= top * (1 + 2 * 2.0**-24)
        assert not got[values == 0].any()


# ---- weight differences ----


def follow(replica: torch.Tensor, master: torch.Tensor, codec: GroupCodec, *, step: int) -> None:
    """One exchange of a difference, as all holders apply it."""
    where = address(seed=1, role=Role.WEIGHTS, step=step, parameter=0, rank=1)
    wire = torch.empty(1, codec.wire_bytes(replica.numel()), dtype=torch.uint8)
    values, reference = master.to(replica.dtype).view(1, -1), replica.view(1, -1)
    encode(codec, values, wire, address=where, base=reference)
    decode(codec, wire, reference, add=True)


def test_a_replica_contracts_to_a_fixed_target() -> None:
    """||e'|| <= sqrt(1 - delta) ||e|| and a bf16 rounding, 2^-9 of each weight."""
    target = torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    replica = torch.zeros(4096, dtype=torch.bfloat16)
    delta = max(1 / 2048, 1 - 2048 / (4 * 49))
    for step in range(12):
        before = float((replica.float() - target).norm())
        follow(replica, target, INT4_2048, step=step)
        after = float((replica.float() - target).norm())
        rounding = 2.0**-9 * float(target.norm() + before)
        assert after <= math.sqrt(1 - delta) * before + rounding
        assert after <= before / 4 + rounding  # Gaussian differences do far better than the bound
    assert after <= 2.0**-8 * float(target.norm())


def test_counterexample_replaced_weights_stick_and_differences_converge() -> None:
    """SDP4Bit, counterexample 4.1: f(w) = |w|^2 with one coordinate's gradient at a time, nearest
    rounding to {-m, 0, m}. Weights that are replaced by their codes never leave (1, -1); with
    differences they go to 0, as without quantization. The same codec (2 bits) everywhere.
    """
    ternary = GroupCodec(bits=2, group_size=32, range="absmax")
    coins = np.random.default_rng(0).integers(0, 2, 400)

    def gradient(w: torch.Tensor, coin: int) -> torch.Tensor:
        at = torch.zeros(2)
        at[coin] = 4 * w[coin]
        return at

    plain, replaced = torch.tensor([1.0, -1.0]), torch.tensor([1.0, -1.0])
    master, replica = plain.clone(), plain.clone()
    for step, coin in enumerate(coins):
        plain = plain - 0.1 * gradient(plain, coin)
        replaced = coded(replaced - 0.1 * gradient(replaced, coin), ternary)
        master = master - 0.1 * gradient(replica, coin)
        follow(replica, master, ternary, step=step)
    assert plain.abs().max() < 1e-3
    assert torch.equal(replaced, torch.tensor([1.0, -1.0]))
    assert replica.abs().max() < 1e-3
