"""The layout of messages: rows of slots, and the order in which a gather returns rows.

row   the bytes that one rank sends to one peer; to all peers in a gather
slot  the part of a row that holds one tensor or shard, codes and scales together

[Note: one message] Every slot begins at a 16-byte boundary, see [Note: small tensors] of
small_tensors.py for the exception. Slots depend on sizes alone, so all ranks agree on them. A short
or empty last shard uses the front of its slot: padding is never encoded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import numpy as np

from ds_quant.codec.bound import VECTORS_PER_ELEMENT
from ds_quant.codec.codec import Codec
from ds_quant.kernels.wire import ALIGNMENT, VECTOR_NUMEL, ceil_div, round_up

Ranks = TypeVar("Ranks", int, np.ndarray)


def lay_out(sizes: Iterable[tuple[Codec, int]]) -> tuple[list[int], int]:
    """Lay out a row that holds one (codec, numel) after the other.

    Returns:
        the first byte of each slot, and the bytes of the row.
    """
    starts: list[int] = []
    end = 0
    previous_codec = None
    for codec, numel in sizes:
        if codec != previous_codec:
            end = round_up(end, ALIGNMENT)
            previous_codec = codec
        starts.append(end)
        end += codec.wire_bytes(numel)
    return starts, round_up(end, ALIGNMENT)


def row_index(rank: Ranks, ranks: int, node_size: int | None) -> Ranks:
    """Return the index of a rank's row among the gathered rows.

    rank: one rank, or an array of them.
    node_size: ranks per node of a gather over two levels, which returns rows as (local rank, node);
        None for one level, which returns them in rank order.
    """
    if node_size is None:
        return rank
    nodes = ranks // node_size
    return rank % node_size * nodes + rank // node_size


def row_vector(row: int, numel: int, width: int) -> int:
    """Return the first vector of random bits of row ``row``, which has ``numel`` elements.

    Rows of full ``width`` use consecutive vectors. A short last row begins at the vector at which
    ``BoundCodec.at`` has its first element.
    """
    if numel == width:
        return row * ceil_div(width, VECTOR_NUMEL)
    return VECTORS_PER_ELEMENT * row * width
