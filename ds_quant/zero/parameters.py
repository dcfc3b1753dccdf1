"""The protocol of DeepSpeed's ZeRO-3 parameters (``ds_*`` attributes), devices and streams."""

from __future__ import annotations

import functools
from collections.abc import Callable
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


# ---- its methods, for as long as an engine serves it ----


def wrap_fetch(
    parameter: Any,
    fetch: Callable[..., Any],
    gather_exactly: Callable[..., Any],
    *,
    owner: object,
) -> None:
    """``fetch(original, params, ...)`` serves forward and backward; ``gather_exactly(original,
    param, param_list, ...)`` everything that must see exact weights.
    """

    def gather(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return gather_exactly(original, parameter, *args, **kwargs)

    _wrap(parameter, "all_gather_coalesced", fetch, owner)
    _wrap(parameter, "all_gather", gather, owner)


def wrap_partition(parameter: Any, updated: Callable[[list[Any]], None], *, owner: object) -> None:
    """``updated(params)`` learns which parameters are partitioned again with new values."""

    def around(
        partition: Callable[..., Any], param_list: Any = None, *args: Any,
        has_been_updated: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if has_been_updated:
            updated([parameter] if param_list is None else param_list)
        return partition(param_list, *args, has_been_updated=has_been_updated, **kwargs)

    _wrap(parameter, "partition", around, owner)


def _wrap(parameter: Any, name: str, around: Callable[..., Any], owner: object) -> None:
    original = getattr(parameter, name)
    wrapper = functools.partial(around, original)
    wrapper.ds_quant_wraps, wrapper.ds_quant_owner = original, owner
    setattr(parameter, name, wrapper)


def take_borrowed(parameter: Any) -> bool:
    """Whether the parameter was marked as borrowed since the last call."""
    return vars(parameter).pop("ds_quant_borrowed", False)


def owner_of(parameter: Any) -> Any:
    """The owner of the wrapped fetch, None if it is DeepSpeed's."""
    return getattr(getattr(parameter, "all_gather_coalesced", None), "ds_quant_owner", None)


def unwrap(parameter: Any, *, owner: object) -> None:
    """Give the parameter back its own methods, unless another owner has wrapped them since."""
    for name in ("all_gather_coalesced", "all_gather", "partition"):
        method = getattr(parameter, name)
        if getattr(method, "ds_quant_owner", None) is owner:
            setattr(parameter, name, method.ds_quant_wraps)


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
