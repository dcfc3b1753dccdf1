"""Parameters of the engine's module: what DeepSpeed adds to them under ZeRO-3.

Like hooks.py it names DeepSpeed's private attributes. Methods of a parameter are replaced for as
long as an engine serves it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from ds_quant.zero import hooks
from ds_quant.zero.deepspeed_types import GatherHandle, ParameterOffload, ZeroParameter

# ---- values ----


def parameters_of(module: torch.nn.Module, *, recurse: bool = True) -> list[ZeroParameter]:
    """Return the parameters of an engine's module, as DeepSpeed has extended them."""
    return cast("list[ZeroParameter]", list(module.parameters(recurse)))


def shape_of(parameter: Tensor) -> torch.Size:
    """Return the full shape, also while a ZeRO-3 parameter is partitioned."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def elements(module: torch.nn.Module) -> tuple[int, int]:
    """Count the elements of a model, and those that are trained."""
    numels = [(shape_of(p).numel(), p.requires_grad) for p in module.parameters()]
    return sum(n for n, _ in numels), sum(n for n, trained in numels if trained)


def total_bytes(module: torch.nn.Module) -> int:
    """Add up the bytes of all parameters of a model, partitioned ones in full."""
    return sum(shape_of(p).numel() * p.element_size() for p in module.parameters())


def is_sendable(parameter: ZeroParameter) -> bool:
    """Whether a codec can carry the dtype of a ZeRO-3 parameter's shard."""
    return parameter.ds_tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)


def is_unavailable(parameter: ZeroParameter) -> bool:
    return parameter.ds_status == type(parameter.ds_status).NOT_AVAILABLE


def is_available(parameter: ZeroParameter) -> bool:
    return parameter.ds_status == type(parameter.ds_status).AVAILABLE


def begin_fetch(parameters: Iterable[ZeroParameter]) -> None:
    """Check DeepSpeed's contract and mark parameters as in flight."""
    for p in parameters:
        status = type(p.ds_status)
        if p.ds_status != status.NOT_AVAILABLE:
            raise RuntimeError(f"fetch of a parameter that is not partitioned: {p.ds_summary()}")
        p.ds_status = status.INFLIGHT


def fill(parameters: Sequence[ZeroParameter], values: Sequence[Tensor]) -> None:
    """Give parameters their gathered values, (numel,) each, and mark them available."""
    for p, full in zip(parameters, values, strict=True):
        p.data = full.view(p.ds_shape)
        p.ds_status = type(p.ds_status).AVAILABLE


def drop_values(parameter: ZeroParameter) -> None:
    """Mark a gathered parameter as not gathered, so that the next gather fetches it again."""
    hooks.keep_for_current_stream(parameter.data)
    parameter.ds_status = type(parameter.ds_status).NOT_AVAILABLE


def valid_shards(parameters: Iterable[ZeroParameter], rank: int) -> list[Tensor]:
    """Return this rank's shards without their uninitialised padding, 1-D, possibly empty, on the
    device of the collectives: not theirs if parameters are offloaded.
    """
    found, where = [], hooks.device()
    for p in parameters:
        width = p.ds_tensor.ds_numel
        used = min(max(p.ds_numel - rank * width, 0), width)
        found.append(p.ds_tensor.data.view(-1)[:used].to(where, non_blocking=True))
    return found


def is_gathered_whole(module: torch.nn.Module) -> bool:
    """Whether ZeRO-3 gathers all that is in the module at once (DeepSpeed's leaf modules)."""
    from deepspeed.utils import z3_leaf_module

    return bool(z3_leaf_module(module))


# ---- methods ----


def wrap_fetch(
    parameter: ZeroParameter,
    fetch: Callable[..., GatherHandle],
    gather_exactly: Callable[..., object],
    *,
    owner: Hashable,
) -> None:
    """``fetch(original, params, ...)`` serves forward and backward; ``gather_exactly(param,
    original, param_list, ...)`` everything that must see exact weights.
    """
    _wrap(parameter, "all_gather_coalesced", fetch, owner)
    _wrap(parameter, "all_gather", partial(gather_exactly, parameter), owner)


def wrap_partition(
    parameter: ZeroParameter,
    updated: Callable[[Sequence[ZeroParameter]], None],
    *,
    owner: Hashable,
) -> None:
    """``updated(params)`` learns which parameters are partitioned again with new values."""

    def around(
        partition: Callable[..., object],
        param_list: Sequence[ZeroParameter] | None = None,
        *args: object,
        has_been_updated: bool = False,
        **kwargs: object,
    ) -> object:
        if has_been_updated:
            updated([parameter] if param_list is None else param_list)
        return partition(param_list, *args, has_been_updated=has_been_updated, **kwargs)

    _wrap(parameter, "partition", around, owner)


def _wrap(
    parameter: ZeroParameter, name: str, around: Callable[..., object], owner: Hashable
) -> None:
    original = getattr(parameter, name)
    wrapped = hooks.wrapped_by(original, around)
    wrapped.ds_quant_owner = owner
    setattr(parameter, name, wrapped)


def take_borrowed(parameter: ZeroParameter) -> bool:
    """Whether the parameter was marked as borrowed since the last call."""
    return vars(parameter).pop(_BORROWED, False)


def owner_of(parameter: ZeroParameter) -> Hashable | None:
    """Return the owner of the wrapped fetch, None if it is DeepSpeed's."""
    return getattr(getattr(parameter, "all_gather_coalesced", None), "ds_quant_owner", None)


def unwrap(parameter: ZeroParameter, *, owner: Hashable) -> None:
    """Give the parameter back its own methods, unless another owner has wrapped them since."""
    for name in ("all_gather_coalesced", "all_gather", "partition"):
        method = getattr(parameter, name)
        if getattr(method, "ds_quant_owner", None) is owner:
            setattr(parameter, name, method.ds_quant_wraps)


_BORROWED = "ds_quant_borrowed"  # attribute of a parameter


def note_borrowed() -> None:
    """Mark parameters that a module uses in its forward though they are not its own: DeepSpeed
    learns of it then, once per use and run, and gathers them on the spot with ``all_gather()``.
    """
    from deepspeed.runtime.zero import parameter_offload

    def register(
        original: Callable[..., object], module: torch.nn.Module, parameter: ZeroParameter
    ) -> None:
        original(module, parameter)
        vars(parameter)[_BORROWED] = True

    hooks.require(parameter_offload, "register_external_parameter")
    hooks.wrap_once(parameter_offload, "register_external_parameter", register)


_FETCH = "_PartitionedParameterCoordinator__all_gather_params_"


def before_fetch(events: hooks.Hooks, meet: Callable[[Iterable[ZeroParameter]], None]) -> None:
    """Call ``meet(params)`` with parameters that are about to be fetched together."""

    def fetch(
        original: Callable[..., object],
        params: set[ZeroParameter],
        *args: object,
        **kwargs: object,
    ) -> object:
        meet(params)
        return original(params, *args, **kwargs)

    # An engine for inference has nothing but the offload.
    offload = cast(
        "ParameterOffload", getattr(events.optimizer, "parameter_offload", events.optimizer)
    )
    events.wrap(offload.get_param_coordinator(), _FETCH, fetch)
