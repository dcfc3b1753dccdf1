"""``ds_quant validate``: check the block of a DeepSpeed config, and describe its meaning.

Refuses the settings that start-up refuses, with the same sentences. Loads neither torch nor
deepspeed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ds_quant.codec.rules import range_of_width
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
from ds_quant.policy import choosing, refusals
from ds_quant.tools.files import about, load, not_plain_json

_STAGES = {
    1: "ZeRO-1: updated weights gathered after the step, gradients reduced once per step",
    2: "ZeRO-2: updated weights gathered after the step, gradients reduced every micro-step",
    3: "ZeRO-3: weights gathered for forward and backward, gradients reduced every micro-step",
}
_ONCE = ", between nodes of several ranks once per step"  # gradients, under ZeRO-2 and 3
_NUMEL = 2**20  # elements of a message from which bytes per element are computed


def main(arguments: argparse.Namespace) -> int:
    """Print a report per file; return 1 if a file is refused."""
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
    param_dict = load(path)
    config = _read_block(param_dict, arguments)
    if config is None:
        reason = f"{KEY} is disabled" if KEY in param_dict else f"no {KEY} block"
        return [f"{path}: {reason}: DeepSpeed communicates as without ds_quant"]
    stage = refusals.stage_of(param_dict)
    itemsize = 4
    if refusals.low_precision(param_dict) or refusals.automatic_precision(param_dict):
        itemsize = 2
    world = arguments.world or config.node_size or 1
    refusals.together(
        lambda: refusals.refuse(param_dict, config),
        lambda: config.validate_world(world),
        lambda: _node_shard(config, stage, itemsize, arguments),
    )
    if arguments.json:
        return [_as_json(config)]
    zero = refusals.section(param_dict, "zero_optimization")
    stock_reason = refusals.stock_gradients_reason(stage, lambda name: zero.get(name, True))
    verdict = f"{path}: valid"
    refused_on_single_gpus = _refused_on_single_gpus(config, stage, arguments)
    if refused_on_single_gpus:
        verdict += " on nodes with two GPUs or more"
    if arguments.env and environment.is_source(param_dict):
        verdict += f", block from {VARIABLE}"
    report = [verdict, *refused_on_single_gpus]
    report += _meaning(config, arguments, stage, itemsize, stock_reason)
    report += _node_shard(config, stage, itemsize, arguments)
    steps = _STAGES[stage]
    if stage > 1 and config.gradients.cross == "step":
        steps += _ONCE
    return [*report, steps, *not_plain_json(path)]


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


def _report_of_variable(arguments: argparse.Namespace) -> list[str]:
    """Describe the block of the variable alone."""
    if not environment.is_set():
        raise ConfigError(f"{VARIABLE} is not set")
    config = environment.parse({}, load_codecs=arguments.load_codecs)
    if config is None:
        return [f"{VARIABLE}: {KEY} is disabled"]
    if arguments.json:
        return [_as_json(config)]
    # The stage and the dtype are unknown: the most frequent ones.
    return [f"{VARIABLE}: valid", *_meaning(config, arguments, stage=3, itemsize=2)]


def _as_json(config: QuantizedCommConfig) -> str:
    return json.dumps({KEY: config.resolved()}, indent=2)


def _node_shard(
    config: QuantizedCommConfig, stage: int, itemsize: int, arguments: argparse.Namespace
) -> list[str]:
    """Describe the memory of the node shard, if there is one.

    itemsize: bytes of a weight in full precision.

    Raises:
        ConfigError: the node shard is a full copy of the weights on every rank.
    """
    if stage != 3 or config.scheme == AUTOTUNE or not config.keeps_node_shard:
        return []
    node_size = config.node_size or arguments.node_size
    if node_size is None:
        return [
            f"node shard: {itemsize} / (GPUs per node) bytes per parameter more on every GPU "
            "(--node-size and --params give it in GB)"
        ]
    world = arguments.world or 2 * node_size  # if unknown: several nodes
    model_bytes = None if arguments.params is None else arguments.params * itemsize
    refusals.refuse_full_replica(config, world=world, node_size=node_size, model_bytes=model_bytes)
    if world == node_size:
        return ["node shard: none, all GPUs are on one node"]
    line = f"node shard: {itemsize / node_size:.3g} bytes per parameter more on every GPU"
    if model_bytes is not None:
        line += f" ({model_bytes / node_size / 1e9:.3g} GB)"
    return [line]


def _refused_on_single_gpus(
    config: QuantizedCommConfig, stage: int, arguments: argparse.Namespace
) -> list[str]:
    """Return start-up's refusal on nodes with one GPU, if the size of the nodes is not known."""
    node_size = config.node_size or arguments.node_size
    if stage != 3 or node_size is not None or arguments.world == 1:
        return []
    if not refusals.needs_two_per_node(config):
        return []
    return [f"on nodes with one GPU start-up refuses it: {refusals.two_per_node(config)}"]


def _meaning(
    config: QuantizedCommConfig,
    arguments: argparse.Namespace,
    stage: int,
    itemsize: int,
    stock_reason: str | None = None,
) -> list[str]:
    """Describe the codecs of both roles and the parameters in full precision.

    itemsize: bytes of an element in full precision.
    stock_reason: the setting that leaves gradients to DeepSpeed, or None.
    """
    stock_gradients = f"gradients: full precision, because {stock_reason}"
    if config.scheme == AUTOTUNE:
        place = choosing.Place(stage, 2, config.node_size or arguments.node_size or 8)
        candidates = " or ".join(choosing.autotune_candidates(place))
        lines = [f"scheme: {candidates}, whichever is measured to be faster at start-up"]
        if stock_reason is not None:
            lines.append(stock_gradients)
    else:
        lines = [_weights_line(config.weights, arguments.load_codecs)]
        if stock_reason is not None:
            lines.append(stock_gradients)
        else:
            lines.append(_gradients_line(config.gradients, arguments.load_codecs))
    full_precision = (
        f"full precision ({itemsize} bytes each): 1-D parameters, "
        f"parameters under {config.min_numel} elements"
    )
    if config.exclude:
        full_precision += ", names matching " + " ".join(config.exclude)
    lines.append(full_precision)
    if config.warmup_steps:
        lines.append(f"warm-up: the first {config.warmup_steps} steps are in full precision")
    return lines


def _weights_line(weights: WeightsConfig, codecs_loaded: bool) -> str:
    """Describe the codec of weights."""
    if not weights.enabled:
        return "weights: full precision"
    if weights.lossless:
        # Imported here: it loads torch.
        from ds_quant.policy.cost import LOSSLESS_BITS

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
