"""Rows of slots: small tensors in full precision follow each other without padding."""

from __future__ import annotations

import numpy as np
import torch

from ds_quant.codec.codec import CastCodec, GroupCodec
from ds_quant.comm.message import lay_out, row_place, small_last

SMALL16, SMALL32 = CastCodec(torch.bfloat16, tight=True), CastCodec(torch.float32, tight=True)
LARGE, CODED = CastCodec(torch.bfloat16), GroupCodec(bits=8, group_size=64, range="absmax")


def test_slots_begin_at_16_bytes_but_for_small_ones_behind_others_of_their_dtype() -> None:
    sizes = [(LARGE, 3), (SMALL16, 3), (SMALL16, 1), (SMALL16, 0), (SMALL32, 3), (SMALL32, 2)]
    starts, nbytes = lay_out([*sizes, (LARGE, 1)])
    assert starts == [0, 16, 22, 24, 32, 44, 64] and nbytes == 80
    assert lay_out(sizes) == (starts[:-1], 64)
    assert lay_out([]) == ([], 0)


def test_small_ones_come_last_by_dtype_and_in_order() -> None:
    codecs = [SMALL32, CODED, SMALL16, LARGE, SMALL32, SMALL16, CODED]
    assert small_last(codecs) == [1, 3, 6, 0, 4, 2, 5]


def test_rows_of_two_levels_come_by_place_in_the_node_then_by_node() -> None:
    """Of three nodes of two ranks."""
    assert [row_place(rank, 6, 2) for rank in range(6)] == [0, 3, 1, 4, 2, 5]
    assert row_place(np.arange(6), 6, 2).tolist() == [0, 3, 1, 4, 2, 5]
    assert [row_place(rank, 6, None) for rank in range(6)] == list(range(6))
