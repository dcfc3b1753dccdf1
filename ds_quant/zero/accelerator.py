"""DeepSpeed's accelerator: the device of the collectives, its streams and memory.

[Note: devices with streams] On CUDA the host only enqueues work, on streams that run on their own.
On the CPU every operation is done when its call returns. DeepSpeed says which of them a device is
(``resolves_data_dependency``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_quant.zero import deepspeed_types
from ds_quant.zero.version import is_older


def get() -> deepspeed_types.Accelerator:
    """Return DeepSpeed's accelerator."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


def device() -> torch.device:
    """Return the device of the collectives."""
    return torch.device(get().current_device_name())


# ---- memory ----


def free_memory() -> int:
    """Return the bytes that can still be allocated on the device."""
    return int(get().available_memory())


def keep_for_current_stream(values: Tensor) -> None:
    """Keep the allocator from reusing memory that the current stream may still read.

    Call it before the last reference to a tensor of another stream is dropped.
    """
    accelerator = get()
    if not accelerator.is_synchronized_device() and accelerator.on_accelerator(values):
        values.record_stream(accelerator.current_stream())


# ---- streams ----


def has_streams() -> bool:
    """Return True if work is enqueued on streams: then a wait delays a stream, not the host."""
    return not get().resolves_data_dependency()


def synchronize() -> None:
    """Wait until all streams of the device are idle. Does nothing on the CPU."""
    if has_streams():
        get().synchronize()


def awaits_last_gather_only() -> bool:
    """Return True if DeepSpeed's ``all_gather`` waits for the last parameter only.

    It does on the CPU before 0.19.8.
    """
    return device().type == "cpu" and is_older("0.19.8")


class StepBarrier:
    """Orders the stream of gathers behind writes of the weights on other streams.

    The writers are the optimizer step and the exchange of the node shard. Does nothing on the CPU.
    """

    def __init__(self) -> None:
        self._event: torch.Event | None = None

    def record(self) -> None:
        """Mark the end of the writes on the current stream."""
        if has_streams():
            self._event = get().Event()
            self._event.record(get().current_stream())

    def wait(self) -> None:
        """Make the current stream wait for the last ``record``."""
        if self._event is not None:
            get().current_stream().wait_event(self._event)
