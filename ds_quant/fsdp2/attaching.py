"""Attach a block to a model that ``fully_shard`` was called on, and answer questions about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from ds_quant.comm.topology import PlacementError
from ds_quant.config import environment
from ds_quant.config.errors import KEY, AttachError, ConfigError, show
from ds_quant.config.presets import AUTOTUNE
from ds_quant.config.schema import QuantizedCommConfig
from ds_quant.fsdp2 import torch_names
from ds_quant.fsdp2.meshes import Mesh, Meshes, mesh_of_group, meshes_of
from ds_quant.fsdp2.model import AttachArguments, AttachedModel
from ds_quant.fsdp2.optimizers import parameters_of
from ds_quant.fsdp2.ranks import STAGE, RanksOfModel, ranks_of_model
from ds_quant.fsdp2.sharded_module import (
    gathered_dtype,
    groups_of,
    named_parameters,
    refuse_unsupported,
)
from ds_quant.policy import refusals
from ds_quant.runtime import log
from ds_quant.runtime.given_optimizers import optimizers_of
from ds_quant.runtime.handshake import (
    handshake,
    model_facts,
    refusal_of_this_rank,
    stay_away,
)
from ds_quant.runtime.inactive import InactiveFront
from ds_quant.runtime.memory_check import Free, require_memory
from ds_quant.runtime.run import Run
from ds_quant.runtime.short_messages import shorten_messages
from ds_quant.runtime.start import start
from ds_quant.runtime.start_line import announce
from ds_quant.runtime.tuning import tuned_front


def attach(
    model: nn.Module,
    block: Mapping[str, Any] | str | Path | None = None,
    *,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
) -> AttachedModel | InactiveFront:
    """Send the weights and gradients of an FSDP2 model as a ``quantized_comm`` block says.

    Call it on all ranks, with or without a block, after ``fully_shard`` and after the optimizer
    exists. Keep the result in
    the checkpoint's state, so that a resumed run repeats its random bits. A second call with the
    same block returns the first result, and takes an optimizer that was made since.

    Args:
        model: a module that ``fully_shard`` was called on, or one that holds such modules; sharded
            over all its ranks or, with replicas, over the ranks of each: see docs/fsdp2.md.
        block: the block, the name of a preset, JSON, or the path of a file that holds JSON. None:
            that of DS_QUANT_BLOCK.
        optimizer: required. The optimizer of the model's parameters, or a list of several. Others
            that hold parameters of the model are followed from their first step. An empty list: a
            model that is only evaluated.

    Returns:
        The attached front. Without a block, with ``enabled: false`` or for a model without
        parameters one that does nothing.

    Raises:
        ConfigError: a setting or a combination that cannot work, before any collective.
        AttachError: a setting of ``fully_shard`` that cannot work; an optimizer that is none or of
            another model; a second call with another block, or the first with an optimizer. Before
            any collective.
        StartError: ranks with other settings, without a block or without this call, an error of
            another rank, or a file of metrics that cannot be written.
    """
    shorten_messages()
    known_ranks = _ranks_of(model)
    with refusal_of_this_rank(known_ranks):
        config = environment.block_of(block)
        if config is None:
            reason = environment.reason_of_no_block(block)
            if known_ranks is not None:
                stay_away(reason, known_ranks)
            return InactiveFront(reason)
        optimizers = optimizers_of(optimizer)
        meshes = _meshes(model)
        if meshes is None:
            reason = (
                f"{type(model).__name__} has no parameters that fully_shard has sharded: nothing "
                "is quantized"
            )
            return InactiveFront(reason)
        arguments = AttachArguments.of(model, config, optimizers)
        attached = front_of(model)
        if attached is None:
            _refuse(config, meshes)
            refuse_unsupported(model)
        else:
            _refuse_difference(attached, arguments)
        _refuse_optimizers(model, optimizers)
    ranks = _shake_hands(model, config, meshes)
    if attached is not None:
        attached.follow(optimizers)
        return attached
    front = tuned_front(config, partial(AttachedModel, model, ranks))
    _begin(front, has_optimizer=bool(optimizers))
    front.connect(model, optimizers, arguments)
    return front


def _ranks_of(model: nn.Module) -> Sequence[int] | None:
    """Return the ranks of a model, None if they cannot be known: then ``_meshes`` says why."""
    try:
        meshes = _meshes(model)
    except AttachError:
        return None
    return None if meshes is None else meshes.ranks


def _meshes(model: nn.Module) -> Meshes | None:
    """Return the meshes of a model; None if ``fully_shard`` has found no parameters.

    Raises:
        AttachError: the model holds no FSDPModule, or a mesh cannot be served.
    """
    if not isinstance(model, nn.Module):
        raise AttachError(
            f"{KEY}: model={type(model).__name__}: allowed: a module that fully_shard was called "
            "on, or one that holds such modules"
        )
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise AttachError(
            f"{KEY}: {type(model).__name__} holds no module that fully_shard was called on: call "
            "fully_shard before ds_quant.fsdp2.attach"
        )
    return meshes_of((name, group) for name, _, group in groups_of(model))


def _begin(front: AttachedModel, *, has_optimizer: bool) -> None:
    """Start the run and log its start-up line."""
    run = front.run
    if not has_optimizer:
        run.notices.append("no optimizer: weights are gathered only")
    if run.topology.world > 1:
        _require_memory(run)
    start(run, front.events, resync=front.resync if has_optimizer else None)
    ranks = run.topology.all_ranks
    if len(ranks) < dist.get_world_size():
        run.notices.append(
            f"this model belongs to {len(ranks)} of {dist.get_world_size()} ranks, from rank "
            f"{ranks[0]} on; other ranks train models of their own"
        )
    announce(run, front.line_parts())


def _require_memory(run: Run) -> None:
    """Refuse copies of the weights that do not fit on every rank. A collective if it keeps some."""
    if run.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(run.device)
        require_memory(
            run,
            Free(on_device=free, on_host=0),
            on_host=False,
            holds_gradients=False,  # the user declares micro-steps later
            way_out="replicas (HSDP)",
        )


def front_of(model: nn.Module) -> AttachedModel | None:
    """Return what was attached to a model or to one that holds it, None if nothing was."""
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in torch_names.param_groups(module):
            gather = group._all_gather_comm
            front = getattr(gather, "front", None)
            return front if isinstance(front, AttachedModel) else None
    return None


def resync(model: nn.Module) -> None:
    """Let the next forward bring exact weights to all nodes. Written weights need no call."""
    front = front_of(model)
    if front is not None:
        front.resync()


# ---- refusals ----


def _refuse(config: QuantizedCommConfig, meshes: Meshes) -> None:
    """Refuse settings that this front does not serve, before any collective.

    Raises:
        ConfigError: naming each setting, its value, what is allowed and the way out.
    """
    problems = []
    if config.scheme == AUTOTUNE and (meshes.replicas > 1 or not meshes.has_one):
        layout = "replicas" if meshes.replicas > 1 else "several meshes or tensor parallelism"
        problems.append(
            f'{KEY}.scheme="{AUTOTUNE}": allowed with {layout}: a preset, such as "eden4"'
        )
    for mesh in meshes.each:
        if mesh.has_node_replicas:
            problems += _problems_of_replicas(config, meshes, mesh)
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    refusals.refuse_block(config, stage=STAGE, world=len(meshes.ranks))


def _problems_of_replicas(config: QuantizedCommConfig, meshes: Meshes, mesh: Mesh) -> Iterator[str]:
    """Yield the problems of a mesh with replicas in its nodes."""
    if list(mesh.ranks) != sorted(mesh.ranks):
        first, second = mesh.ranks[: mesh.shards], mesh.ranks[mesh.shards : 2 * mesh.shards]
        yield (
            f"replicas of ranks {list(first)} and {list(second)}: allowed: replicas that follow "
            f"each other, as init_device_mesh(device, ({mesh.replicas}, {mesh.shards})) makes them"
        )
    ranks = len(meshes.ranks) // mesh.replicas
    if config.node_size not in (None, ranks):
        yield (
            f"{KEY}.node_size={show(config.node_size)}: allowed with replicas of {ranks} ranks: "
            f"{ranks}; leave it out"
        )


# ---- other ranks ----


def _shake_hands(model: nn.Module, config: QuantizedCommConfig, meshes: Meshes) -> RanksOfModel:
    """Compare the settings of all ranks of the model, and return them in their nodes.

    Raises:
        StartError: see ``handshake``.
        ConfigError: nodes of one rank, with a scheme that keeps all weights in every node; or a
            mesh with unequal numbers of ranks in its nodes.
    """
    ranks = meshes.ranks
    mesh_shapes = ", ".join(f"{mesh.replicas} x {mesh.shards}" for mesh in meshes.each)
    facts = {**model_facts("fsdp2", model), "mesh": mesh_shapes}
    node_size = handshake(
        config, facts=facts, device=meshes.device, ranks=ranks, call="ds_quant.fsdp2.attach"
    )
    if config.node_size is None and any(mesh.has_node_replicas for mesh in meshes.each):
        of_replica = len(ranks) // meshes.replicas
        if node_size < of_replica:
            log.log_rank0(
                f"{KEY}: a replica spans hosts of {node_size} ranks, between which weights are "
                f"sent in every forward and backward: shard over {node_size} ranks",
                first=ranks[0],
            )
        node_size = of_replica
    problem: ConfigError | None = None
    node_sizes = [0 for _ in meshes.each]
    try:
        in_nodes = ranks_of_model(meshes, node_size=node_size)
        node_sizes = [topology.node_size for topology in in_nodes.topologies]
        _refuse_full_replica(model, config, in_nodes)
    except PlacementError as error:
        problem = ConfigError(f"{KEY}.node_size={node_size}: {error}")
    except ConfigError as error:
        problem = error
    if not meshes.has_one:
        problem = _problem_of_any(meshes, problem, node_sizes)
    if problem is not None:
        raise problem
    return in_nodes


def _problem_of_any(
    meshes: Meshes, problem: ConfigError | None, node_sizes: Sequence[int]
) -> ConfigError | None:
    """Return an error on all ranks if any has one, or other nodes. A collective.

    problem: of this rank. node_sizes: of every mesh.
    """
    inverted = [-size for size in node_sizes]
    is_served, *numbers = meshes.least([int(problem is None), *node_sizes, *inverted])
    if problem is not None:
        return problem
    if not is_served:
        return ConfigError(f"{KEY}: the mesh of another rank cannot be served: see its error")
    smallest = numbers[: len(node_sizes)]
    largest = [-number for number in numbers[len(node_sizes) :]]
    if smallest != largest:
        return ConfigError(
            f"{KEY}: the meshes of this rank have {list(node_sizes)} rank(s) in a node, and others "
            "lie on other numbers of nodes: make meshes whose ranks divide node_size, or are "
            "divided by it"
        )
    return None


def _refuse_full_replica(
    model: nn.Module, config: QuantizedCommConfig, ranks: RanksOfModel
) -> None:
    """Refuse nodes of one rank where a scheme keeps all weights in every node, with their price.

    Raises:
        ConfigError
    """
    model_bytes = dict.fromkeys([mesh.key for mesh in ranks.meshes.each], 0)
    for _, _, group in groups_of(model):
        key = mesh_of_group(group).key
        for member in group.fsdp_params:
            itemsize = gathered_dtype(member).itemsize
            if key in model_bytes:
                model_bytes[key] += member._orig_size.numel() * itemsize
    for mesh, topology in zip(ranks.meshes.each, ranks.topologies, strict=True):
        if mesh.replicas == 1:  # else every replica has all weights
            refusals.refuse_full_replica(
                config,
                world=topology.world,
                node_size=topology.node_size,
                model_bytes=model_bytes[mesh.key],
                fsdp2=True,
                is_part=not ranks.meshes.has_one,
            )


def _refuse_difference(attached: AttachedModel, arguments: AttachArguments) -> None:
    """Refuse a second call that cannot return the front of the first one.

    Raises:
        AttachError: the first call had another block, no optimizer, a part of this model, or a
            model of which this is a part.
    """
    assert attached.arguments is not None, "a model has the front once it is connected"
    difference = attached.arguments.difference(arguments)
    if difference is not None:
        raise AttachError(
            f"{KEY}: this model is attached already, {difference}: call detach() of its front first"
        )


def _refuse_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that hold no parameter of the model.

    Raises:
        AttachError
    """
    known = {id(parameter) for _, parameter in named_parameters(model)}
    for optimizer in optimizers:
        if not any(id(parameter) in known for parameter in parameters_of(optimizer)):
            raise AttachError(
                f"{KEY}: optimizer={type(optimizer).__name__} holds none of the model's "
                "parameters, so its steps would not move the model: make it after fully_shard, "
                "which replaces the parameters, or give that of this model"
            )
