"""Rotation against explicit Sylvester matrices; what a linear, orthogonal map must keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_quant.codec.bound import BLOCKS, Rotation
from ds_quant.kernels import hadamard as kernel
from ds_quant.kernels.random_bits import Role, address

SIGNS = address(seed=3, role=Role.GRADIENTS, step=5, parameter=2, hop=99)


def sylvester(block: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def integers(numel: int, seed: int = 0) -> torch.Tensor:
    draw = np.random.default_rng(seed)
    return torch.from_numpy(draw.integers(-64, 65, numel)).float()


def padded(values: torch.Tensor, block: int) -> np.ndarray:
    whole = -(-len(values) // block) * block
    return np.pad(values.double().numpy(), (0, whole - len(values))).reshape(-1, block)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("numel", [0, 1, 31, 128, 1000, 4097])
def test_forward_is_the_sylvester_matrix_of_every_block(block: int, numel: int) -> None:
    """Small integers: exact in fp32 and in every order of addition."""
    values = integers(numel)
    before = values.clone()
    rotated = Rotation(block=block).forward(values)
    expected = padded(values, block) @ sylvester(block)
    np.testing.assert_array_equal(rotated.numpy(), expected.reshape(-1))
    assert torch.equal(values, before)


@pytest.mark.parametrize("signs", [None, SIGNS], ids=["plain", "signs"])
@pytest.mark.parametrize("block", BLOCKS)
def test_inverse_of_forward_is_the_input_times_scale(block: int, signs: object) -> None:
    """H H = block * I; integers and powers of two are exact."""
    rotation, values = Rotation(block=block, signs=signs), integers(1000)
    rotated = rotation.forward(values)
    assert rotated.square().sum() == block * values.square().sum()
    rotation.inverse_(rotated, scale=0.25)
    assert torch.equal(rotated[:1000], values / 4)
    assert not rotated[1000:].any()


@pytest.mark.parametrize("block", BLOCKS)
def test_sum_then_inverse_is_inverse_then_sum(block: int) -> None:
    """Each value passes log2(block) additions on either side and some sums: every one rounds by
    2^-24 of a magnitude below sum |x| of its block, times the block's growth, which is divided out.
    """
    rotation = Rotation(block=block, signs=SIGNS)
    sources = [torch.randn(640, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    together = sum(rotation.forward(s) for s in sources)
    rotation.inverse_(together)
    magnitude = sum(s.abs().view(-1, block).sum(1).max() for s in sources)
    error = (together - sum(sources)).abs().max()
    assert error <= 2 * (2 * np.log2(block) + 8) * 2.0**-24 * magnitude


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_floating_dtype_goes_in_and_fp32_comes_out(dtype: torch.dtype) -> None:
    values = integers(100).to(dtype)
    rotated = Rotation(block=32).forward(values)
    assert rotated.dtype == torch.float32
    np.testing.assert_array_equal(rotated.numpy(), (padded(values, 32) @ sylvester(32)).reshape(-1))


def test_cutting_the_work_does_not_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    rotation = Rotation(block=64, signs=SIGNS)
    whole = rotation.forward(values)
    back = whole.clone()
    rotation.inverse_(back, scale=1 / 3)
    monkeypatch.setitem(kernel._CHUNK_NUMEL, "cpu", 256)
    cut = rotation.forward(values)
    assert torch.equal(cut, whole)
    rotation.inverse_(cut, scale=1 / 3)
    assert torch.equal(cut, back)


def test_signs_are_a_function_of_the_address_and_break_the_spike_of_equal_values() -> None:
    equal = torch.ones(3200)
    spike = Rotation(block=32).forward(equal)
    assert spike.abs().max() == 32
    flipped = Rotation(block=32, signs=SIGNS).forward(equal)
    assert flipped.abs().max() <= 20  # 5 sqrt(32) = 28 would be five sigma; this pattern has less
    assert torch.equal(flipped, Rotation(block=32, signs=SIGNS).forward(equal))
    other = address(seed=3, role=Role.GRADIENTS, step=6, parameter=2, hop=99)
    assert not torch.equal(flipped, Rotation(block=32, signs=other).forward(equal))


@pytest.mark.parametrize("block", [0, 16, 48, 256])
def test_other_blocks_are_refused(block: int) -> None:
    with pytest.raises(ValueError, match=rf"rotation block = {block}: allowed are \(32, 64, 128\)"):
        Rotation(block=block)


def test_rotation_works_without_compiled_kernels() -> None:
    """As on machines without a compiler, with backend "torch", and for CUDA tensors."""
    values = torch.randn(100, generator=torch.Generator().manual_seed(0))
    rotation = Rotation(block=32)
    expected, in_torch = rotation.forward(values), Rotation(block=32, backend="torch")
    found = in_torch.forward(values)
    in_torch.inverse_(found)
    assert torch.allclose(found[:100], values, atol=1e-5) and expected.shape == found.shape
