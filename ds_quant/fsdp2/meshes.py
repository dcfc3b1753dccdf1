"""The meshes over which a model is sharded, and all ranks that share the model.

[Note: ranks of a model] ``fully_shard`` shards a module over one dimension of a mesh, two with
replicas. Other dimensions split the parameters of the module before (tensor or expert parallelism):
such a parameter is a DTensor on a mesh of all these dimensions. All its ranks compute one step
together, so they vote together, although each exchanges weights and gradients with those of its own
mesh only. Ranks that no parameter's mesh joins, such as stages of a pipeline, train apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ds_quant.config.errors import KEY, AttachError
from ds_quant.fsdp2 import torch_names
from ds_quant.fsdp2.torch_names import ParamGroup


def unsupported(name: str, setting: str, way_out: str) -> AttachError:
    """Return the error of a module, given by its name, with a setting that cannot be served."""
    return AttachError(f"{KEY}: module {name or '(root)'} has {setting}: {way_out}")


@dataclass(frozen=True, eq=False, kw_only=True)
class Mesh:
    """The ranks that share some modules.

    ranks: global ranks, replica by replica, then shard by shard.
    shards: ranks among which one copy of the modules is sharded. Fewer than ``ranks``: the others
        hold replicas.
    shard_group: their process group, None for a mesh of ``replicate()``.
    replica_group: process group of the ranks that hold the same shard, None without replicas.
    device: of the collectives.
    """

    ranks: tuple[int, ...]
    shards: int
    shard_group: ProcessGroup | None
    replica_group: ProcessGroup | None
    device: torch.device

    @property
    def replicas(self) -> int:
        """Number of copies of the modules."""
        return len(self.ranks) // self.shards

    @property
    def is_replicated(self) -> bool:
        """True if every rank holds all parameters of the modules."""
        return self.shards == 1 and self.replicas > 1

    @property
    def has_node_replicas(self) -> bool:
        """True if replicas are sharded, each over the ranks of a node."""
        return self.shards > 1 and self.replicas > 1

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """Equal for meshes of the same ranks and shards."""
        return self.ranks, self.shards

    @property
    def process_groups(self) -> list[ProcessGroup]:
        """Process groups of this rank that together connect all ranks."""
        groups = [self.shard_group, self.replica_group]
        return [group for group in groups if group is not None]


@dataclass(frozen=True, eq=False, kw_only=True)
class Meshes:
    """All meshes of a model: see [Note: ranks of a model].

    each: in the order of modules; of one rank only if all are.
    ranks: global ranks of the model, ascending.
    process_groups: of this rank. Together they connect all ranks.
    """

    each: Sequence[Mesh]
    ranks: tuple[int, ...]
    process_groups: Sequence[ProcessGroup]

    @property
    def device(self) -> torch.device:
        """Device of the collectives."""
        return self.each[0].device

    @property
    def replicas(self) -> int:
        """Most copies of any module."""
        return max(mesh.replicas for mesh in self.each)

    @property
    def is_part(self) -> bool:
        """True if other ranks of the job do not share the model."""
        return len(self.ranks) < dist.get_world_size()

    @property
    def has_one(self) -> bool:
        """True if one mesh has all ranks of the model."""
        return len(self.each) == 1 and len(self.each[0].ranks) == len(self.ranks)

    def least(self, numbers: Sequence[int]) -> list[int]:
        """Return the minimum of each number over all ranks of the model. A collective of them."""
        votes = torch.tensor(list(numbers), device=self.device)
        for process_group in self.process_groups:
            dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=process_group)
        least: list[int] = votes.tolist()
        return least


def meshes_of(groups: Iterable[tuple[str, ParamGroup]]) -> Meshes | None:
    """Return the meshes of parameter groups, each with the name of its module; None without any.

    Raises:
        AttachError: meshes that no mesh of the model joins.
    """
    found: dict[tuple[tuple[int, ...], int], Mesh] = {}
    joined: dict[tuple[int, ...], Sequence[ProcessGroup]] = {}  # by ascending ranks
    names: dict[tuple[int, ...], str] = {}
    for name, group in groups:
        mesh = mesh_of_group(group)
        found.setdefault(mesh.key, mesh)
        joining = {tuple(sorted(mesh.ranks)): mesh.process_groups}
        joining |= torch_names.groups_of_meshes(group)
        for ranks, process_groups in joining.items():
            joined.setdefault(ranks, process_groups)
            names.setdefault(ranks, name)
    if not found:
        return None
    most = max(joined, key=len)
    for ranks, name in names.items():
        if not set(ranks) <= set(most):
            raise unsupported(
                name,
                f"a mesh of ranks {list(ranks)}, and another module one of ranks {list(most)}",
                "give both a mesh of one init_device_mesh that holds all these ranks",
            )
    several = [mesh for mesh in found.values() if len(mesh.ranks) > 1]
    return Meshes(
        each=several or list(found.values())[:1],
        ranks=most,
        process_groups=joined[most],
    )


def mesh_of_group(group: ParamGroup) -> Mesh:
    """Return the mesh of a parameter group."""
    shard_group = torch_names.shard_group(group.mesh_info)
    ranks = [dist.get_rank()]
    if shard_group is not None:
        ranks = dist.get_process_group_ranks(shard_group)
    shards = len(ranks)
    replicas = torch_names.replicas_of(group.mesh_info)
    replica_group: ProcessGroup | None = None
    if replicas is not None:
        replica_group, by_replica = replicas
        ranks = [rank for replica in by_replica for rank in replica]
        if len(by_replica) == 1 and shard_group is not None:
            replica_group = None
    return Mesh(
        ranks=tuple(ranks),
        shards=shards,
        shard_group=shard_group,
        replica_group=replica_group,
        device=group.device,
    )
