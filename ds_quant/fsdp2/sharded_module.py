"""Read FSDP2: the modules that ``fully_shard`` has wrapped, and the shards of their parameters.

The only module that names internals of torch.distributed.fsdp.

[Note: sharded modules] A *sharded module* is a module that ``fully_shard`` was called on, with the
parameters that it gathers and reduces together. A collective of FSDP2 moves one *row* per rank: the
shards of all these parameters, end to end. A shard is a chunk of dim 0, padded to the length of the
largest one; the padding is never encoded.

[Note: replicas] With a mesh of replicas and shards (HSDP) FSDP2 all-reduces the reduced gradients
itself, in a call that nothing replaces. It does so where the record of the mesh says that there are
replicas. So that record is replaced by one of the shards alone, and the custom reduce-scatter
returns gradients that are summed over the replicas, too. Placements of the parameters stay as they
are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

from ds_quant.config.errors import KEY
from ds_quant.runtime.param import Param


class UnsupportedModel(ValueError):
    """A setting of ``fully_shard`` that the collectives cannot serve."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedModule:
    """One module that ``fully_shard`` was called on, as this rank sees it.

    params: its parameters, in the order of a row. members: FSDP2's records of them.
    group: FSDP2's record of the module's parameters.
    widths: elements of a padded shard, by parameter.
    lengths: elements of every rank's shard without padding, by parameter.
    dtype: of the gathered weights. gradient_dtype: in which FSDP2 reduces gradients.
    """

    module: FSDPModule
    name: str
    params: Sequence[Param]
    members: Sequence[Any]
    group: Any
    widths: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    gradient_dtype: torch.dtype

    @cached_property
    def offsets(self) -> list[int]:
        """First element of every parameter in a row."""
        return list(accumulate(self.widths, initial=0))[:-1]

    @cached_property
    def row_numel(self) -> int:
        """Elements of a row, padding included."""
        return sum(self.widths)

    def trained(self) -> tuple[bool, ...]:
        """Return for every parameter True if it is trained now; FSDP2 reduces no others."""
        return tuple([member.sharded_param.requires_grad for member in self.members])

    def part(self, kept: Sequence[bool]) -> ShardedModule:
        """Return the same with some of the parameters, whose rows are shorter."""
        return replace(
            self,
            params=list(compress(self.params, kept)),
            members=list(compress(self.members, kept)),
            widths=tuple(compress(self.widths, kept)),
            lengths=tuple(compress(self.lengths, kept)),
        )

    @property
    def crosses(self) -> bool:
        """True unless the user has called ``set_requires_all_reduce(False)``."""
        return bool(self.group.all_reduce_grads)

    @property
    def divide_factor(self) -> float | None:
        """The user's ``set_gradient_divide_factor``."""
        factor: float | None = self.group.gradient_divide_factor
        return factor

    def reduce_between_nodes(self) -> None:
        """Keep FSDP2 from all-reducing gradients over replicas: see [Note: replicas]."""
        replicated = self.group.mesh_info
        if not isinstance(replicated, HSDPMeshInfo):
            return
        sharded = FSDPMeshInfo(
            replicated.mesh,
            shard_mesh_dim=replicated.shard_mesh_dim,
            dp_mesh_dims=replicated.dp_mesh_dims,
            spmd_mesh=replicated.spmd_mesh,
        )
        self.group.mesh_info = sharded
        if self.group.post_forward_mesh_info is replicated:
            self.group.post_forward_mesh_info = sharded

    def shards(self) -> list[Tensor]:
        """Return this rank's shards, padded and flat, in their own dtype."""
        return [member._sharded_param_data for member in self.members]

    def versions(self) -> list[int]:
        """Return a number per shard that grows with every write into it."""
        return [member.sharded_param._version for member in self.members]


def sharded_modules(
    model: nn.Module, params: Mapping[int, Param], ranks: int
) -> list[ShardedModule]:
    """Return the sharded modules of ``model`` in module order.

    Args:
        params: the records of the parameters by the id of the sharded parameter.
        ranks: of the process group that shards them.

    Raises:
        UnsupportedModel: naming the module, the setting and the way out.
    """
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in _param_groups(name, module):
            members = list(group.fsdp_params)
            dtype = _gathered_dtype(name, members, group.mp_policy.param_dtype)
            records = [params[id(member.sharded_param)] for member in members]
            found.append(
                ShardedModule(
                    module=module,
                    name=name,
                    params=records,
                    members=members,
                    group=group,
                    widths=tuple([member.padded_sharded_param_size.numel() for member in members]),
                    lengths=tuple([_lengths(member, ranks) for member in members]),
                    dtype=dtype,
                    gradient_dtype=group.mp_policy.reduce_dtype or dtype,
                )
            )
    return found


def root_state(model: nn.Module) -> Any:
    """Return FSDP2's state of the root, which knows whether a backward is the last one."""
    return model._get_fsdp_state()._state_ctx  # type: ignore[operator]  # FSDPModule's, not typed


def shard_group(model: nn.Module) -> Any:
    """Return the process group over which all modules are sharded.

    Raises:
        UnsupportedModel: the model holds no FSDPModule, or modules have other meshes.
    """
    found: list[tuple[Any, list[int]]] = []  # process group and its ranks
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in _param_groups(name, module):
            process_group = group.mesh_info.shard_process_group
            ranks = dist.get_process_group_ranks(process_group)
            found.append((process_group, ranks))
            first_ranks = found[0][1]
            if ranks != first_ranks:
                raise _unsupported(
                    name,
                    f"a mesh of ranks {ranks}, and another module one of ranks {first_ranks}",
                    "give fully_shard one mesh",
                )
    if not found:
        raise UnsupportedModel(
            f"{type(model).__name__} holds no module that fully_shard was called on: call "
            "fully_shard before ds_quant.fsdp2.attach"
        )
    return found[0][0]


def _param_groups(name: str, module: FSDPModule) -> Iterator[Any]:
    """Yield the parameter group of a module, if it has parameters of its own."""
    groups = module._get_fsdp_state()._fsdp_param_groups
    if len(groups) > 1:
        raise _unsupported(
            name,
            f"{len(groups)} groups of parameters with meshes of their own",
            "give fully_shard one mesh",
        )
    for group in groups:
        if not isinstance(group.mesh_info, FSDPMeshInfo):
            raise _unsupported(
                name,
                "a mesh that shards nothing",
                "give fully_shard a mesh of one dimension, or of replicas and shards",
            )
        yield group


def _lengths(member: Any, ranks: int) -> tuple[int, ...]:
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


def _gathered_dtype(
    name: str, members: Sequence[Any], param_dtype: torch.dtype | None
) -> torch.dtype:
    """Return the dtype of a module's gathered weights, and refuse what cannot be served."""
    dtypes = set()
    for member in members:
        if member.fsdp_placement.dim != 0:
            raise _unsupported(
                name,
                f"shard_placement_fn shards dim {member.fsdp_placement.dim}",
                "shard dim 0",
            )
        if member.is_dtensor:
            raise _unsupported(
                name,
                "parameters that were DTensors before (tensor parallel)",
                "leave the block out of models with tensor parallelism",
            )
        if member.offload_to_cpu:
            raise _unsupported(name, "CPUOffloadPolicy", "leave offload_policy out")
        if hasattr(member._sharded_local_tensor, "fsdp_pre_all_gather"):
            raise _unsupported(
                name,
                "parameters with an all-gather of their own (float8 of torchao)",
                "switch enable_fsdp_float8_all_gather off",
            )
        dtypes.add(param_dtype or member.sharded_param.dtype)
    if len(dtypes) > 1:
        raise _unsupported(
            name,
            f"weights of several dtypes ({', '.join(sorted(map(str, dtypes)))})",
            "give MixedPrecisionPolicy a param_dtype, or wrap them in modules of their own",
        )
    (dtype,) = dtypes
    return dtype


def _unsupported(name: str, setting: str, way_out: str) -> UnsupportedModel:
    return UnsupportedModel(f"{KEY}: module {name or '(root)'} has {setting}: {way_out}")
