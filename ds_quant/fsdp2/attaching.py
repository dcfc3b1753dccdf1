"""Attach a block to a model that ``fully_shard`` was called on, and answer questions about it."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from ds_quant.comm.topology import Topology
from ds_quant.config.environment import KILL_VARIABLE, VARIABLE
from ds_quant.config.errors import KEY, ConfigError
from ds_quant.config.presets import AUTOTUNE
from ds_quant.config.schema import QuantizedCommConfig, parse_block
from ds_quant.fsdp2.front import STAGE, Front
from ds_quant.fsdp2.notices import weights_in_full
from ds_quant.fsdp2.report import figures, start_line
from ds_quant.fsdp2.sharded_module import shard_group
from ds_quant.fsdp2.telemetry import Telemetry
from ds_quant.kernels import dispatch
from ds_quant.policy import refusals
from ds_quant.runtime import log
from ds_quant.runtime.handshake import handshake
from ds_quant.runtime.start_line import warn_of_unmatched
from ds_quant.runtime.telemetry import unwritable

_fronts: WeakKeyDictionary[nn.Module, Front] = WeakKeyDictionary()


def attach(
    model: nn.Module,
    block: Mapping[str, Any] | str | Path | None = None,
    *,
    optimizer: Optimizer | Iterable[Optimizer],
) -> Front | None:
    """Send the weights and gradients of an FSDP2 model as a ``quantized_comm`` block says.

    Call it on all ranks after ``fully_shard`` and after the optimizer exists. Keep the result in
    the checkpoint's state, so that a resumed run repeats its random bits.

    Args:
        model: the root that ``fully_shard`` was called on, sharded over all ranks or, with a
            replica in every node, over the ranks of a node: see docs/fsdp2.md.
        block: the block, or the path of a JSON file that holds one. None: that of DS_QUANT_BLOCK.
        optimizer: the optimizer of the model's parameters. Of several the last one that steps is
            given last. An empty list: a model that is only evaluated.

    Returns:
        The attached front; None without a block, or with ``enabled: false``.

    Raises:
        ConfigError: a setting or a combination that cannot work, before any collective.
        UnsupportedModel: a setting of ``fully_shard`` that cannot work, before any collective.
        StartError: ranks with other settings or without this call.
    """
    config = _parse(block)
    if config is None:
        return None
    if model in _fronts:
        raise RuntimeError(f"{KEY}: this model is attached already")
    group = shard_group(model)
    world = dist.get_world_size()
    _refuse(config, group, world)
    config.validate_world(world)
    rank = dist.get_rank()
    device = next(iter(model.parameters())).device
    has_replicas = dist.get_world_size(group) < world
    must = {"front": "fsdp2", "torch": torch.__version__.partition("+")[0]}
    if has_replicas:
        must["parameters"] = _digest(model)
    node_size = handshake(
        config=config,
        must=must,
        kernels=dispatch.describe(device, config.backend),
        rank=rank,
        world=world,
        fault=unwritable(config.metrics, rank),
    )
    if has_replicas:
        topology = Topology(world=world, node_size=dist.get_world_size(group))
    else:
        topology = Topology(world=world, node_size=config.node_size or node_size)
    model_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    refusals.refuse_full_replica(
        config, world=world, node_size=topology.node_size, model_bytes=model_bytes, fsdp2=True
    )
    groups = _level_groups(topology, device) if 1 < topology.node_size < world else ()
    process_groups = [None if has_replicas else group, *groups]
    front = Front(
        model, config.to_scheme(), topology, process_groups, device, has_replicas=has_replicas
    )
    if has_replicas and node_size < topology.node_size:
        front.notices.append(
            f"a replica spans hosts of {node_size} ranks, between which weights are sent in every "
            f"forward and backward: shard over {node_size} ranks"
        )
    if world > 1:
        front.connect()
        front.notices += weights_in_full(front)
        _follow(front, optimizer)
        if config.metrics.file is not None and config.metrics.interval and rank == 0:
            front.telemetry = Telemetry(front, config.metrics)
            front.telemetry.arm()
    _announce(front)
    _fronts[model] = front
    return front


def _announce(front: Front) -> None:
    """Log the start-up line and its warnings on rank 0."""
    if os.environ.get(KILL_VARIABLE, "").strip():
        front.notices.append(f"{KILL_VARIABLE} is not watched under FSDP2")
    names = [param.name for param in front.params.values()]
    warn_of_unmatched(front.scheme.block.exclude, names)
    front.line = start_line(front)
    log.info_rank0(f"{KEY}: {front.line}")


def front_of(model: nn.Module) -> Front | None:
    """Return what was attached to a model, None if nothing was."""
    return _fronts.get(model)


def report(model: nn.Module) -> dict[str, Any] | None:
    """Report what this rank has received so far; None without a block. See ``ds_quant.report``."""
    front = front_of(model)
    return None if front is None else figures(front)


def resync(model: nn.Module) -> None:
    """Bring weights that were written outside of the optimizer to all nodes. A collective."""
    front = front_of(model)
    if front is not None:
        front.resync()


def _parse(block: Mapping[str, Any] | str | Path | None) -> QuantizedCommConfig | None:
    """Parse the block as a dict, from a file, or from the environment."""
    source = block
    if block is None:
        source = os.environ.get(VARIABLE, "").strip()
        if not source:
            return None
    if not isinstance(source, Mapping):
        text = str(source)
        if not text.startswith("{"):
            text = Path(text).read_text("utf-8")
        source = json.loads(text)
    if KEY in source:
        source = source[KEY]
    config = parse_block(dict(source))
    return config if config.enabled else None


def _refuse(config: QuantizedCommConfig, group: Any, world: int) -> None:
    """Refuse settings that this front does not serve, before any collective.

    Raises:
        ConfigError: naming each setting, its value, what is allowed and the way out.
    """
    ranks = dist.get_process_group_ranks(group)
    has_replicas = len(ranks) < world
    problems = []
    if config.scheme == AUTOTUNE:
        problems.append(
            f'{KEY}.scheme="{AUTOTUNE}": allowed under FSDP2: a preset, see docs/choosing.md'
        )
    if config.weights.enabled and config.weights.levels == "learned":
        problems.append(f'{KEY}.weights.levels="learned": allowed under FSDP2: "uniform"')
    if config.fallback.on_nonfinite != "skip":
        problems.append(
            f'{KEY}.fallback.on_nonfinite="{config.fallback.on_nonfinite}": allowed under FSDP2: '
            '"skip"; clip_grad_norm_ with error_if_nonfinite=True ends such a run'
        )
    if has_replicas:
        problems += _problems_of_replicas(config, ranks, world)
    if problems:
        raise ConfigError(*problems)
    config.validate_stage(STAGE)


def _problems_of_replicas(
    config: QuantizedCommConfig, ranks: list[int], world: int
) -> Iterator[str]:
    """Yield the problems of a replica that is sharded over ``ranks``, fewer than all."""
    size = len(ranks)
    if size == 1:
        yield (
            "the mesh of fully_shard has one rank: allowed: several, of one node, which share a "
            "replica; or all ranks"
        )
    elif world % size or ranks != list(range(ranks[0], ranks[0] + size)) or ranks[0] % size:
        yield (
            f"the mesh of fully_shard has ranks {ranks} of {world}: allowed: consecutive ranks, as "
            f'init_device_mesh(device, ({world // size}, {size}), mesh_dim_names=("replica", '
            '"shard")) makes them'
        )
    if config.node_size not in (None, size):
        yield (
            f"{KEY}.node_size={config.node_size}: allowed with replicas of {size} ranks: {size}; "
            "leave it out"
        )


def _digest(model: nn.Module) -> str:
    """Return the number of parameters, and a checksum of their names, shapes and training."""
    listed = [f"{name} {tuple(p.shape)} {p.requires_grad}" for name, p in model.named_parameters()]
    return f"{len(listed)} ({zlib.crc32(repr(listed).encode()):08x})"


def _level_groups(topology: Topology, device: torch.device) -> tuple[Any, Any]:
    """Return this rank's process groups inside its node and between nodes. A collective."""
    mesh = init_device_mesh(
        device.type, (topology.nodes, topology.node_size), mesh_dim_names=("inter", "intra")
    )
    return mesh.get_group("intra"), mesh.get_group("inter")


def _follow(front: Front, optimizer: Optimizer | Iterable[Optimizer]) -> None:
    """Run the front's events around the steps of the optimizer; of several, of the last one."""
    given = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    # Accelerate's wrapper runs no hooks of its own; the optimizer inside does.
    optimizers = [getattr(wrapper, "optimizer", wrapper) for wrapper in given]
    if not optimizers:
        front.notices.append("no optimizer: weights are gathered only")
        return
    optimizers[0].register_step_pre_hook(front.before_step)
    optimizers[-1].register_step_post_hook(front.after_step)
