"""docs/wire_format.md is precise: wire_oracle.py, written from it alone, equals our bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_quant.codec.bound import Rotation
from ds_quant.comm.checksum import seal
from ds_quant.comm.reduction_plan import Slicing
from ds_quant.kernels import random_bits, reference
from tests.unit import wire_oracle as oracle


def values(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed + n))


def test_keys_are_those_of_section_4() -> None:
    names = {"seed": 5, "parameter": 3, "hop": 1}
    for role in random_bits.Role:
        for rank in (0, 4):
            key = random_bits.key_of(role=role, rank=rank, **names)
            assert key == oracle.key_of(role=int(role), stream=rank, **names)


@pytest.mark.parametrize("block", [32, 64, 128])
def test_rotation_is_undone_by_the_page(block: int) -> None:
    x = values(256)
    rotated = torch.empty(256)
    turn = reference.BlockRotation(block)
    reference.rotate(x, rotated, turn)
    back = rotated.clone()
    reference.unrotate_(back, turn, scale=0.25)
    assert np.array_equal(oracle.unrotate(rotated.numpy(), block, 0.25), back.numpy())


def test_sign_flips_are_those_of_the_page() -> None:
    names = {"seed": 5, "parameter": 3, "hop": 99}
    signs = random_bits.address(role=random_bits.Role.GRADIENTS, step=8, rank=0, **names)
    words = oracle.philox(oracle.key_of(role=1, stream=0, **names), 8, 0)
    expected = np.array([words[i // 32] >> i % 32 & 1 for i in range(64)]) * 2.0 - 1
    x = values(128)
    out = torch.empty(128)
    reference.rotate(x, out, Rotation(block=64, signs=signs).kernel)
    assert np.allclose(oracle.unrotate(out.numpy(), 64, 1.0), np.tile(expected, 2) * x.numpy())


@pytest.mark.parametrize("sizes", [[0, 1, 16, 16, 40, 0, 4096], [24, 24]])
def test_checksum_is_that_of_the_page(sizes: list[int]) -> None:
    draw = np.random.default_rng(len(sizes))
    messages = [draw.bytes(n) for n in sizes]
    payload = torch.frombuffer(bytearray(b"".join(messages)), dtype=torch.uint8)
    sealed = seal(payload, sizes, sender=3).numpy().tobytes()
    assert sealed == b"".join(oracle.sealed(message, 3) for message in messages)


def test_slices_are_as_many_as_the_page_says() -> None:
    for total in (0, 1, 499_999, 500_001, 4_499_999, 4_500_001, 10**8, 10**10):
        assert oracle.slice_count(total) == Slicing().slices(total)
