"""Rotation against explicit Sylvester matrices; what a linear, orthogonal map must keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_quant.codec.bound import Rotation, decode_sum, encode
from ds_quant.codec.codec import CastCodec
from ds_quant.kernels import reference
from ds_quant.kernels.random_bits import Role, address
from ds_quant.kernels.reference import BLOCKS
from ds_quant.kernels.wire import round_up

SIGNS = address(seed=3, role=Role.GRADIENTS, step=5, parameter=2, hop=99)


def forward(rotation: Rotation, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(round_up(x.numel(), rotation.block))
    reference.rotate(x, out, rotation)
    return out


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
    rotated = forward(Rotation(block=block), values)
    expected = padded(values, block) @ sylvester(block)
    np.testing.assert_array_equal(rotated.numpy(), expected.reshape(-1))
    assert torch.equal(values, before)


def test_cutting_the_work_does_not_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    rotation = Rotation(block=64, signs=SIGNS)
    whole = forward(rotation, values)
    back = whole.clone()
    reference.unrotate_(back, rotation, scale=1 / 3)
    monkeypatch.setitem(reference._RUN_NUMEL, "cpu", 256)
    cut = forward(rotation, values)
    assert torch.equal(cut, whole)
    reference.unrotate_(cut, rotation, scale=1 / 3)
    assert torch.equal(cut, back)


def test_signs_are_a_function_of_the_address_and_break_the_spike_of_equal_values() -> None:
    equal = torch.ones(3200)
    spike = forward(Rotation(block=32), equal)
    assert spike.abs().max() == 32
    flipped = forward(Rotation(block=32, signs=SIGNS), equal)
    assert flipped.abs().max() <= 20  # 5 sqrt(32) = 28 would be five sigma; this pattern has less
    assert torch.equal(flipped, forward(Rotation(block=32, signs=SIGNS), equal))
    other = address(seed=3, role=Role.GRADIENTS, step=6, parameter=2, hop=99)
    assert not torch.equal(flipped, forward(Rotation(block=32, signs=other), equal))


@pytest.mark.parametrize("block", [0, 16, 48, 256])
def test_other_blocks_are_refused(block: int) -> None:
    with pytest.raises(ValueError, match=rf"rotation block = {block}: allowed are \(32, 64, 128\)"):
        Rotation(block=block)


def test_sums_that_are_sent_exactly_are_rotated_back_and_scaled_once() -> None:
    values, rotation, codec = torch.randn(100), Rotation(block=32), CastCodec(torch.float32)
    wire = torch.empty(2, codec.wire_bytes(128), dtype=torch.uint8)
    encode(codec, values.expand(2, -1), wire, rotation=rotation)
    for backend in ("auto", "torch"):
        found = torch.empty(100)
        decode_sum(codec, wire, found, scale=0.25, rotation=rotation, backend=backend)
        torch.testing.assert_close(found, 0.5 * values)
