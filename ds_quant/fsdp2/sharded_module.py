"""The modules that ``fully_shard`` has wrapped, as this rank sees them.

[Note: sharded modules] A *sharded module* is a module that ``fully_shard`` was called on, with the
parameters that it gathers and reduces together. A collective of FSDP2 moves one *row* per rank: the
shards of all these parameters, end to end. A shard is a chunk of dim 0, padded to the length of the
largest one, or an even chunk of another dim; the padding is never encoded. Under tensor parallelism
all shapes are those of this rank's part, which is what FSDP2 shards.

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

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ds_quant.comm.rows import RowLayout
from ds_quant.fsdp2 import torch_names
from ds_quant.fsdp2.meshes import unsupported
from ds_quant.fsdp2.torch_names import FsdpParam, ParamGroup
from ds_quant.policy.route import Routes
from ds_quant.policy.scheme import FLOATS, is_packed
from ds_quant.runtime.param import Param
from ds_quant.runtime.run import Level


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedModule:
    """One module that ``fully_shard`` was called on, as this rank sees it.

    params: its parameters, in the order of a row. members: FSDP2's records of them.
    group: FSDP2's record of the module's parameters.
    is_outermost: no other module that ``fully_shard`` was called on holds it.
    level: the ranks that share them.
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
    is_outermost: bool
    level: Level
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

    @property
    def numel(self) -> int:
        """Elements of its parameters, on all ranks together."""
        return sum(param.shape.numel() for param in self.params)

    @property
    def gathers(self) -> int:
        """Gathers over all its ranks in a micro-step: for forward, and again for backward."""
        if torch_names.is_gathered_again(self.module, self.group, is_outermost=self.is_outermost):
            return 2
        return 1

    @cached_property
    def layout(self) -> RowLayout:
        """Places of the shards in the rows that the collectives move."""
        numels = tuple([sum(lengths) for lengths in self.lengths])
        return RowLayout(numels, self.widths, self.level.num_shards, is_flat=True)

    @cached_property
    def offsets(self) -> list[int]:
        """First element of every parameter in a row."""
        return self.layout.offsets

    @cached_property
    def row_numel(self) -> int:
        """Elements of a row, padding included."""
        return self.layout.row_numel

    def reduced_part(self, kept: Sequence[bool]) -> ShardedModule:
        """Return the same with some of the parameters, as a reduction of their gradients has them:
        in its order, in shorter rows.
        """
        indices = [index for index in torch_names.reduction_order(self.group) if kept[index]]
        return replace(
            self,
            params=[self.params[index] for index in indices],
            members=[self.members[index] for index in indices],
            widths=tuple([self.widths[index] for index in indices]),
            lengths=tuple([self.lengths[index] for index in indices]),
            dtypes=tuple([self.dtypes[index] for index in indices]),
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
    def is_replicated(self) -> bool:
        """True if every rank holds all parameters of the module, instead of shards."""
        return not self.level.routes.sends_weights

    @cached_property
    def defers_inter_node(self) -> bool:
        """True if gradients cross between nodes in the last backward of a step only."""
        return self.level.routes.gradients().keeps_partial_sums

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

    def finite_flags(self, row: Tensor) -> list[Tensor]:
        """Return one () bool on the device, True if this rank's row is finite without its padding;
        nothing for a row of padding.
        """
        rank = self.level.shard
        values = []
        for start, lengths in zip(self.offsets, self.lengths, strict=True):
            if lengths[rank]:
                values.append(row[start : start + lengths[rank]])
        if not values:
            return []
        return [torch.isfinite(torch.stack(torch._foreach_norm(values, math.inf))).all()]

    def shards(self) -> list[Tensor]:
        """Return this rank's shards, padded and flat, in their own dtype."""
        return [member._sharded_param_data for member in self.members]


def sharded_modules(
    model: nn.Module, level_of: Callable[[ParamGroup], Level | None]
) -> list[ShardedModule]:
    """Return the sharded modules of ``model`` in module order.

    level_of: returns the ranks that share a parameter group; None: its parameters stay on one rank.
    """
    params = _Params(model)
    outermost = set(_outermost_modules(model))
    found = []
    for name, module, group in groups_of(model):
        level = level_of(group)
        if level is None:
            continue
        members = list(group.fsdp_params)
        records = [params.of(member, level.routes) for member in members]
        dtypes = tuple([gathered_dtype(member) for member in members])
        found.append(
            ShardedModule(
                module=module,
                name=name,
                params=records,
                members=members,
                group=group,
                is_outermost=module in outermost,
                level=level,
                widths=tuple([member.padded_sharded_param_size.numel() for member in members]),
                lengths=tuple([_lengths(member, level.num_shards) for member in members]),
                dtypes=dtypes,
                gradient_dtype=gradient_dtype(group),
                fsdp_gathers=_reason_of_own_gather(members, dtypes),
                was_trained=[member.sharded_param.requires_grad for member in members],
            )
        )
    return found


def refuse_unsupported(model: nn.Module) -> None:
    """Refuse settings of ``fully_shard`` that the collectives cannot serve, and gradients of an
    accumulation that they would lose.

    Raises:
        AttachError: naming the module, the setting and the way out.
    """
    for name, _, group in groups_of(model):
        if not torch_names.uses_torch_collectives(group):
            raise unsupported(
                name,
                "collectives of set_custom_all_gather or set_custom_reduce_scatter",
                "leave them out: the block replaces both",
            )
        if group._partial_reduce_output is not None:
            raise unsupported(
                name,
                "gradients that set_requires_all_reduce(False) has kept from the other replicas",
                "call attach between optimizer steps",
            )
        for member in group.fsdp_params:
            if member.offload_to_cpu:
                raise unsupported(
                    name,
                    "offload_policy=CPUOffloadPolicy(...)",
                    "allowed: OffloadPolicy(), the default; leave offload_policy out",
                )


def named_parameters(
    model: nn.Module, modules: Sequence[ShardedModule] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a model and their names, sharded and as its modules hold them now.

    A sharded parameter that its module does not hold now has the name of the module, unless it is
    one of ``modules``.
    """
    found = [
        (param.name, member.sharded_param)
        for sharded in modules
        for param, member in zip(sharded.params, sharded.members, strict=True)
    ]
    found += model.named_parameters()
    for name, _, group in groups_of(model):
        found += [(name, member.sharded_param) for member in group.fsdp_params]
    yielded: set[int] = set()  # ids
    for name, parameter in found:
        if id(parameter) not in yielded:
            yielded.add(id(parameter))
            yield name, parameter


def groups_of(model: nn.Module) -> Iterator[tuple[str, FSDPModule, ParamGroup]]:
    """Yield the name of a module, the module and one of its parameter groups, in module order.

    Modules that one call of ``fully_shard`` was given share a group: the first stands for all. A
    module has several groups if its parameters have several meshes.
    """
    found = set()  # ids
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in torch_names.param_groups(module):
            if id(group) not in found:
                found.add(id(group))
                yield name, module, group


def _outermost_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that ``fully_shard`` was called on and that no other of them holds."""
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from _outermost_modules(child)


class _Params:
    """Makes the record of every parameter, numbered as ``named_parameters`` has them."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._places: dict[int, tuple[int, str]] = {}  # by id: index and name
        for index, (name, parameter) in enumerate(model.named_parameters()):
            self._places[id(parameter)] = index, name

    def of(self, member: FsdpParam, routes: Routes) -> Param:
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
            routes=routes,
        )

    def _place(self, member: FsdpParam) -> tuple[int, str] | None:
        for parameter in (member.sharded_param, getattr(member, "_unsharded_param", None)):
            place = self._places.get(id(parameter))
            if place is not None:
                return place
        return None


def _lengths(member: FsdpParam, ranks: int) -> tuple[int, ...]:
    """Return the elements of every rank's shard of a parameter, without padding."""
    if member.fsdp_placement.dim != 0:  # FSDP2 shards other dims evenly only
        return (member._orig_size.numel() // ranks,) * ranks
    rows = member._orig_size[0]
    rows_of_shard = member.padded_sharded_param_size[0]
    elements_of_row = member._orig_size.numel() // rows if rows else 0
    lengths = []
    for rank in range(ranks):
        start = min(rank * rows_of_shard, rows)
        stop = min(start + rows_of_shard, rows)
        lengths.append((stop - start) * elements_of_row)
    return tuple(lengths)


def gathered_dtype(member: FsdpParam) -> torch.dtype:
    """Return the dtype in which FSDP2 gathers a parameter.

    One with an all-gather of its own counts as bytes.
    """
    if torch_names.has_own_all_gather(member):
        return torch.uint8
    own: torch.dtype = member.sharded_param.dtype
    if not own.is_floating_point:
        return own
    return member.mp_policy.param_dtype or own


def gradient_dtype(group: ParamGroup) -> torch.dtype:
    """Return the dtype in which FSDP2 reduces the gradients of a module."""
    floats = [each for each in group.fsdp_params if each.sharded_param.dtype.is_floating_point]
    trained = [member for member in floats if member.sharded_param.requires_grad]
    dtypes = [torch_names.reduced_dtype(member) for member in trained or floats[:1]]
    if not dtypes:
        return torch.float32  # nothing can be trained
    return reduce(torch.promote_types, dtypes)


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
    sizes = [torch_names.ranks_of_backward(sharded.group) for sharded in modules]
    gathered_among = [size for size in sizes if size is not None]
    if gathered_among:
        ranks = " or ".join(map(str, sorted(set(gathered_among))))
        yield (
            f"FSDP2 gathers the weights of {len(gathered_among)} module(s) again for the backward, "
            f"among {ranks} ranks and in full precision: the volume leaves these gathers out"
        )
    reduces = [sharded for sharded in modules if not sharded.reduces]
    if reduces:
        first = reduces[0]
        dtype = str(first.gradient_dtype).removeprefix("torch.")
        yield (
            f"FSDP2 reduces the gradients of {len(reduces)} module(s) itself, such as "
            f"{first.title}, whose gradients are {dtype}"
        )
