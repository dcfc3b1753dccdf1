"""Separate host memory for tests on the CPU: its tensors can be copied, but not computed with."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_COPIES = {"copy_", "_foreach_copy_"}
_FACTS = {"numel", "element_size", "is_pinned", "__get__", "__repr__", "__len__", "size", "detach"}
_VIEWS = {"view", "__getitem__", "narrow"}


class HostTensor(torch.Tensor):
    """A tensor that kernels cannot read: ``data_ptr`` and arithmetic raise. ``to`` copies it."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.__name__
        if name == "to":
            with torch._C.DisableTorchFunctionSubclass():
                copy = args[0].as_subclass(torch.Tensor).clone()
            COPIED.add(copy)
            return copy
        if name not in _COPIES | _FACTS | _VIEWS:
            raise AssertionError(f"{name} of a tensor in host memory")
        return super().__torch_function__(function, types, args, kwargs or {})


class Alive:
    """Counts tensors.

    count: tensors so far.
    nbytes, most: bytes of the tensors that are alive, now and at most.
    """

    def __init__(self) -> None:
        self.count = self.nbytes = self.most = 0

    def add(self, tensor: torch.Tensor) -> None:
        self.count += 1
        self.nbytes += tensor.nbytes
        self.most = max(self.most, self.nbytes)
        weakref.finalize(tensor.untyped_storage(), self._freed, tensor.nbytes)

    def _freed(self, nbytes: int) -> None:
        self.nbytes -= nbytes


COPIED = Alive()  # copies to the device


@contextmanager
def separate_host_memory(*, offloads: bool = True) -> Iterator[None]:
    """Let the CPU stand in for a device with separate host memory.

    offloads: True if ``offload_param`` moves node rows to host memory.
    """
    from ds_quant.zero import offload

    kept = offload.offloads_parameters, offload.pin
    offload.offloads_parameters = lambda engine: offloads
    offload.pin = _pin
    try:
        yield
    finally:
        offload.offloads_parameters, offload.pin = kept


_PINNED: list[torch.Tensor] = []  # kept alive, so that no other tensor gets the same address


def _pin(tensor: torch.Tensor) -> HostTensor:
    _PINNED.append(tensor)
    return tensor.as_subclass(HostTensor)


def on_host(tensor: torch.Tensor) -> bool:
    """Return True if the storage of a tensor is in host memory, also by assignment to ``data``."""
    with torch._C.DisableTorchFunctionSubclass():
        address = tensor.untyped_storage().data_ptr()
    return any(address == block.untyped_storage().data_ptr() for block in _PINNED)


def device_bytes() -> int:
    """Return the bytes of all tensors of this process, those in host memory left out."""
    gc.collect()
    storages: dict[int, int] = {}  # bytes by address
    host: set[int] = set()
    for item in gc.get_objects():
        if not isinstance(item, torch.Tensor):
            continue
        with torch._C.DisableTorchFunctionSubclass():
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            if isinstance(item, HostTensor):
                host.add(storage.data_ptr())
    return sum(nbytes for address, nbytes in storages.items() if address not in host)
