"""The torch path on a device with streams: nothing is shared between them, nothing read back.

A device without a GPU: operations on CPU tensors that are carried out later. `Recorder` stands for
a stream: what runs inside its block returns at once with memory that holds nothing yet, and `work`
has the operations in order. So tests choose how two streams take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_quant.codec.bound import BoundCodec
from ds_quant.kernels import reference
from ds_quant.kernels.batch import Offsets, Recode
from ds_quant.kernels.dispatch import Operations, RngState
from ds_quant.kernels.random_bits import Address
from tests.kernels.inputs import CODECS, KINDS, awkward, id_of, table

ADDRESS = Address(key=0x0123456789ABCDEF, step=(1 << 33) + 1, first_vector=(1 << 32) - 5)
ROTATION = reference.Rotation(block=32, signs=Address(7, 3))
NUMEL = 3008


class ReadBack(AssertionError):
    """The host asked for a value that the device has not computed yet."""


class FromHost(AssertionError):
    """A copy of host memory, which would wait for the stream."""


class Recorder(TorchDispatchMode):
    """Collects the operations of a block. Views and empty tensors are made at once."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise ReadBack("an operation asks for a value of a tensor")
        if func is torch.ops.aten.lift_fresh.default:
            raise FromHost("a tensor is made from Python numbers")
        result = func(*args, **kwargs)
        if func.is_view or func.overloadpacket is torch.ops.aten.empty:
            return result
        if func._schema.is_mutable:
            self.work.append(lambda: func(*args, **kwargs))
        else:
            made = [result] if isinstance(result, torch.Tensor) else list(result)
            for mine in made:
                mine.fill_(1)  # not what it will be, but an index that exists

            def later() -> None:
                found = func(*args, **kwargs)
                found = [found] if isinstance(found, torch.Tensor) else list(found)
                for mine, value in zip(made, found, strict=True):
                    mine.copy_(value)

            self.work.append(later)
        return result


def spoiled(*tensors: torch.Tensor) -> None:
    """Overwrite what recording may already have computed."""
    for tensor in tensors:
        tensor.view(torch.uint8).fill_(0x55)


def in_turns(*streams: Recorder) -> None:
    """Carry out the work of all streams, one operation of each at a time, the last stream first."""
    for turn in range(max(len(stream.work) for stream in streams)):
        for stream in reversed(streams):
            if turn < len(stream.work):
                stream.work[turn]()


@pytest.mark.parametrize("codec", CODECS[::5], ids=id_of)  # every formula, every width
def test_two_streams_work_at_once(codec) -> None:
    """Each encodes two rows, adds them up and encodes the sum again."""
    levels, nbytes = table(codec), codec.wire_bytes(NUMEL)
    recode = Recode(codec, codec, NUMEL, 0, 1, 0, 2, nbytes, None, 0)
    streams_of = RngState([BoundCodec(codec, ADDRESS, levels)], [None])

    def work(x: torch.Tensor, wire: torch.Tensor, total: torch.Tensor, out: torch.Tensor) -> None:
        reference.encode(x, wire, codec, address=ADDRESS, levels=levels, rotation=ROTATION)
        reference.decode_sum(
            wire, total, codec, scale=0.5, own=None, levels=levels, rotation=ROTATION
        )
        Operations([(recode, Offsets())]).run([wire, out], streams_of, backend="torch")

    def empty() -> tuple[torch.Tensor, ...]:
        wire = torch.empty(2, nbytes, dtype=torch.uint8)
        return wire, torch.empty(NUMEL), torch.empty(nbytes, dtype=torch.uint8)

    inputs = [
        awkward(2 * NUMEL, codec.group_size, sorted(KINDS), seed=seed).view(2, NUMEL)
        for seed in (1, 2)
    ]
    wanted, found, streams = [empty(), empty()], [empty(), empty()], (Recorder(), Recorder())
    for x, outs in zip(inputs, wanted, strict=True):
        work(x, *outs)
    for stream, x, outs in zip(streams, inputs, found, strict=True):
        with stream:
            work(x, *outs)
        spoiled(*outs)
    in_turns(*streams)
    for mine, theirs in zip(found, wanted, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
