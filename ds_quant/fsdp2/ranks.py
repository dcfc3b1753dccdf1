"""The nodes of all meshes of a model, and the run over them.

[Note: nodes of a mesh] A node is a run of consecutive ranks of the job, usually a host. The nodes
of a mesh are those of its ranks: where tensor parallelism fills a node of 8 ranks, a mesh has one
rank per node, and all its messages cross between nodes. With replicas of several ranks every
replica is a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ds_quant.comm.topology import Topology
from ds_quant.fsdp2.meshes import Mesh, Meshes, mesh_of_group
from ds_quant.fsdp2.notices import on_one_rank, untried_torch, weights_in_full
from ds_quant.fsdp2.sharded_module import ShardedModule, gathered_by_fsdp, sharded_modules
from ds_quant.fsdp2.torch_names import ParamGroup
from ds_quant.policy.route import Routes
from ds_quant.policy.scheme import Scheme
from ds_quant.runtime.front import Front
from ds_quant.runtime.run import Level, ProcessGroups, Run

STAGE = 3  # FSDP2 shards weights, gradients and optimizer states, as ZeRO-3 does
STAGE_REPLICATED = 0  # where every rank holds all of them, as under DDP


@dataclass(frozen=True, kw_only=True)
class RanksOfModel:
    """The ranks of a model in their nodes: see [Note: nodes of a mesh].

    topology: all ranks. topologies: those of every mesh.
    """

    meshes: Meshes
    topology: Topology
    topologies: Sequence[Topology]


def ranks_of_model(meshes: Meshes, *, node_size: int) -> RanksOfModel:
    """Return the ranks of a model in nodes of ``node_size`` ranks.

    Raises:
        PlacementError: a mesh has unequal numbers of ranks in these nodes.
        ValueError: ``node_size`` does not divide the ranks.
    """
    ranks = meshes.ranks
    is_whole_job = ranks == tuple(range(torch.distributed.get_world_size()))
    all_in_nodes = Topology(
        world=len(ranks), node_size=node_size, ranks=() if is_whole_job else ranks
    )
    return RanksOfModel(
        meshes=meshes,
        topology=all_in_nodes,
        topologies=[_in_nodes(mesh, all_in_nodes) for mesh in meshes.each],
    )


def _in_nodes(mesh: Mesh, all_in_nodes: Topology) -> Topology:
    """Return the ranks of a mesh in nodes; with replicas of several ranks every replica is one."""
    if not mesh.has_node_replicas:
        return all_in_nodes.part(mesh.ranks)
    if mesh.ranks == tuple(all_in_nodes.all_ranks):
        return Topology(world=all_in_nodes.world, node_size=mesh.shards, ranks=all_in_nodes.ranks)
    return Topology(world=len(mesh.ranks), node_size=mesh.shards, ranks=mesh.ranks)


def run_of(
    front: Front, model: nn.Module, scheme: Scheme, ranks: RanksOfModel
) -> tuple[Run, list[ShardedModule]]:
    """Return the run of a model, and its sharded modules. A collective of all its ranks."""
    meshes = ranks.meshes
    device = meshes.device
    run: Run | None = None
    levels: dict[tuple[tuple[int, ...], int], Level] = {}
    for mesh, topology in zip(meshes.each, ranks.topologies, strict=True):
        routes = Routes.over(
            topology,
            scheme,
            stage=STAGE_REPLICATED if mesh.is_replicated else STAGE,
            replicas=mesh.has_node_replicas,
        )
        process_groups = ProcessGroups(shards=mesh.shard_group, replicas=mesh.replica_group)
        if mesh.shards == 1:  # the ranks that exchange are the replicas
            process_groups = ProcessGroups(shards=mesh.replica_group or mesh.shard_group)
        if run is None:
            run = Run(
                front,
                routes,
                topology,
                (),
                process_groups=process_groups,
                device=device,
                dist=torch.distributed,
            )
            levels[mesh.key] = run.world
        else:
            levels[mesh.key] = run.add_level(routes, topology, process_groups)
    assert run is not None, "a model has a mesh"
    if not meshes.has_one:
        run.vote_with(ranks.topology, meshes.process_groups)

    def level_of(group: ParamGroup) -> Level | None:
        return levels.get(mesh_of_group(group).key)

    modules = sharded_modules(model, level_of)
    run.add_params(param for sharded in modules for param in sharded.params)
    run.notices += gathered_by_fsdp(modules)
    run.notices += weights_in_full(modules)
    run.notices += on_one_rank(model, modules)
    run.notices += untried_torch()
    return run, modules
