"""Attach a block to a model that ``fully_shard`` was called on, and answer questions about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from ds_quant.comm.topology import Topology
from ds_quant.config import environment
from ds_quant.config.environment import KILL_VARIABLE
from ds_quant.config.errors import KEY, ConfigError, show
from ds_quant.config.presets import AUTOTUNE
from ds_quant.config.schema import QuantizedCommConfig, parse_block
from ds_quant.fsdp2 import torch_names
from ds_quant.fsdp2.model import STAGE, AttachedModel
from ds_quant.fsdp2.optimizers import optimizers_of, parameters_of
from ds_quant.fsdp2.sharded_module import (
    Mesh,
    mesh_of,
    refuse_unsupported,
    sharded_modules,
    sharded_parameters,
)
from ds_quant.kernels import dispatch
from ds_quant.policy import refusals
from ds_quant.policy.autotune import Work
from ds_quant.policy.route import Routes
from ds_quant.runtime import log
from ds_quant.runtime.fallback import kill_file
from ds_quant.runtime.handshake import handshake, model_digest
from ds_quant.runtime.inactive import InactiveFront
from ds_quant.runtime.memory_check import Free, require_memory
from ds_quant.runtime.run import Run
from ds_quant.runtime.start_line import announce
from ds_quant.runtime.telemetry import unwritable
from ds_quant.runtime.tuning import tuned
from ds_quant.runtime.warmup import warm_up


def attach(
    model: nn.Module,
    block: Mapping[str, Any] | str | Path | None = None,
    *,
    optimizer: Optimizer | Iterable[Optimizer],
) -> AttachedModel | InactiveFront:
    """Send the weights and gradients of an FSDP2 model as a ``quantized_comm`` block says.

    Call it on all ranks after ``fully_shard`` and after the optimizer exists. Keep the result in
    the checkpoint's state, so that a resumed run repeats its random bits.

    Args:
        model: a module that ``fully_shard`` was called on, or one that holds such modules; sharded
            over all its ranks or, with replicas, over the ranks of each: see docs/fsdp2.md.
        block: the block, the name of a preset, JSON, or the path of a file that holds JSON. None:
            that of DS_QUANT_BLOCK.
        optimizer: the optimizer of the model's parameters, or a list of several. Others that hold
            parameters of the model are followed from their first step. An empty list: a model that
            is only evaluated.

    Returns:
        The attached front. Without a block, with ``enabled: false`` or for a model without
        parameters one that does nothing.

    Raises:
        ConfigError: a setting or a combination that cannot work, before any collective.
        UnsupportedModel: a setting of ``fully_shard`` that cannot work, before any collective.
        TypeError, ValueError: an optimizer that is none, or of another model.
        StartError: ranks with other settings or without this call.
        RuntimeError: the model is attached already.
    """
    config = environment.block_of(block)
    if config is None:
        return InactiveFront(environment.reason_of_no_block(block))
    if front_of(model) is not None:
        raise RuntimeError(
            f"{KEY}: this model is attached already: call detach() of its front first"
        )
    optimizers = optimizers_of(optimizer)
    mesh = mesh_of(model)
    if mesh is None:
        return InactiveFront(
            f"{type(model).__name__} has no parameters that fully_shard has sharded: nothing is "
            "quantized"
        )
    _refuse(config, mesh)
    refuse_unsupported(model, mesh)
    _refuse_optimizers(model, optimizers)
    topology = _shake_hands(model, config, mesh)
    notices: list[str] = []
    if config.scheme == AUTOTUNE:
        config, notices = tuned(
            config,
            topology,
            _work(model, mesh),
            stage=STAGE,
            process_group=mesh.shard_group,
            device=mesh.device,
            has_streams=mesh.device.type != "cpu",
            dist=dist,
        )
    front = AttachedModel(model, config.to_scheme(), topology, mesh)
    front.run.notices[:0] = notices
    front.connect(model, optimizers)
    try:
        _begin(front, has_optimizer=bool(optimizers))
    except BaseException:
        front.detach()
        raise
    return front


def _work(model: nn.Module, mesh: Mesh) -> Work:
    """Return the sizes of a step's messages."""
    full_precision = parse_block({"scheme": "full_precision"}).to_scheme()
    routes = Routes(scheme=full_precision, stage=STAGE, nodes=1, node_size=mesh.shards)
    modules = sharded_modules(model, routes, mesh)
    numels = [sum(param.shape.numel() for param in sharded.params) for sharded in modules]
    params = [param for sharded in modules for param in sharded.params]
    return Work(
        numel=sum(numels),
        trained=sum(param.shape.numel() for param in params if param.trained),
        gather=max(numels),
        bucket=max(numels),
        dtype=modules[0].dtype,
        gradients=modules[0].gradient_dtype,
        micro_steps=1,
        gathers=2.0,  # in forward and in backward
    )


def _begin(front: AttachedModel, *, has_optimizer: bool) -> None:
    """Arm the metrics and log the start-up line."""
    if not has_optimizer:
        front.run.notices.append("no optimizer: weights are gathered only")
    block = front.run.scheme.block
    metrics = block.metrics
    if front.run.topology.world == 1:
        front.run.notices.append("single rank: nothing to communicate")
    else:
        _require_memory(front.run)
        watches = kill_file() is not None
        if watches:
            front.run.notices.append(f"{KILL_VARIABLE} watched")
        if has_optimizer and (watches or block.fallback.on_nonfinite != "skip"):
            front.fall_back(block.fallback)
        if metrics.file is not None and metrics.interval and dist.get_rank() == 0:
            front.write_metrics(metrics)
    if front.run.device.type == "cuda" and front.run.topology.world > 1:
        warm_up(front.run, front.message_kinds())
    _announce(front)


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


def report(model: nn.Module) -> dict[str, Any] | None:
    """Report what this rank has received so far; None without a block. See ``ds_quant.report``."""
    front = front_of(model)
    return None if front is None else front.figures()


def resync(model: nn.Module) -> None:
    """Let the next forward bring exact weights to all nodes. Written weights need no call."""
    front = front_of(model)
    if front is not None:
        front.resync()


# ---- refusals ----


def _refuse(config: QuantizedCommConfig, mesh: Mesh) -> None:
    """Refuse settings that this front does not serve, before any collective.

    Raises:
        ConfigError: naming each setting, its value, what is allowed and the way out.
    """
    problems = []
    if config.scheme == AUTOTUNE and mesh.replicas > 1:
        problems.append(
            f'{KEY}.scheme="{AUTOTUNE}": allowed with replicas: a preset, such as "eden4"'
        )
    if mesh.replicas > 1:
        problems += _problems_of_replicas(config, mesh)
    if problems:
        raise ConfigError(*problems)
    config.validate_world(len(mesh.ranks))
    config.validate_stage(STAGE)


def _problems_of_replicas(config: QuantizedCommConfig, mesh: Mesh) -> Iterator[str]:
    """Yield the problems of a model with replicas."""
    if mesh.shards == 1:
        yield (
            "replicas of one rank, which share nothing: allowed: replicas of several ranks, or a "
            "mesh of one dimension"
        )
    if list(mesh.ranks) != sorted(mesh.ranks):
        first, second = mesh.ranks[: mesh.shards], mesh.ranks[mesh.shards : 2 * mesh.shards]
        yield (
            f"replicas of ranks {list(first)} and {list(second)}: allowed: replicas that follow "
            f"each other, as init_device_mesh(device, ({mesh.replicas}, {mesh.shards})) makes them"
        )
    if config.node_size not in (None, mesh.shards):
        yield (
            f"{KEY}.node_size={show(config.node_size)}: allowed with replicas of {mesh.shards} "
            f"ranks: {mesh.shards}; leave it out"
        )


# ---- other ranks ----


def _shake_hands(model: nn.Module, config: QuantizedCommConfig, mesh: Mesh) -> Topology:
    """Compare the settings of all ranks of the mesh, and return its nodes.

    Raises:
        StartError: see ``handshake``.
        ConfigError: nodes of one rank, with a scheme that keeps all weights in every node.
    """
    world = len(mesh.ranks)
    rank = mesh.ranks.index(dist.get_rank())
    node_size = handshake(
        config=config,
        must={
            "front": "fsdp2",
            "torch": torch.__version__.partition("+")[0],
            "mesh": f"{mesh.replicas} x {mesh.shards}",
            "parameters": model_digest(model),
            # All ranks must vote, or none: a vote of some would hang.
            KILL_VARIABLE: "unset" if kill_file() is None else "set",
        },
        kernels=dispatch.describe(mesh.device, config.backend),
        rank=rank,
        world=world,
        fault=unwritable(config.metrics, rank),
        ranks=mesh.ranks if mesh.is_part else None,
    )
    if mesh.replicas > 1:
        if node_size < mesh.shards:
            log.log_rank0(
                f"{KEY}: a replica spans hosts of {node_size} ranks, between which weights are "
                f"sent in every forward and backward: shard over {node_size} ranks",
                first=mesh.ranks[0],
            )
        node_size = mesh.shards
    topology = Topology(
        world=world,
        node_size=config.node_size or node_size,
        ranks=() if mesh.ranks == tuple(range(dist.get_world_size())) else mesh.ranks,
    )
    if mesh.replicas == 1:
        model_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        refusals.refuse_full_replica(
            config, world=world, node_size=topology.node_size, model_bytes=model_bytes, fsdp2=True
        )
    return topology


def _refuse_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that hold no parameter of the model.

    Raises:
        ValueError
    """
    known = {id(parameter) for parameter in sharded_parameters(model)}
    for optimizer in optimizers:
        if not any(id(parameter) in known for parameter in parameters_of(optimizer)):
            raise ValueError(
                f"{KEY}: optimizer={type(optimizer).__name__} holds none of the model's "
                "parameters, so its steps would not move the model: make it after fully_shard, "
                "which replaces the parameters, or give that of this model"
            )


def _announce(front: AttachedModel) -> None:
    """Log the start-up line and its warnings."""
    notices = front.run.notices
    if front.mesh.is_part:
        notices.append(
            f"this model belongs to {len(front.mesh.ranks)} of {dist.get_world_size()} ranks, from "
            f"rank {front.mesh.ranks[0]} on; other ranks train models of their own"
        )
    announce(front.run, front.line)
