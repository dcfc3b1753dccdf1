"""docs/wire_format.md is precise: wire_oracle.py, written from it alone, equals our bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_quant.comm.checksum import seal
from ds_quant.comm.reduction_plan import Slicing
from ds_quant.kernels import random_bits
from tests.unit import wire_oracle as oracle


def values(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed + n))


def test_keys_are_those_of_section_4() -> None:
    names = {"seed": 5, "parameter": 3, "hop": 1}
    for role in random_bits.Role:
        for rank in (0, 4):
            key = random_bits.key_of(role=role, rank=rank, **names)
            assert key == oracle.key_of(role=int(role), stream=rank, **names)


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
