"""The sizes and prices of a model under FSDP2, as a run and its start-up lines ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_quant.codec.codec import CAST_NAMES
from ds_quant.fsdp2.sharded_module import ShardedModule
from ds_quant.policy.cost import ParamSpec
from ds_quant.policy.memory import Sizes
from ds_quant.policy.model_volume import ModelVolume
from ds_quant.runtime.front import Workload
from ds_quant.runtime.run import Level, Run
from ds_quant.runtime.start_line import LineParts
from ds_quant.runtime.warmup import MessageKinds


def gradient_dtype_of(modules: Sequence[ShardedModule]) -> torch.dtype:
    """Return the dtype of the gradients of the first module whose gradients are sent."""
    for sharded in modules:
        if sharded.reduces:
            return sharded.gradient_dtype
    return torch.float32


def workload_of(run: Run, modules: Sequence[ShardedModule], *, micro_steps: int) -> Workload:
    """Return the communication of an optimizer step."""
    return Workload(
        param_specs=[_param_specs(_of_level(modules, level)) for level in run.levels],
        gathers=2.0,  # in forward and in backward
        micro_steps=micro_steps,
        gradient_dtype=gradient_dtype_of(modules),
    )


def sizes_of(run: Run, modules: Sequence[ShardedModule]) -> list[Sizes]:
    """Return the sizes that decide the peak memory of a step, of every level."""
    sizes: list[Sizes] = []
    for level in run.levels:
        own = _of_level(modules, level)
        params = [param for sharded in own for param in sharded.params]
        largest = max((sharded.row_numel for sharded in own), default=0) * level.shards.size
        sizes.append(
            Sizes(
                trained=sum(param.shape.numel() for param in params if param.trained),
                largest=largest,
                bucket=largest,
                prefetch=largest,
                itemsize=gradient_dtype_of(modules).itemsize,
                exchanged_at_once=True,
                # On a device with streams: see [Note: all-reduce stream] of gradients.py.
                crossing_at_once=level.replicas > 1 and run.device.type != "cpu",
                slicing=run.slicing,
            )
        )
    return sizes


def message_kinds_of(run: Run, modules: Sequence[ShardedModule]) -> MessageKinds:
    """Return dtypes and levels of the messages, for ``warm_up``."""
    dtypes = {sharded.dtype for sharded in modules if not sharded.fsdp_gathers}
    reduces = any(sharded.reduces for sharded in modules)
    return MessageKinds(
        weight_dtypes=sorted(dtypes, key=str),
        gradient_dtype=gradient_dtype_of(modules),
        reducing=run.levels if reduces else [],
        all_levels=run.levels,
        crosses_once=any(sharded.defers_inter_node for sharded in modules),
        has_few_ranks=False,
    )


def line_parts_of(
    run: Run, modules: Sequence[ShardedModule], volume: ModelVolume, *, kept_bytes: int
) -> LineParts:
    """Return the part of the start-up lines that FSDP2 knows."""
    has_replicas = any(level.replicas > 1 for level in run.levels)
    gradients = ""
    if any(sharded.defers_inter_node for sharded in modules):
        declare = "set_requires_all_reduce" if has_replicas else "set_is_last_backward"
        gradients = (
            "gradients are sent between nodes in every backward that is not declared otherwise by "
            f"{declare}(False)"
        )
    weights = ""
    if has_replicas:
        is_exact = all(level.routes.weights().is_full_precision for level in run.levels)
        weights = "weights stay in the node" + (", exact" if is_exact else "")
    stock_bytes, stock_dtypes = _alone(modules, volume)
    return LineParts(
        layout="FSDP2",
        between="replicas of" if has_replicas else "x",
        volume=volume,
        stock_bytes=stock_bytes,
        stock_dtypes=stock_dtypes,
        weights=weights,
        gradients=gradients,
        kept_bytes=kept_bytes,
        micro_steps=1,
        period="step",
    )


def _of_level(modules: Sequence[ShardedModule], level: Level) -> list[ShardedModule]:
    return [sharded for sharded in modules if sharded.level is level]


def _param_specs(modules: Sequence[ShardedModule]) -> list[ParamSpec]:
    return [
        ParamSpec(
            name=param.name,
            shape=tuple(param.shape),
            dtype=dtype,
            trainable=param.trained,
            packed=param.packed,
            stock_weights=bool(sharded.fsdp_gathers),
            stock_gradients=not sharded.reduces,
        )
        for sharded in modules
        for param, dtype in zip(sharded.params, sharded.dtypes, strict=True)
    ]


def _alone(modules: Sequence[ShardedModule], volume: ModelVolume) -> tuple[float, str]:
    """Return the volume of FSDP2 without the block, and its dtypes as "bf16" or "bf16 + fp32".

    Weights are gathered in one dtype, gradients reduced in another. With replicas an all-reduce of
    gradients is all that crosses between the nodes.
    """
    nbytes = 0.0
    names: dict[str, None] = {}
    for sharded in modules:
        has_replicas = sharded.level.replicas > 1
        for param, dtype in zip(sharded.params, sharded.dtypes, strict=True):
            numel = param.shape.numel()
            if not has_replicas:
                nbytes += volume.gathers * numel * dtype.itemsize
                names[CAST_NAMES.get(dtype, str(dtype).removeprefix("torch."))] = None
            if param.trained:
                passes = 2 if has_replicas else 1
                nbytes += passes * numel * sharded.gradient_dtype.itemsize
                names[CAST_NAMES.get(sharded.gradient_dtype, "fp64")] = None
    return nbytes / max(1, volume.numel), " + ".join(names)
