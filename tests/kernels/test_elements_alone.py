"""Worlds whose shards begin anywhere: the kernels read and write them by 16 aligned bytes, too.

The first matrix of a Llama-7B layer on 24 to 192 ranks, whose shards are no multiples of 16 bytes
from its beginning on but for every eighth.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ds_quant.codec.codec import CastCodec, Codec, GroupCodec
from ds_quant.kernels.batch import Decode, Encode, Offsets, Rotate, Sum, Task
from ds_quant.kernels.dispatch import Operations
from ds_quant.kernels.wire import ceil_div, round_up
from tests.kernels.programs import streams_of
from tests.lossless_inputs import decode, message_of
from tests.thin import thinned

MATRIX = 4096 * 4096
WORLDS = (24, 40, 48, 96, 192)
WEIGHTS = GroupCodec(bits=4, group_size=2048, range="absmax")
GRADIENTS = GroupCodec(bits=8, group_size=128, range="absmax", rounding="stochastic")
EXACT = CastCodec(torch.bfloat16)
MOST = 0.001  # of all elements: the end of a row that is no whole run


def share(shim, tasks: Sequence[Task], buffers: list[torch.Tensor], codec: Codec) -> float:
    """Elements that were read or written alone, of those that the tasks work on."""
    before = shim.elements_alone()
    Operations(tasks).run(buffers, streams_of([codec], block=32))
    return (shim.elements_alone() - before) / sum(task.numel for task, _ in tasks)


@pytest.mark.parametrize("ranks", thinned(WORLDS, lambda ranks: ranks == 192))
def test_no_shard_goes_element_by_element(shim, cuda_kernels, ranks: int) -> None:
    numel = ceil_div(MATRIX, ranks)
    start = next(rank * numel for rank in range(1, ranks) if rank * numel % 8)
    skew = start % 8  # where the shard begins in its tensor, from a multiple of 16 bytes on
    room = round_up(numel + 8, 128)
    values, base, out = (torch.randn(room).bfloat16() for _ in range(3))
    numbers = torch.zeros(room)
    for codec in (WEIGHTS, GRADIENTS, EXACT):
        wire = torch.zeros(codec.wire_bytes(round_up(numel, 32)), dtype=torch.uint8)
        buffers = [values, wire, base, out, numbers]
        encode = Encode(codec, numel, 0, 1, 0)
        how = {"sources": 1, "stride": 0, "own_row": 1, "own": 4}
        found = {
            "encode": [(encode, Offsets(values=skew))],
            "decode": [(Decode(codec, numel, 1, 3, 0), Offsets(values=skew))],
            "sum": [(Sum(codec, numel, 1, 3, 0, **how), Offsets(values=skew))],
        }
        if codec is not EXACT:
            found["difference"] = [(encode._replace(base=2), Offsets(values=skew, base=skew))]
            found["decode, added"] = [(Decode(codec, numel, 1, 3, 0, True), Offsets(values=skew))]
            found["rotated"] = [(Rotate(codec, numel, 0, 4, 0, 32), Offsets(values=skew))]
            found["encode, rotated"] = [(encode._replace(block=32), Offsets(values=skew))]
        shares = {name: share(shim, tasks, buffers, codec) for name, tasks in found.items()}
        assert all(one <= MOST for one in shares.values()), shares
    before = shim.elements_alone()
    own, old = (each[skew : skew + numel] for each in (values, values + 0.01))
    decode(message_of(own, old), old, out[skew : skew + numel])
    assert (shim.elements_alone() - before) / numel <= MOST


def test_elements_alone_are_counted(shim, cuda_kernels) -> None:
    buffers = [torch.randn(100).bfloat16(), torch.zeros(16, dtype=torch.uint8)]
    assert share(shim, [(Encode(EXACT, 7, 0, 1, 0), Offsets(values=1))], buffers, EXACT) == 1
