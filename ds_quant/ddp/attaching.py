"""Attach a block to a ``DistributedDataParallel``, and answer questions about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ds_quant.comm.topology import Topology
from ds_quant.config import environment
from ds_quant.config.errors import KEY, AttachError, another_block
from ds_quant.config.schema import QuantizedCommConfig
from ds_quant.ddp import hook as hooks
from ds_quant.ddp.model import STAGE, AttachedModel, watched_parameters
from ds_quant.policy import refusals
from ds_quant.runtime.given_optimizers import optimizers_of
from ds_quant.runtime.handshake import (
    handshake,
    model_facts,
    refusal_of_this_rank,
    stay_away,
)
from ds_quant.runtime.inactive import InactiveFront
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
    """Send the gradients of a DDP model as a ``quantized_comm`` block says.

    Call it on all ranks, with or without a block, before the first backward. Keep the result in
    the checkpoint's state, so that a resumed run repeats its random bits. A second call with the
    same block returns the first result, and takes optimizers that were made since.

    Args:
        model: a ``DistributedDataParallel``, or a module that holds one, such as the result of
            ``torch.compile`` or of Lightning Fabric.
        block: the block, the name of a preset, JSON, or the path of a file that holds JSON. None:
            that of DS_QUANT_BLOCK.
        optimizer: one or several, to be warned of an accumulation that sends gradients several
            times.

    Returns:
        The attached front. Without a block or with ``enabled: false`` one that does nothing.

    Raises:
        ConfigError: a setting or a combination that cannot work, before any collective.
        AttachError: a setting of DDP that cannot work, such as another communication hook; a model
            without a ``DistributedDataParallel``, or with several; a second call with another
            block; an optimizer that is none. Before any collective.
        StartError: ranks with other settings, without a block or without this call, an error of
            another rank, or a file of metrics that cannot be written. The model keeps a hook, which
            reduces as DDP alone does.
    """
    shorten_messages()
    ranks = _ranks_of(model)
    with refusal_of_this_rank(ranks):
        config = environment.block_of(block)
        if config is None:
            reason = environment.reason_of_no_block(block)
            if ranks is not None:
                stay_away(reason, ranks)
            return InactiveFront(reason)
        optimizers = [] if optimizer is None else optimizers_of(optimizer)
        ddp = _ddp_of(model)
        attached = front_of(ddp)
        if attached is not None:
            _refuse_another_block(attached, config)
        else:
            refuse_unsupported(ddp)
            refusals.refuse_block(config, stage=STAGE, world=dist.get_world_size())
            if not any(parameter.requires_grad for *_, parameter in watched_parameters(ddp)):
                return InactiveFront("DDP reduces no parameter of this model: nothing is quantized")
        hook = hooks.find(ddp) or hooks.register(ddp)
    facts = model_facts("ddp", ddp.module)
    node_size = handshake(config, facts=facts, device=ddp.device, call="ds_quant.ddp.attach")
    if attached is not None:
        attached.follow(optimizers)
        return attached
    topology = Topology(world=dist.get_world_size(), node_size=node_size)
    make = partial(AttachedModel, ddp, hook, topology, config)
    front = tuned_front(config, make)
    front.run.notices += _bypassing(ddp)
    start(front.run, front.events, resync=lambda: None)  # no rank caches weights
    announce(front.run, front.line_parts())
    front.follow(optimizers)
    front.connect()
    return front


def _refuse_another_block(attached: AttachedModel, config: QuantizedCommConfig) -> None:
    """Refuse a second call with another block.

    Raises:
        AttachError
    """
    difference = another_block(attached.block, config)
    if difference is not None:
        raise AttachError(
            f"{KEY}: this model is attached already, {difference}: call detach() of its front first"
        )


def _bypassing(ddp: DistributedDataParallel) -> Iterator[str]:
    """Yield a notice of trained parameters that DDP gives to no hook."""
    ignored = [
        name
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name in ddp.parameters_to_ignore
    ]
    if ignored:
        yield (
            f"not through DDP's hook: {len(ignored)} of delay_all_reduce_named_params or that DDP "
            f"ignores, such as {ignored[0]}: nothing of them is quantized or counted"
        )


def front_of(model: nn.Module) -> AttachedModel | None:
    """Return the front of a DDP model, or of the one inside of ``model``; None if there is none."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            hook = hooks.find(module)
            if hook is not None and isinstance(hook.reducer, AttachedModel):
                return hook.reducer
    return None


# ---- the model ----


def _ranks_of(model: object) -> Sequence[int] | None:
    """Return the ranks of a model, None if they cannot be known: then ``_ddp_of`` says why."""
    try:
        ddp = _ddp_of(model)
    except AttachError:
        return None
    return dist.get_process_group_ranks(ddp.process_group)


def _ddp_of(model: object) -> DistributedDataParallel:
    """Return the DDP model that a module is or holds.

    Raises:
        AttachError: it is or holds none, or several.
    """
    if isinstance(model, DistributedDataParallel):
        return model
    found: list[DistributedDataParallel] = []
    if isinstance(model, nn.Module):
        found = [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
    if len(found) == 1:
        return found[0]
    problem = "it holds several" if found else "it is none and holds none"
    raise AttachError(
        f"{KEY}: model={type(model).__name__}: allowed: a DistributedDataParallel, or a module "
        f"that holds one; {problem}. Wrap the model first (Trainer: trainer.model_wrapped, "
        "Lightning: trainer.strategy.model); call attach once for each of several; of an FSDP2 "
        "model call ds_quant.fsdp2.attach"
    )


def refuse_unsupported(ddp: DistributedDataParallel) -> None:
    """Refuse settings of DDP that cannot work, from facts that all ranks share.

    Raises:
        AttachError: naming each setting and the way out.
    """
    problems: list[str] = []
    if ddp.mixed_precision is not None:
        problems.append(
            "mixed_precision= registers a communication hook of its own, and DDP takes one: leave "
            "it out; torch.autocast and a model in bf16 work"
        )
    ranks = dist.get_process_group_ranks(ddp.process_group)
    if ranks != list(range(dist.get_world_size())):
        problems.append(
            f"process_group of ranks {ranks}: allowed: all {dist.get_world_size()} ranks of the "
            "job; leave process_group and device_mesh out"
        )
    if ddp.is_multi_device_module:
        problems.append("parameters on several devices: allowed: one device per rank")
    sparse = [
        name
        for name, module in ddp.module.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    ]
    if sparse:
        problems.append(
            f"{sparse[0]}: sparse=True: DDP gives a hook no sparse gradients: set sparse=False"
        )
    if problems:
        raise AttachError("; ".join(f"{KEY}: {problem}" for problem in problems))
