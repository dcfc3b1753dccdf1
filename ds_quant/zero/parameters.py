"""The protocol of DeepSpeed's ZeRO-3 parameters (``ds_*`` attributes), devices and streams."""

from __future__ import annotations

from typing import Any

import torch


def shape_of(parameter: torch.Tensor) -> torch.Size:
    """The full shape, also while a ZeRO-3 parameter is partitioned."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def total_bytes(module: torch.nn.Module) -> int:
    """Bytes of all parameters of a model, whole ones also where they are partitioned."""
    return sum(shape_of(p).numel() * p.element_size() for p in module.parameters())


def travels(parameter: Any) -> bool:
    """Whether a codec can carry the dtype of a ZeRO-3 parameter's shard."""
    return parameter.ds_tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)


def is_unavailable(parameter: torch.Tensor) -> bool:
    return parameter.ds_status == type(parameter.ds_status).NOT_AVAILABLE


def is_available(parameter: torch.Tensor) -> bool:
    return parameter.ds_status == type(parameter.ds_status).AVAILABLE


def set_inflight(parameter: torch.Tensor) -> None:
    parameter.ds_status = type(parameter.ds_status).INFLIGHT


def fill(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Give a parameter its gathered values, (numel,), and mark it available."""
    parameter.data = values.view(parameter.ds_shape)
    parameter.ds_status = type(parameter.ds_status).AVAILABLE


def forget_values(parameter: torch.Tensor) -> None:
    """Mark a gathered parameter as not gathered, so that the next gather fetches it anew."""
    accelerator = _accelerator()
    if not accelerator.is_synchronized_device() and accelerator.on_accelerator(parameter.data):
        parameter.data.record_stream(accelerator.current_stream())
    parameter.ds_status = type(parameter.ds_status).NOT_AVAILABLE


def valid_shard(parameter: Any, rank: int) -> torch.Tensor:
    """This rank's shard without its uninitialised padding, 1-D, possibly empty."""
    width = parameter.ds_tensor.ds_numel
    used = min(max(parameter.ds_numel - rank * width, 0), width)
    return parameter.ds_tensor.data.view(-1)[:used]


def _accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


def free_memory() -> int:
    """Bytes that can still be allocated where collectives run."""
    return int(_accelerator().available_memory())


def device() -> torch.device:
    """Where collectives run."""
    return torch.device(_accelerator().current_device_name())


class StepBarrier:
    """Orders the gather stream behind what wrote shards or kept weights on another one (the
    optimizer step), on devices whose streams run by themselves; does nothing on the CPU.
    """

    def __init__(self) -> None:
        self._event: Any = None

    def record(self) -> None:
        accelerator = _accelerator()
        if not accelerator.resolves_data_dependency():
            self._event = accelerator.Event()
            self._event.record(accelerator.current_stream())

    def wait(self) -> None:
        if self._event is not None:
            _accelerator().current_stream().wait_event(self._event)
