"""The modules that ``fully_shard`` has wrapped, as this rank sees them.

[Note: sharded modules] A *sharded module* is a module that ``fully_shard`` was called on, with the
parameters that it gathers and reduces together. A collective of FSDP2 moves one *row* per rank: the
shards of all these parameters, end to end. A shard is a chunk of dim 0, padded to the length of the
largest one; the padding is never encoded.

[Note: replicas] With a mesh of replicas and shards (HSDP) FSDP2 all-reduces the reduced gradients
itself, in a call that nothing replaces. It does so where the record of the mesh says that there are
replicas. So that record is replaced by one of the shards alone, and the custom reduce-scatter
returns gradients that are summed over the replicas, too. Placements of the parameters stay as they
are.

[Note: gathers of FSDP2] FSDP2 gathers weights itself where the codecs cannot serve them: weights of
several dtypes in one module, dtypes other than fp32, bf16 and fp16, and weights with an all-gather
of their own (float8 of torchao).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, compress

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from ds_quant.config.errors import KEY
from ds_quant.fsdp2 import torch_names
from ds_quant.fsdp2.torch_names import FsdpParam, ParamGroup
from ds_quant.policy.route import Routes
from ds_quant.policy.scheme import FLOATS, is_packed
from ds_quant.runtime.param import Param


class UnsupportedModel(ValueError):
    """A setting of ``fully_shard`` that the collectives cannot serve."""


# ---- meshes ----


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The ranks that share a model.

    ranks: global ranks, replica by replica, then shard by shard.
    shards: ranks among which one copy of the model is sharded. Fewer than ``ranks``: the others
        hold replicas.
    shard_group: their process group.
    replica_group: process group of the ranks that hold the same shard, None without replicas.
    device: of the collectives.
    """

    ranks: tuple[int, ...]
    shards: int
    shard_group: ProcessGroup
    replica_group: ProcessGroup | None
    device: torch.device

    @property
    def replicas(self) -> int:
        """Number of copies of the model."""
        return len(self.ranks) // self.shards

    @property
    def is_part(self) -> bool:
        """True if other ranks of the job do not share the model."""
        return len(self.ranks) < dist.get_world_size()


def mesh_of(model: nn.Module) -> Mesh | None:
    """Return the mesh of all sharded modules; None if no module holds a parameter.

    Raises:
        UnsupportedModel: the model holds no FSDPModule, or modules have other meshes.
    """
    first: Mesh | None = None
    holds_module = False
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        holds_module = True
        group = _param_group(name, module)
        if group is None:
            continue
        mesh = _mesh_of_group(name, group)
        if first is None:
            first = mesh
        elif (mesh.ranks, mesh.shards) != (first.ranks, first.shards):
            raise _unsupported(
                name,
                f"a mesh of ranks {list(mesh.ranks)}, and another module one of ranks "
                f"{list(first.ranks)}",
                "give fully_shard one mesh",
            )
    if not holds_module:
        raise UnsupportedModel(
            f"{KEY}: {type(model).__name__} holds no module that fully_shard was called on: call "
            "fully_shard before ds_quant.fsdp2.attach"
        )
    return first


def _mesh_of_group(name: str, group: ParamGroup) -> Mesh:
    shard_group = torch_names.shard_group(group.mesh_info)
    if shard_group is None:
        raise _unsupported(
            name,
            "a mesh that shards nothing",
            "give fully_shard a mesh of one dimension, or of replicas and shards",
        )
    ranks = dist.get_process_group_ranks(shard_group)
    replicas = torch_names.replicas_of(group.mesh_info)
    replica_group: ProcessGroup | None = None
    if replicas is not None:
        replica_group, by_replica = replicas
        ranks = [rank for replica in by_replica for rank in replica]
        if len(by_replica) == 1:
            replica_group = None
    return Mesh(
        ranks=tuple(ranks),
        shards=dist.get_world_size(shard_group),
        shard_group=shard_group,
        replica_group=replica_group,
        device=group.device,
    )


# ---- modules ----


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedModule:
    """One module that ``fully_shard`` was called on, as this rank sees it.

    params: its parameters, in the order of a row. members: FSDP2's records of them.
    group: FSDP2's record of the module's parameters.
    widths: elements of a padded shard, by parameter.
    lengths: elements of every rank's shard without padding, by parameter.
    dtypes: of the gathered weights, by parameter.
    gradient_dtype: in which FSDP2 reduces gradients.
    fsdp_gathers: reason because of which FSDP2 gathers the weights itself, see [Note: gathers of
        FSDP2]; "" if the codecs serve them.
    was_trained: by parameter, True if it was trained at the last optimizer step.
    """

    module: FSDPModule
    name: str
    params: Sequence[Param]
    members: Sequence[FsdpParam]
    group: ParamGroup
    widths: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    gradient_dtype: torch.dtype
    fsdp_gathers: str
    was_trained: list[bool]

    @property
    def title(self) -> str:
        """Name of the module in messages."""
        return self.name or "the root"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of all gathered weights, where the codecs serve them."""
        return self.dtypes[0]

    @property
    def reduces(self) -> bool:
        """True if the codecs take gradients of this dtype; else FSDP2 reduces them itself."""
        return self.gradient_dtype in FLOATS

    @cached_property
    def offsets(self) -> list[int]:
        """First element of every parameter in a row."""
        return list(accumulate(self.widths, initial=0))[:-1]

    @cached_property
    def row_numel(self) -> int:
        """Elements of a row, padding included."""
        return sum(self.widths)

    def part(self, kept: Sequence[bool]) -> ShardedModule:
        """Return the same with some of the parameters, whose rows are shorter."""
        return replace(
            self,
            params=list(compress(self.params, kept)),
            members=list(compress(self.members, kept)),
            widths=tuple(compress(self.widths, kept)),
            lengths=tuple(compress(self.lengths, kept)),
            dtypes=tuple(compress(self.dtypes, kept)),
        )

    def follow_training(self) -> list[Param]:
        """Let ``Param.trained`` follow ``requires_grad``. Return the parameters that it changes.

        One that was frozen since the last step counts as trained once more: this step may have
        moved it.
        """
        changed: list[Param] = []
        for index, (param, member) in enumerate(zip(self.params, self.members, strict=True)):
            is_trained = member.sharded_param.requires_grad
            trained = is_trained or self.was_trained[index]
            self.was_trained[index] = is_trained
            if trained != param.trained:
                param.set_trained(trained)
                changed.append(param)
        return changed

    @property
    def is_last_backward(self) -> bool:
        """True unless the user has declared that another backward follows in this step."""
        return self.group.all_reduce_grads and torch_names.is_last_backward(self.module)

    def reduce_between_nodes(self) -> bool:
        """Keep FSDP2 from all-reducing gradients over replicas: see [Note: replicas].

        Returns:
            True if there are replicas.
        """
        replicated = self.group.mesh_info
        if torch_names.replicas_of(replicated) is None:
            return False
        sharded = torch_names.without_replicas(replicated)
        self.group.mesh_info = sharded
        if self.group.post_forward_mesh_info is replicated:
            self.group.post_forward_mesh_info = sharded
        return True

    def shards(self) -> list[Tensor]:
        """Return this rank's shards, padded and flat, in their own dtype."""
        return [member._sharded_param_data for member in self.members]


def sharded_modules(model: nn.Module, routes: Routes, mesh: Mesh) -> list[ShardedModule]:
    """Return the sharded modules of ``model`` in module order."""
    params = _Params(model, routes)
    found = []
    for name, module, group in _groups(model):
        members = list(group.fsdp_params)
        records = [params.of(member) for member in members]
        dtypes = tuple([_gathered_dtype(group, member) for member in members])
        found.append(
            ShardedModule(
                module=module,
                name=name,
                params=records,
                members=members,
                group=group,
                widths=tuple([member.padded_sharded_param_size.numel() for member in members]),
                lengths=tuple([_lengths(member, mesh.shards) for member in members]),
                dtypes=dtypes,
                gradient_dtype=_gradient_dtype(group, members),
                fsdp_gathers=_reason_of_own_gather(members, dtypes),
                was_trained=[member.sharded_param.requires_grad for member in members],
            )
        )
    return found


def refuse_unsupported(model: nn.Module, mesh: Mesh) -> None:
    """Refuse settings of ``fully_shard`` that the collectives cannot serve.

    Raises:
        UnsupportedModel: naming the module, the setting and the way out.
    """
    for name, _, group in _groups(model):
        if not torch_names.uses_torch_collectives(group):
            raise _unsupported(
                name,
                "collectives of set_custom_all_gather or set_custom_reduce_scatter",
                "leave them out: the block replaces both",
            )
        for member in group.fsdp_params:
            _refuse(name, member, mesh)


def sharded_parameters(model: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters of a model, sharded and as its modules hold them now."""
    yield from model.parameters()
    for _, _, group in _groups(model):
        for member in group.fsdp_params:
            yield member.sharded_param


def _groups(model: nn.Module) -> Iterator[tuple[str, FSDPModule, ParamGroup]]:
    """Yield the name of a module, the module and its parameters, in module order.

    Modules that one call of ``fully_shard`` was given share a group: the first stands for all.
    """
    found = set()  # ids
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        group = _param_group(name, module)
        if group is not None and id(group) not in found:
            found.add(id(group))
            yield name, module, group


class _Params:
    """Makes the record of every parameter, numbered as ``named_parameters`` has them."""

    def __init__(self, model: nn.Module, routes: Routes) -> None:
        self._routes = routes
        self._modules = dict(model.named_modules())
        self._places: dict[int, tuple[int, str]] = {}  # by id: index and name
        for index, (name, parameter) in enumerate(model.named_parameters()):
            self._places[id(parameter)] = index, name

    def of(self, member: FsdpParam) -> Param:
        """Return a record of a parameter, which the module may hold sharded or gathered."""
        place = self._place(member)
        if place is None:  # replaced after ``fully_shard``, as transformers does while it loads
            member.reset_sharded_param()
            place = self._place(member)
        assert place is not None, "a parameter of a sharded module is one of the model"
        index, name = place
        parameter = member.sharded_param
        owner = self._modules.get(name.rpartition(".")[0])
        return Param(
            index=index,
            name=name,
            shape=member._orig_size,
            trained=parameter.requires_grad,
            packed=not torch_names.has_own_all_gather(member)
            and is_packed(parameter._local_tensor, owner),
            tensor=parameter,
            routes=self._routes,
        )

    def _place(self, member: FsdpParam) -> tuple[int, str] | None:
        for parameter in (member.sharded_param, getattr(member, "_unsharded_param", None)):
            place = self._places.get(id(parameter))
            if place is not None:
                return place
        return None


def _param_group(name: str, module: FSDPModule) -> ParamGroup | None:
    """Return the parameter group of a module; None if it has no parameters of its own."""
    groups: Mapping[int, ParamGroup] = dict(enumerate(torch_names.param_groups(module)))
    if len(groups) > 1:
        raise _unsupported(
            name,
            f"{len(groups)} groups of parameters with meshes of their own",
            "give fully_shard one mesh",
        )
    return groups.get(0)


def _lengths(member: FsdpParam, ranks: int) -> tuple[int, ...]:
    """Return the elements of every rank's shard of a parameter, without padding."""
    rows = member._orig_size[0]
    rows_of_shard = member.padded_sharded_param_size[0]
    elements_of_row = member._orig_size.numel() // rows if rows else 0
    lengths = []
    for rank in range(ranks):
        start = min(rank * rows_of_shard, rows)
        stop = min(start + rows_of_shard, rows)
        lengths.append((stop - start) * elements_of_row)
    return tuple(lengths)


def _refuse(name: str, member: FsdpParam, mesh: Mesh) -> None:
    """Refuse a parameter that the collectives cannot serve.

    Raises:
        UnsupportedModel
    """
    if member.fsdp_placement.dim != 0:
        raise _unsupported(
            name,
            f"shard_placement_fn shards dim {member.fsdp_placement.dim}",
            "shard dim 0",
        )
    if member.is_dtensor and member.sharded_param.device_mesh.size() > len(mesh.ranks):
        device_mesh = member.sharded_param.device_mesh
        axes = dict(zip(device_mesh.mesh_dim_names or (), device_mesh.shape, strict=False))
        raise _unsupported(
            name,
            f"tensor parallel parameters on a mesh of {axes or tuple(device_mesh.shape)}",
            "leave the block out of models with tensor parallelism",
        )
    if member.offload_to_cpu:
        raise _unsupported(name, "CPUOffloadPolicy", "leave offload_policy out")


def _gathered_dtype(group: ParamGroup, member: FsdpParam) -> torch.dtype:
    """Return the dtype in which FSDP2 gathers a parameter.

    One with an all-gather of its own counts as bytes.
    """
    if torch_names.has_own_all_gather(member):
        return torch.uint8
    own: torch.dtype = member.sharded_param.dtype
    if not own.is_floating_point:
        return own
    return group.mp_policy.param_dtype or own


def _gradient_dtype(group: ParamGroup, members: Sequence[FsdpParam]) -> torch.dtype:
    """Return the dtype in which FSDP2 reduces the gradients of a module."""
    if group.mp_policy.reduce_dtype is not None:
        return group.mp_policy.reduce_dtype
    if group.mp_policy.param_dtype is not None:
        return group.mp_policy.param_dtype
    floats = [member for member in members if member.sharded_param.dtype.is_floating_point]
    trained = [member for member in floats if member.sharded_param.requires_grad]
    for member in (*trained, *floats):
        own: torch.dtype = member.sharded_param.dtype
        return own
    return torch.float32  # nothing can be trained


def _reason_of_own_gather(members: Sequence[FsdpParam], dtypes: Sequence[torch.dtype]) -> str:
    """See ``ShardedModule.fsdp_gathers``."""
    if any(torch_names.has_own_all_gather(member) for member in members):
        return "an all-gather of their own"
    names = sorted({str(dtype).removeprefix("torch.") for dtype in dtypes})
    if len(names) > 1:
        return f"several dtypes ({', '.join(names)})"
    if dtypes[0] not in FLOATS:
        return names[0]
    return ""


def gathered_by_fsdp(modules: Sequence[ShardedModule]) -> Iterator[str]:
    """Yield a notice of the modules whose weights or gradients FSDP2 sends itself."""
    gathers = [sharded for sharded in modules if sharded.fsdp_gathers]
    if gathers:
        first = gathers[0]
        yield (
            f"FSDP2 gathers the weights of {len(gathers)} module(s) itself, such as "
            f"{first.title}, which holds weights of {first.fsdp_gathers}"
        )
    reduces = [sharded for sharded in modules if not sharded.reduces]
    if reduces:
        first = reduces[0]
        dtype = str(first.gradient_dtype).removeprefix("torch.")
        yield (
            f"FSDP2 reduces the gradients of {len(reduces)} module(s) itself, such as "
            f"{first.title}, whose gradients are {dtype}"
        )


def _unsupported(name: str, setting: str, way_out: str) -> UnsupportedModel:
    return UnsupportedModel(f"{KEY}: module {name or '(root)'} has {setting}: {way_out}")
