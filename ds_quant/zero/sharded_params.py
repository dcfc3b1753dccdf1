"""Parameters of ZeRO-3: the attributes and methods that DeepSpeed adds to them.

Like hooks.py this module uses DeepSpeed's private names. Methods of a parameter are replaced while
an engine serves it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from ds_quant.zero import accelerator, hooks
from ds_quant.zero.deepspeed_types import GatherHandle, ParameterOffload, ZeroParameter

# ---- values ----


def parameters_of(module: torch.nn.Module, *, recurse: bool = True) -> list[ZeroParameter]:
    """Return the parameters of an engine's module, typed as DeepSpeed extends them."""
    return cast("list[ZeroParameter]", list(module.parameters(recurse)))


def shape_of(parameter: Tensor) -> torch.Size:
    """Return the full shape of a parameter, also while ZeRO-3 has partitioned it."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def elements(module: torch.nn.Module) -> tuple[int, int]:
    """Return the number of elements of a model, and of its trained ones."""
    total = 0
    trained = 0
    for p in module.parameters():
        numel = shape_of(p).numel()
        total += numel
        if p.requires_grad:
            trained += numel
    return total, trained


def total_bytes(module: torch.nn.Module) -> int:
    """Return the bytes of all parameters of a model; partitioned ones count in full."""
    return sum(shape_of(p).numel() * p.element_size() for p in module.parameters())


def is_sendable(parameter: ZeroParameter) -> bool:
    """Return True if codecs support the dtype of a parameter's shard."""
    return parameter.ds_tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)


def is_unavailable(parameter: ZeroParameter) -> bool:
    """Return True if the parameter is partitioned."""
    return parameter.ds_status == type(parameter.ds_status).NOT_AVAILABLE


def is_available(parameter: ZeroParameter) -> bool:
    """Return True if the parameter is gathered."""
    return parameter.ds_status == type(parameter.ds_status).AVAILABLE


def begin_fetch(parameters: Iterable[ZeroParameter]) -> None:
    """Mark parameters as being gathered.

    Raises:
        RuntimeError: DeepSpeed fetches a parameter that is gathered already.
    """
    for p in parameters:
        status = type(p.ds_status)
        if p.ds_status != status.NOT_AVAILABLE:
            raise RuntimeError(f"fetch of a parameter that is not partitioned: {p.ds_summary()}")
        p.ds_status = status.INFLIGHT


def fill(parameters: Sequence[ZeroParameter], values: Sequence[Tensor]) -> None:
    """Set the gathered values of parameters, (numel,) each, and mark them available."""
    for p, full in zip(parameters, values, strict=True):
        p.data = full.view(p.ds_shape)
        p.ds_status = type(p.ds_status).AVAILABLE


def drop_values(parameter: ZeroParameter) -> None:
    """Mark a gathered parameter as not gathered, so that the next gather fetches it again."""
    accelerator.keep_for_current_stream(parameter.data)
    parameter.ds_status = type(parameter.ds_status).NOT_AVAILABLE


def stored_shards(parameters: Iterable[ZeroParameter], rank: int) -> list[Tensor]:
    """Return a rank's shards without their uninitialised padding: 1-D, possibly empty.

    They are where DeepSpeed keeps them: on the host if parameters are offloaded.
    """
    shards = []
    for p in parameters:
        width = p.ds_tensor.ds_numel
        valid_numel = min(max(p.ds_numel - rank * width, 0), width)
        shards.append(p.ds_tensor.data.view(-1)[:valid_numel])
    return shards


def valid_shards(parameters: Iterable[ZeroParameter], rank: int) -> list[Tensor]:
    """Return ``stored_shards`` on the device of the collectives.

    Shards of offloaded parameters are copied there.
    """
    device = accelerator.device()
    return [shard.to(device, non_blocking=True) for shard in stored_shards(parameters, rank)]


def is_gathered_whole(module: torch.nn.Module) -> bool:
    """Return True for DeepSpeed's leaf modules: all their parameters are gathered at once."""
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
    """Replace the gathers of a parameter.

    fetch: ``fetch(original, params, ...)`` serves forward and backward.
    gather_exactly: ``gather_exactly(parameter, original, param_list, ...)`` serves everything that
        needs exact weights.
    """
    _wrap(parameter, "all_gather_coalesced", fetch, owner)
    _wrap(parameter, "all_gather", partial(gather_exactly, parameter), owner)


def wrap_partition(
    parameter: ZeroParameter,
    updated: Callable[[Sequence[ZeroParameter]], None],
    *,
    owner: Hashable,
) -> None:
    """Call ``updated(params)`` when parameters are partitioned after their values have changed."""

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


def owner_of(parameter: ZeroParameter) -> Hashable | None:
    """Return the owner of a wrapped fetch, None if it is not wrapped."""
    return getattr(getattr(parameter, "all_gather_coalesced", None), "ds_quant_owner", None)


def unwrap(parameter: ZeroParameter, *, owner: Hashable) -> None:
    """Restore the methods of a parameter, unless another owner has wrapped them since."""
    for name in ("all_gather_coalesced", "all_gather", "partition"):
        method = getattr(parameter, name)
        if getattr(method, "ds_quant_owner", None) is owner:
            setattr(parameter, name, method.ds_quant_wraps)


# ---- external parameters ----


_EXTERNAL = "ds_quant_external"  # attribute of a parameter


def mark_external_parameters() -> None:
    """Mark external parameters, which a module uses though another one owns them.

    DeepSpeed registers an external parameter in the forward that uses it first, once per use and
    run, and gathers it on the spot with ``all_gather()``.
    """
    from deepspeed.runtime.zero import parameter_offload

    def register(
        original: Callable[..., object], module: torch.nn.Module, parameter: ZeroParameter
    ) -> None:
        original(module, parameter)
        vars(parameter)[_EXTERNAL] = True

    hooks.require(parameter_offload, "register_external_parameter")
    hooks.wrap_once(parameter_offload, "register_external_parameter", register)


def take_external(parameter: ZeroParameter) -> bool:
    """Return and clear the mark of an external parameter."""
    return vars(parameter).pop(_EXTERNAL, False)


# ---- fetches ----


_FETCH = "_PartitionedParameterCoordinator__all_gather_params_"


def before_fetch(events: hooks.Hooks, call: Callable[[Iterable[ZeroParameter]], None]) -> None:
    """Run ``call(params)`` before parameters are fetched together."""

    def fetch(
        original: Callable[..., object],
        params: set[ZeroParameter],
        *args: object,
        **kwargs: object,
    ) -> object:
        call(params)
        return original(params, *args, **kwargs)

    events.wrap(_offload_of(events).get_param_coordinator(), _FETCH, fetch)


def around_forward(
    events: hooks.Hooks,
    before: Callable[[torch.nn.Module], None],
    after: Callable[[torch.nn.Module], None],
) -> None:
    """Run ``before(module)`` before the forward of a module fetches its parameters, and
    ``after(module)`` when it has ended.

    Not in a backward, which repeats the forward of checkpointed activations.
    """

    def begin(original: Callable[..., object], module: torch.nn.Module) -> object:
        if _current_graph_task() == _NO_GRAPH_TASK:
            before(module)
        return original(module)

    def end(original: Callable[..., object], module: torch.nn.Module) -> object:
        if _current_graph_task() == _NO_GRAPH_TASK:
            after(module)
        return original(module)

    offload = _offload_of(events)
    events.wrap(offload, "pre_sub_module_forward_function", begin)
    events.wrap(offload, "post_sub_module_forward_function", end)


def is_in_backward() -> bool:
    """Return True if this thread runs a backward of autograd."""
    return _current_graph_task() != _NO_GRAPH_TASK


# Hooks of modules call it directly: they run twice per module and forward.
_current_graph_task = torch._C._current_graph_task_id
_NO_GRAPH_TASK = -1


def _offload_of(events: hooks.Hooks) -> ParameterOffload:
    # The "optimizer" of an inference engine is the offload itself.
    return cast(
        "ParameterOffload", getattr(events.optimizer, "parameter_offload", events.optimizer)
    )
