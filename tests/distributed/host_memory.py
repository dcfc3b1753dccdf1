"""Host memory apart from the device, on the CPU: what lies in it can be copied and nothing else."""

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
    """Kernels cannot read it: ``data_ptr`` and computing raise. ``to`` makes a copy elsewhere."""

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
    """Tensors that are followed: how many so far, and bytes of those alive, now and at most."""

    def __init__(self) -> None:
        self.count = self.nbytes = self.most = 0

    def add(self, tensor: torch.Tensor) -> None:
        self.count += 1
        self.nbytes += tensor.nbytes
        self.most = max(self.most, self.nbytes)
        weakref.finalize(tensor.untyped_storage(), self._freed, tensor.nbytes)

    def _freed(self, nbytes: int) -> None:
        self.nbytes -= nbytes


COPIED = Alive()  # to the device


@contextmanager
def separate_host_memory(*, offloads: bool = True) -> Iterator[None]:
    """Inside, the CPU stands for a device, and ``offload_param`` takes rows away from it unless
    ``offloads`` is False.
    """
    from ds_quant.zero import offload

    kept = offload.offloads_parameters, offload.pin
    offload.offloads_parameters = lambda engine: offloads
    offload.pin = _pin
    try:
        yield
    finally:
        offload.offloads_parameters, offload.pin = kept


_PINNED: list[torch.Tensor] = []  # kept, so that no other tensor takes the place of one


def _pin(tensor: torch.Tensor) -> HostTensor:
    _PINNED.append(tensor)
    return tensor.as_subclass(HostTensor)


def on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in host memory, also one whose ``data`` was set to such a tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        place = tensor.untyped_storage().data_ptr()
    return any(place == block.untyped_storage().data_ptr() for block in _PINNED)


def device_bytes() -> int:
    """Bytes of all tensors of this process but those in host memory."""
    gc.collect()
    storages: dict[int, int] = {}
    host: set[int] = set()
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
                host |= {storage.data_ptr()} if isinstance(thing, HostTensor) else set()
    return sum(nbytes for place, nbytes in storages.items() if place not in host)
