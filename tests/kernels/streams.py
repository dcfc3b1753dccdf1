"""A device with streams without a GPU: operations on CPU tensors that are carried out later.

`Recorder` stands for a stream: what runs inside its block returns at once with memory that holds
nothing yet, and `work` has the operations in order. So tests choose how two streams take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


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
