"""docs/wire_format.md is precise: wire_oracle.py, written from it alone, equals our bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_quant.comm.checksum import seal
from ds_quant.comm.reduction_plan import Slicing
from tests.unit import wire_oracle as oracle


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
