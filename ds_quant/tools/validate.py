"""``ds_quant validate``: check a block for DeepSpeed, FSDP2 or DDP, and predict its savings.

Refuses the settings that start-up refuses, with the same sentences: those of the plugin, and where
DeepSpeed is installed those of DeepSpeed itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ds_quant.codec.rules import range_of_width
from ds_quant.comm.topology import divisors
from ds_quant.config import environment, schema
from ds_quant.config.environment import VARIABLE
from ds_quant.config.presets import AUTOTUNE
from ds_quant.config.schema import (
    KEY,
    ConfigError,
    GradientsConfig,
    QuantizedCommConfig,
    WeightsConfig,
)
from ds_quant.kernels.wire import BF16_BYTES, FP32_BYTES, wire_layout
from ds_quant.policy import choosing, in_words, model, refusals
from ds_quant.policy.cost import LOSSLESS_BITS, Cluster
from ds_quant.tools import forecast, planning, stock_config
from ds_quant.tools.files import about, load, not_plain_json
from ds_quant.tools.forecast import Plan
from ds_quant.tools.fsdp2_plan import Fsdp2Plan

_STAGES = {
    1: "ZeRO-1: updated weights gathered after the step, gradients reduced once per step",
    2: "ZeRO-2: updated weights gathered after the step, gradients reduced every micro-step",
    3: "ZeRO-3: weights gathered for forward and backward, gradients reduced every micro-step",
}
_ONCE = ", between nodes of several ranks once per step"  # gradients, under ZeRO-2 and 3
_NUMEL = 2**20  # elements of a message from which bytes per element are computed
# Sizes from which bytes are predicted, unless they are given.
_MODEL_NUMEL = 7 * 10**9
_NODES, _NODE_SIZE = 2, 8


def main(arguments: argparse.Namespace) -> int:
    """Print a report per file; return 1 if a file is refused."""
    world, node_size = arguments.world, arguments.node_size
    if world is not None and node_size is not None and world % node_size:
        allowed = ", ".join(map(str, divisors(world)))
        raise ConfigError(f"--node-size {node_size}: allowed with --world {world}: {allowed}")
    if arguments.paths:
        return max([_validate(path, arguments) for path in arguments.paths])
    if not arguments.env:
        raise ConfigError(f"no file: give a DeepSpeed config, or --env for {VARIABLE} alone")
    return _validate(None, arguments)


def _validate(path: Path | None, arguments: argparse.Namespace) -> int:
    """Print the report of a file, or of the variable alone."""
    try:
        with about(path or "--env"):
            if path is None:
                report = _report_of_variable(arguments)
            else:
                report = _report(path, arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(report))
    return 0


def _report(path: Path, arguments: argparse.Namespace) -> list[str]:
    """Describe the block of a file. Raises ``ConfigError`` where start-up would."""
    if arguments.front in ("fsdp2", "ddp"):
        return _report_of_block(path, arguments.front, arguments)
    param_dict = load(path)
    if _is_block_alone(param_dict):
        if arguments.front == "zero":
            raise ConfigError(
                f"a block alone: allowed with --front zero: a DeepSpeed config with the key {KEY}"
            )
        return _report_of_block(path, "fsdp2", arguments)
    config = _read_block(param_dict, arguments)
    if config is None:
        reason = f"{KEY} is disabled" if KEY in param_dict else f"no {KEY} block"
        return [f"{path}: {reason}: DeepSpeed communicates as without ds_quant"]
    stage = refusals.stage_of(param_dict)
    dtype = _dtype(param_dict)
    world = arguments.world or config.node_size or 1
    refusals.together(
        lambda: refusals.refuse(param_dict, config),
        lambda: config.validate_world(world),
        lambda: _refuse_full_replica(config, stage, dtype.itemsize, arguments),
    )
    notes = stock_config.check(param_dict, world=arguments.world)
    if arguments.json:
        return [_as_json(config)]
    zero = refusals.section(param_dict, "zero_optimization")
    stock_reason = refusals.stock_gradients_reason(stage, lambda name: zero.get(name, True))
    verdict = f"{path}: valid"
    if arguments.env and environment.is_source(param_dict):
        verdict += f", block from {VARIABLE}"
    plan = _plan(
        config, param_dict, stage, dtype, arguments, has_stock_gradients=bool(stock_reason)
    )
    report = _description(verdict, config, plan, arguments)
    if stock_reason is not None:
        report.append(f"gradients: full precision, because {stock_reason}")
    report += _node_shard(config, stage, dtype.itemsize, arguments)
    steps = _STAGES[stage]
    if stage > 1 and config.gradients.cross == "step":
        steps += _ONCE
    return [*report, steps, *notes, *not_plain_json(path)]


def _read_block(
    param_dict: dict[str, Any], arguments: argparse.Namespace
) -> QuantizedCommConfig | None:
    """Parse the block. Raises ``ConfigError`` with the mistakes of the whole file."""
    parse = environment.parse if arguments.env else schema.parse
    try:
        return parse(param_dict, load_codecs=arguments.load_codecs)
    except ConfigError as error:
        problems = error.problems
    try:
        refusals.refuse_unsupported(param_dict)
    except ConfigError as error:
        problems += error.problems
    raise ConfigError(*problems)


def _as_json(config: QuantizedCommConfig) -> str:
    return json.dumps({KEY: config.resolved()}, indent=2)


# ---- a block without a DeepSpeed config ----


def _is_block_alone(param_dict: dict[str, Any]) -> bool:
    """Return True if the file holds a block only, as ``attach`` takes it."""
    if KEY in param_dict or "zero_optimization" in param_dict:
        return False
    return any(key in QuantizedCommConfig.model_fields for key in param_dict)


def _report_of_variable(arguments: argparse.Namespace) -> list[str]:
    """Describe the block of the variable alone."""
    if not environment.is_set():
        raise ConfigError(f"{VARIABLE} is not set")
    front = arguments.front or "fsdp2"
    if front == "zero":
        raise ConfigError(f"{VARIABLE} alone: allowed with --front zero: a DeepSpeed config, too")
    return _report_of_block(None, front, arguments)


def _report_of_block(path: Path | None, front: str, arguments: argparse.Namespace) -> list[str]:
    """Describe the block of a file, or of the variable, for FSDP2 in bf16 or for DDP in fp32."""
    source = VARIABLE if path is None else str(path)
    config = environment.block_of(path, load_codecs=arguments.load_codecs)
    if config is None:
        return [f"{source}: {KEY} is disabled"]
    stage, dtype = (3, torch.bfloat16) if front == "fsdp2" else (0, torch.float32)
    world = arguments.world or config.node_size or 1
    refusals.together(
        lambda: refusals.refuse_block(config, stage=stage, world=world),
        lambda: _refuse_full_replica(config, stage, dtype.itemsize, arguments, fsdp2=True),
    )
    if arguments.json:
        return [_as_json(config)]
    plan = _plan(config, None, stage, dtype, arguments, kind=planning.KINDS[front])
    return [
        *_description(f"{source}: valid for {plan.front}", config, plan, arguments),
        *_node_shard(config, stage, dtype.itemsize, arguments),
    ]


# ---- what the block saves ----


def _dtype(param_dict: dict[str, Any]) -> torch.dtype:
    """Return the dtype of weights and gradients; bf16 if a Trainer chooses it."""
    low_precision = refusals.low_precision(param_dict)
    if low_precision:
        return planning.DTYPES[low_precision[0]]
    if refusals.automatic_precision(param_dict):
        return torch.bfloat16
    return torch.float32


def _plan(
    config: QuantizedCommConfig,
    param_dict: dict[str, Any] | None,
    stage: int,
    dtype: torch.dtype,
    arguments: argparse.Namespace,
    *,
    has_stock_gradients: bool = False,
    kind: type[Plan] = Plan,
) -> Plan:
    """Return a run with the block, from which its bytes are predicted.

    param_dict: None under FSDP2 and DDP. kind: the class of the front's plans.
    """
    node_size = config.node_size or arguments.node_size or _NODE_SIZE
    nodes = _NODES
    if arguments.world is not None and arguments.world % node_size == 0:
        nodes = arguments.world // node_size
    planned_model = model.of_size(arguments.params or _MODEL_NUMEL, dtype=dtype)
    micro_steps = 1.0
    buckets = forecast.Buckets()
    if param_dict is not None:
        micro_steps = refusals.number(param_dict.get("gradient_accumulation_steps"))
        zero = refusals.whole_section(param_dict, "zero_optimization")
        buckets = planning.buckets_of(zero, planned_model.hidden, stage)
    return kind(
        model=planned_model,
        dtype=dtype,
        stage=stage,
        micro_steps=max(1, int(micro_steps)),
        compute=1.0,
        cluster=Cluster(
            nodes=nodes, node_size=node_size, link=float("inf"), intra_link=float("inf")
        ),
        block=config,
        exact_gradients=has_stock_gradients,
        buckets=buckets,
    )


def _description(
    verdict: str,
    config: QuantizedCommConfig,
    plan: Plan,
    arguments: argparse.Namespace,
) -> list[str]:
    """Return the first line, and lines about the settings of the block.

    verdict: the beginning of the first line.
    """
    refused_on_single_gpus = _refused_on_single_gpus(config, plan, arguments)
    if refused_on_single_gpus:
        verdict += " on nodes with two GPUs or more"
    lines = [f"{verdict}, {_saving(config, plan, arguments)}", *refused_on_single_gpus]
    lines += _without_effect(config, plan)
    if arguments.codecs:
        lines += _codecs(config, arguments)
    full_precision = (
        f"full precision ({plan.dtype.itemsize} bytes each): 1-D parameters, "
        f"parameters under {config.min_numel} elements"
    )
    if config.exclude:
        full_precision += ", names matching " + " ".join(config.exclude)
    lines.append(full_precision)
    if config.warmup_steps:
        lines.append(f"warm-up: the first {config.warmup_steps} steps are in full precision")
    return lines


def _saving(config: QuantizedCommConfig, plan: Plan, arguments: argparse.Namespace) -> str:
    """Say how many fewer bytes are sent, and in which formats."""
    if config.scheme == AUTOTUNE:
        candidates = " or ".join(choosing.autotune_candidates(plan.place))
        return f"{candidates}, whichever is measured to be faster at start-up"
    if config.own_codecs and not arguments.load_codecs:
        names = ", ".join(dict.fromkeys(config.own_codecs.values()))
        return f"bytes depend on codec {names}, not tried (--load-codecs imports it)"
    if plan.ranks == 1:
        return "one GPU sends nothing"
    stock_bytes, volume = forecast.volume_of_block(config, plan)
    sent_bytes = volume.step_bytes(plan.stage, micro_steps=plan.micro_steps)
    saving = in_words.saving(stock_bytes, sent_bytes, nodes=plan.cluster.nodes)
    return f"about {saving}: {in_words.formats(volume.routes, plan.dtype)}"


def _without_effect(config: QuantizedCommConfig, plan: Plan) -> Iterator[str]:
    """Yield a sentence per setting that does nothing in this place."""
    if plan.stage == 0:
        advice = choosing.advice_under_ddp(config)
        if advice is not None:
            yield advice
    elif config.node_shard and plan.stage < 3:
        setting = f"{KEY}.node_shard"
        if config.preset.node_shard:
            setting = f'scheme "{config.scheme}"'
        quantizes = config.weights.enabled or config.gradients.enabled
        loss = "keeps no node shard" if quantizes else 'does no more than "full_precision"'
        yield (
            f"{setting} {loss} under {plan.front}, where every GPU has all weights anyway: it is "
            "for stage 3"
        )
    if config.weights.sends_lossless_differences and plan.dtype == torch.float32:
        yield "weights.lossless has no effect on fp32 weights: set bf16.enabled or fp16.enabled"
    if config.scheme != AUTOTUNE and config.weights.enabled and plan.stage == 3:
        is_sent_whole = config.weights.intra is None and config.keeps_node_shard
        if is_sent_whole and plan.cluster.nodes == 1:
            yield (
                f'scheme "{config.scheme}" compresses weights between nodes only, and there is one '
                'node: use scheme "qsdp"'
            )


def _refused_on_single_gpus(
    config: QuantizedCommConfig, plan: Plan, arguments: argparse.Namespace
) -> list[str]:
    """Return start-up's refusal on nodes with one GPU, if the size of the nodes is not known."""
    node_size = config.node_size or arguments.node_size
    if plan.stage != 3 or node_size is not None or arguments.world == 1:
        return []
    if not refusals.needs_two_per_node(config):
        return []
    reason = refusals.two_per_node(config, fsdp2=isinstance(plan, Fsdp2Plan))
    return [f"on nodes with one GPU start-up refuses it: {reason}"]


# ---- the node shard ----


def _refuse_full_replica(
    config: QuantizedCommConfig,
    stage: int,
    itemsize: int,
    arguments: argparse.Namespace,
    *,
    fsdp2: bool = False,
) -> None:
    """Raise ``ConfigError`` if the node shard is a full copy of the weights on every GPU.

    itemsize: bytes of a weight in full precision.
    """
    node_size = config.node_size or arguments.node_size
    if stage != 3 or config.scheme == AUTOTUNE or node_size is None:
        return
    refusals.refuse_full_replica(
        config,
        world=arguments.world or 2 * node_size,  # if unknown: several nodes
        node_size=node_size,
        model_bytes=None if arguments.params is None else arguments.params * itemsize,
        fsdp2=fsdp2,
    )


def _node_shard(
    config: QuantizedCommConfig, stage: int, itemsize: int, arguments: argparse.Namespace
) -> list[str]:
    """Describe the memory of the node shard, if there is one.

    itemsize: bytes of a weight in full precision.
    """
    if stage != 3 or config.scheme == AUTOTUNE or not config.keeps_node_shard:
        return []
    node_size = config.node_size or arguments.node_size
    if node_size is None:
        return [
            f"node shard: {itemsize} / (GPUs per node) bytes per parameter more on every GPU "
            "(--node-size and --params give it in GB)"
        ]
    if arguments.world == node_size:
        return ["node shard: none, all GPUs are on one node"]
    line = f"node shard: {itemsize / node_size:.3g} bytes per parameter more on every GPU"
    if arguments.params is not None:
        line += f" ({arguments.params * itemsize / node_size / 1e9:.3g} GB)"
    return [line]


# ---- codecs ----


def _codecs(config: QuantizedCommConfig, arguments: argparse.Namespace) -> list[str]:
    """Describe the codecs of both roles; autotune chooses them at start-up."""
    if config.scheme == AUTOTUNE:
        return []
    return [
        _weights_line(config.weights, arguments.load_codecs),
        _gradients_line(config.gradients, arguments.load_codecs),
    ]


def _weights_line(weights: WeightsConfig, codecs_loaded: bool) -> str:
    """Describe the codec of weights."""
    if not weights.enabled:
        return "weights: full precision"
    if weights.lossless:
        return (
            f"weights: lossless differences, {LOSSLESS_BITS} bits per element at a learning rate "
            "of 3e-4, 16 at most"
        )
    if weights.codec is not None and not codecs_loaded:
        return f"weights: {_untried_codec(weights.codec)}"
    if weights.codec is not None:
        line = f"weights: {_own_codec(weights.codec)}"
    else:
        codes = _codes(weights.bits, weights.group_size, weights.range)
        line = f"weights: {codes}, {weights.rounding} rounding"
        if weights.levels == "learned":
            line += ", learned levels"
    if weights.difference:
        line += ", of differences"
    if weights.codec is None and weights.intra is not None:
        inside = _codes(weights.intra.bits, weights.intra.group_size, weights.range)
        line += f"; inside a node {inside}"
    return line


def _gradients_line(gradients: GradientsConfig, codecs_loaded: bool) -> str:
    """Describe the codecs of gradients on both hops."""
    if not gradients.enabled:
        return "gradients: full precision"
    if gradients.codec is not None and not codecs_loaded:
        return f"gradients: {_untried_codec(gradients.codec)}"
    if gradients.codec is not None:
        return f"gradients: {_own_codec(gradients.codec)}"
    is_gaussian = gradients.range == "gaussian"
    line = f"gradients: {_codes(gradients.bits, gradients.group_size, gradients.range)}"
    if is_gaussian:
        line += ", nearest level, scale of EDEN"
    else:
        line += f", {gradients.rounding} rounding"
    if gradients.rotation:
        line += f", Hadamard blocks of {gradients.rotation}"
    if gradients.intra is not None:
        intra_range = "absmax" if is_gaussian else gradients.range
        inside = _codes(gradients.intra.bits, gradients.intra.group_size, intra_range)
        line += f"; inside a node {inside}"
        if is_gaussian:
            line += f", {gradients.rounding} rounding"
    if gradients.returned_bits is not None:
        returned_range = range_of_width(gradients.range, gradients.returned_bits)
        back = _codes(gradients.returned_bits, gradients.group_size, returned_range)
        line += f"; with replicas under FSDP2 sums go back in {back}"
    return line


def _untried_codec(module: str) -> str:
    return f"codec {module}, not tried (--load-codecs imports it)"


def _own_codec(module: str) -> str:
    """Describe a codec of the user's own, which is imported and tried."""
    from ds_quant.codec.module import load as load_codec

    nbytes = load_codec(module).wire_bytes(_NUMEL)
    return f"codec {module}, {nbytes / _NUMEL:.3f} bytes per element"


def _codes(bits: int, group_size: int, value_range: str) -> str:
    """Describe codes and scales, and their bytes per element of a large tensor."""
    layout = wire_layout(
        _NUMEL,
        bits=bits,
        group_size=group_size,
        has_offset=value_range == "minmax",
        scale_bytes=BF16_BYTES if value_range == "gaussian" else FP32_BYTES,
    )
    return (
        f"{bits}-bit {value_range} codes, groups of {group_size}, "
        f"{layout.nbytes / _NUMEL:.3f} bytes per element"
    )
