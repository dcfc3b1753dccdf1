"""The sizes and prices of a model under FSDP2, as a run and its start-up lines ask for them."""

from __future__ import annotations

from collections.abc import Sequence

from ds_quant.fsdp2.sharded_module import ShardedModule
from ds_quant.policy.memory import Sizes
from ds_quant.policy.model_volume import ModelVolume
from ds_quant.runtime.front import SentParam, Workload
from ds_quant.runtime.run import Level, Run
from ds_quant.runtime.start_line import LineParts


def workload_of(run: Run, modules: Sequence[ShardedModule], *, micro_steps: int) -> Workload:
    """Return the communication of an optimizer step."""
    levels = [_of_level(modules, level) for level in run.levels]
    return Workload(
        params=[_sent_params(own) for own in levels],
        gathers=[_gathers_of(own) for own in levels],
        gather_numel=max((sharded.numel for sharded in modules), default=0),
        micro_steps=micro_steps,
    )


def sizes_of(run: Run, modules: Sequence[ShardedModule]) -> list[Sizes]:
    """Return the sizes that decide the peak memory of a step, of every level."""
    sizes: list[Sizes] = []
    for level in run.levels:
        own = _of_level(modules, level)
        params = [param for sharded in own for param in sharded.params]
        largest = max((sharded.row_numel for sharded in own), default=0) * level.num_shards
        sizes.append(
            Sizes(
                trained=sum(param.shape.numel() for param in params if param.trained),
                largest=largest,
                bucket=largest,
                prefetch=largest,
                exchanged_at_once=True,
                # On a device with streams: see [Note: all-reduce stream] of gradients.py.
                crossing_at_once=level.routes.replicas and run.device.type != "cpu",
                slicing=run.slicing,
            )
        )
    return sizes


def line_parts_of(
    run: Run, modules: Sequence[ShardedModule], volume: ModelVolume, *, kept_bytes: int
) -> LineParts:
    """Return the part of the start-up lines that FSDP2 knows."""
    has_replicas = any(level.routes.replicas for level in run.levels)
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
    elif not any(level.routes.sends_weights for level in run.levels):
        weights = "every rank holds all weights"
    return LineParts(
        layout="FSDP2",
        between="replicas of" if has_replicas else "x",
        volume=volume,
        stock=run.stock_volume(volume),
        weights=weights,
        gradients=gradients,
        kept_bytes=kept_bytes,
    )


def _of_level(modules: Sequence[ShardedModule], level: Level) -> list[ShardedModule]:
    return [sharded for sharded in modules if sharded.level is level]


def _gathers_of(modules: Sequence[ShardedModule]) -> float:
    """Return the gathers of a weight in a micro-step, the mean over the weights of a level."""
    numel = sum(sharded.numel for sharded in modules)
    gathered = sum(sharded.gathers * sharded.numel for sharded in modules)
    return gathered / max(1, numel)


def _sent_params(modules: Sequence[ShardedModule]) -> list[SentParam]:
    return [
        SentParam(
            param=param,
            # Of a replicated module gradients alone are sent.
            dtype=sharded.gradient_dtype if sharded.is_replicated else dtype,
            gradient_dtype=sharded.gradient_dtype,
            trained=param.trained,
            stock_weights=bool(sharded.fsdp_gathers),
        )
        for sharded in modules
        for param, dtype in zip(sharded.params, sharded.dtypes, strict=True)
    ]
