"""The names of torch's FSDP2 that torch does not document, with their types.

No other module reads an attribute of torch.distributed.fsdp that begins with an underscore. Tried
with the releases of torch that README names; docs/new_torch.md says how to try another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DataParallelMeshInfo,
    FSDPMeshInfo,
)

__all__ = [
    "AllGather",
    "FsdpParam",
    "ParamGroup",
    "Placement",
    "ReduceScatter",
    "before_forwards",
    "drop_gradient",
    "give_zero_gradient",
    "groups_of_meshes",
    "has_ended_early",
    "has_own_all_gather",
    "in_backward",
    "in_forward",
    "is_gathered_again",
    "is_last_backward",
    "param_groups",
    "ranks_of_backward",
    "reduced_dtype",
    "reduces_unused",
    "reduction_order",
    "replicas_of",
    "shard_group",
    "uses_torch_collectives",
    "waiting_gradient",
    "will_reduce",
    "without_replicas",
]


# The newest release of torch whose FSDP2 was tried.
NEWEST_TRIED = (2, 15)


class Placement(Protocol):
    """Placement of a shard. dim: the dimension that is cut."""

    dim: int


class FsdpParam(Protocol):
    """FSDP2's record of one parameter.

    sharded_param: the parameter that the optimizer holds, a DTensor. _sharded_param_data: its local
        shard, padded and flat, in its own dtype.
    padded_sharded_param_size: shape of a padded shard. _orig_size: shape without sharding, of this
        rank's part under tensor parallelism.
    unsharded_accumulated_grad: gradient that waits for its reduction, of ``_orig_size``. From torch
        2.15 on it is that of ``_unsharded_param``: see ``give_zero_gradient``.
    """

    sharded_param: Any
    _sharded_param_data: Tensor
    padded_sharded_param_size: torch.Size
    _orig_size: torch.Size
    _unsharded_param: nn.Parameter  # exists after the first gather
    unsharded_accumulated_grad: Tensor | None
    fsdp_placement: Placement
    is_dtensor: bool
    offload_to_cpu: bool
    mp_policy: MixedPrecisionPolicy

    def reset_sharded_param(self) -> None:
        """Read the parameter of the module anew, after it was replaced."""


class ParamGroup(Protocol):
    """FSDP2's record of the parameters that are gathered and reduced together.

    _partial_reduce_output: sum of gradients of an accumulation that is not reduced over the
        replicas yet.
    """

    fsdp_params: Sequence[FsdpParam]
    mesh_info: DataParallelMeshInfo
    post_forward_mesh_info: DataParallelMeshInfo | None
    device: torch.device
    reduce_grads: bool
    all_reduce_grads: bool
    gradient_divide_factor: float | None
    _all_gather_comm: AllGather
    _reduce_scatter_comm: ReduceScatter
    _all_reduce_hook: Callable[[Tensor], None] | None  # of set_all_reduce_hook
    _partial_reduce_output: Tensor | None
    post_backward: Callable[..., None]


def param_groups(module: FSDPModule) -> Sequence[ParamGroup]:
    """Return the parameter groups of a module; none if its children hold all its parameters."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.13: at most one group
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    found: Sequence[ParamGroup] = groups
    return found


def is_last_backward(module: FSDPModule) -> bool:
    """Return the last argument of ``set_is_last_backward`` of the module's root.

    True where ``set_manual_backward_finalization`` (torch 2.15) supersedes it.
    """
    context: Any = module._get_fsdp_state()._state_ctx
    is_superseded: bool = getattr(context, "manual_backward_finalization", False)
    is_last: bool = context.is_last_backward
    return is_last or is_superseded


def has_ended_early(module: FSDPModule) -> bool:
    """Return True if an error has ended a backward of the module's root, and nothing was reset."""
    is_open: bool = module._get_fsdp_state()._state_ctx.post_backward_final_callback_queued
    return is_open and not in_backward()


def reduces_unused(group: ParamGroup) -> bool:
    """Return the argument of ``set_reduce_scatter_unused_params``; torch before 2.13 lacks it."""
    return getattr(group, "reduce_scatter_unused_params", False)


def will_reduce(group: ParamGroup, members: Iterable[FsdpParam]) -> list[bool]:
    """Return True for every one of these parameters whose gradient FSDP2 will reduce."""
    with_unused = reduces_unused(group)
    found = []
    for member in members:
        parameter = getattr(member, "_unsharded_param", None)
        if parameter is None:
            found.append(False)
        elif parameter.grad is not None or member.unsharded_accumulated_grad is not None:
            found.append(True)
        else:
            found.append(with_unused and parameter.requires_grad)
    return found


def waiting_gradient(member: FsdpParam) -> Tensor | None:
    """Return the whole gradient of a parameter that waits for its reduction, None without one."""
    if not hasattr(member, "_unsharded_param"):
        return None
    if member.unsharded_accumulated_grad is not None:
        return member.unsharded_accumulated_grad
    return member._unsharded_param.grad


def drop_gradient(member: FsdpParam) -> None:
    """Drop the whole gradient of a parameter that waits for its reduction."""
    if not _has_one_gradient(member):
        member.unsharded_accumulated_grad = None
    if hasattr(member, "_unsharded_param"):
        member._unsharded_param.grad = None


def give_zero_gradient(member: FsdpParam, dtype: torch.dtype) -> None:
    """Give a parameter a gradient of zeros that waits for its reduction.

    dtype: of the other gradients of the module, which torch before 2.15 wants to be equal.
    """
    parameter = member._unsharded_param
    if _has_one_gradient(member):
        allowed = parameter.grad_dtype  # None: any
        parameter.grad = torch.zeros_like(parameter, dtype=allowed, requires_grad=False)
    else:
        zeros = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        member.unsharded_accumulated_grad = zeros


def _has_one_gradient(member: FsdpParam) -> bool:
    """Return True from torch 2.15 on, where autograd adds up all gradients that wait.

    Before, FSDP2 kept those of another dtype beside the parameter.
    """
    return hasattr(type(member), "unsharded_accumulated_grad")


def reduced_dtype(member: FsdpParam) -> torch.dtype:
    """Return the dtype in which FSDP2 reduces the gradient of a parameter that is reduced alone.

    From torch 2.15 on the reduction of several gradients has the dtype that holds all of theirs.
    """
    policy = member.mp_policy
    if policy.reduce_dtype is not None:
        return policy.reduce_dtype
    own: torch.dtype = member.sharded_param.dtype
    gathered = policy.param_dtype or own
    if not _has_one_gradient(member):
        return gathered
    allowed: torch.dtype | None = member.sharded_param.grad_dtype
    return allowed or gathered  # None: that of the computation


def reduction_order(group: ParamGroup) -> Sequence[int]:
    """Return the order in which the gradients of a group lie in its reduction, by index.

    From torch 2.15 on those of one dtype follow each other.
    """
    order: Sequence[int] | None = getattr(group, "_reduce_scatter_param_indices", None)
    return order or range(len(group.fsdp_params))


def is_gathered_again(module: FSDPModule, group: ParamGroup, *, is_outermost: bool) -> bool:
    """Return True if the backward gathers weights again from all ranks that share them.

    is_outermost: the module can be the root of a forward. By default a root keeps its weights; its
        first forward notes that in ``post_forward_mesh_info``.
    """
    state = module._get_fsdp_state()
    if is_outermost and state._is_root is None and state._auto_reshard_after_forward:
        return False
    # The mesh that holds the weights after the forward: None keeps them gathered, and
    # reshard_after_forward=int has a smaller one.
    return group.post_forward_mesh_info == group.mesh_info


def ranks_of_backward(group: ParamGroup) -> int | None:
    """Return the ranks among which the backward gathers weights that all ranks of the group share,
    with ``reshard_after_forward=int``; else None.
    """
    info = group.post_forward_mesh_info
    if info is None or info == group.mesh_info:
        return None
    size: int = cast(Any, info).shard_mesh_size
    return size


def before_forwards(module: FSDPModule, call: Callable[[], None]) -> Callable[[], None]:
    """Run ``call`` before every forward that begins with this module, ahead of all gathers.

    Returns:
        a function that undoes it.
    """
    state: Any = module._get_fsdp_state()
    begin = state._root_pre_forward

    def root_pre_forward(*args: Any, **kwargs: Any) -> Any:
        if not in_forward(module):  # else this module is part of a forward
            call()
        return begin(*args, **kwargs)

    state._root_pre_forward = root_pre_forward

    def undo() -> None:
        vars(state).pop("_root_pre_forward", None)

    return undo


def in_forward(module: FSDPModule) -> bool:
    """Return True while a forward runs that has begun with this module or one around it."""
    return module._get_fsdp_state()._state_ctx.iter_forward_root is not None


def in_backward() -> bool:
    """Return True while autograd runs a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


def has_own_all_gather(member: FsdpParam) -> bool:
    """Return True if the parameter says itself what is gathered of it, as torchao's float8 does."""
    return hasattr(member.sharded_param._local_tensor, "fsdp_pre_all_gather")


def uses_torch_collectives(group: ParamGroup) -> bool:
    """Return True if the collectives of a group are those of torch."""
    collectives = group._all_gather_comm, group._reduce_scatter_comm
    return all(type(each).__module__.startswith("torch.") for each in collectives)


# ---- meshes ----


def shard_group(mesh_info: DataParallelMeshInfo) -> ProcessGroup | None:
    """Return the process group over which parameters are sharded, None if they are not."""
    if not isinstance(mesh_info, FSDPMeshInfo):
        return None
    group: ProcessGroup = mesh_info.shard_process_group
    return group


def replicas_of(mesh_info: DataParallelMeshInfo) -> tuple[ProcessGroup, list[list[int]]] | None:
    """Return the process group over the replicas of a mesh of replicas and shards (HSDP) or of
    ``replicate()``, and the global ranks of every replica; None for another mesh.
    """
    if mesh_info.replicate_mesh_dim is None:
        return None
    mesh: DeviceMesh = mesh_info.mesh
    rows = mesh.mesh.movedim(mesh_info.replicate_mesh_dim, 0)
    rows = rows.reshape(len(rows), -1)
    return mesh.get_group(mesh_info.replicate_mesh_dim), rows.tolist()


def groups_of_meshes(group: ParamGroup) -> dict[tuple[int, ...], list[ProcessGroup]]:
    """Return this rank's process groups of every mesh over which parameters are split or copied.

    The keys are the ascending global ranks of a mesh. Its dimensions of tensor and expert
    parallelism count. All-reduces over one of its groups after the other reach all ranks, so groups
    of one rank are left out, and of several meshes of the same ranks the first serves.
    """
    by_ranks: dict[tuple[int, ...], list[ProcessGroup]] = {}
    for mesh in {member.sharded_param.device_mesh for member in group.fsdp_params}:
        ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
        if ranks not in by_ranks:
            by_ranks[ranks] = [each for each in mesh.get_all_groups() if each.size() > 1]
    return by_ranks


def without_replicas(mesh_info: DataParallelMeshInfo) -> DataParallelMeshInfo:
    """Return the record of a mesh without its replicas, over which FSDP2 all-reduces nothing.

    The record of ``replicate()`` becomes one that stands for no collective.
    """
    has_shards = isinstance(mesh_info, FSDPMeshInfo)
    kind = FSDPMeshInfo if has_shards else DataParallelMeshInfo
    values = {field.name: getattr(mesh_info, field.name) for field in fields(kind) if field.init}
    if has_shards:
        values["replicate_mesh_dim"] = None
    return kind(**values)
