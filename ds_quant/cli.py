"""The ``ds_quant`` command: check a config, a machine or a plan before a job starts.

``validate`` and ``schema`` load neither torch nor deepspeed, so that they answer at once; the
other commands are in tools/.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import ds_quant
from ds_quant import refusals
from ds_quant.config import KEY, ConfigError, QuantizedCommConfig, json_schema, parse
from ds_quant.layout import wire_layout
from ds_quant.presets import AUTOTUNE, CANDIDATES
from ds_quant.tools import keys, options

_STAGES = {
    1: "ZeRO-1: gradients reduced once per step, updated weights gathered after it",
    2: "ZeRO-2: gradients reduced every micro-step, updated weights gathered after the step",
    3: "ZeRO-3: weights gathered for forward and backward, gradients reduced every micro-step",
}


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console script; the exit code is 1 if anything is wrong."""
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments)
    except BrokenPipeError:  # as of "| head": nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the last flush
        return 0


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command != "validate" or arguments.load_codecs:
        sys.path.append(os.getcwd())  # where a codec of the user's own may lie
    if arguments.command == "schema":
        print(keys.markdown() if arguments.markdown else json.dumps(json_schema(), indent=2))
        code = 0
    elif arguments.command == "validate":
        code = max([_validate(path, arguments) for path in arguments.paths])
    else:
        code = importlib.import_module(f"ds_quant.tools.{arguments.command}").main(arguments)
    sys.stdout.flush()  # inside the try of main
    return code


def _validate(path: Path, arguments: argparse.Namespace) -> int:
    try:
        print("\n".join(_report(path, load(path), arguments)))
    except (OSError, ValueError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(f"{path}: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ds_quant", description=__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"ds_quant {ds_quant.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    validate = commands.add_parser("validate", help="check the quantized_comm block of a config")
    add = validate.add_argument
    add("paths", nargs="+", type=Path, metavar="PATH", help="ds_config.json")
    add("--world", type=options.count, help="number of ranks, to check node_size")
    add("--node-size", type=options.count, help="ranks per node, where the launcher says so")
    add("--params", type=options.count, help="parameters such as 7b, for memory in GB")
    add("--load-codecs", action="store_true", help="import and try codecs that the config names")
    add("--json", action="store_true", help="print the block with every key instead")
    schema = commands.add_parser("schema", help="print the JSON schema of the block, for editors")
    schema.add_argument("--markdown", action="store_true", help="as docs/keys.md")
    options.add_commands(commands)
    return parser


def load(path: Path) -> dict[str, Any]:
    """Reads the file as DeepSpeed does: JSON with comments, duplicate keys refused."""
    import hjson

    with path.open(encoding="utf-8") as file:
        config = hjson.load(file, object_pairs_hook=_without_duplicates)
    if not isinstance(config, dict):
        raise ConfigError("a DeepSpeed config is an object in braces")
    return config


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ConfigError(f"{', '.join(twice)}: set twice in one object")
    return dict(pairs)


def _report(path: Path, param_dict: dict[str, Any], arguments: argparse.Namespace) -> list[str]:
    """What the file asks for. Raises ``ConfigError`` where start-up would."""
    config = parse(param_dict, load_codecs=arguments.load_codecs)
    if config is None:
        reason = f"{KEY} is disabled" if KEY in param_dict else f"no {KEY} block"
        return [f"{path}: {reason}: DeepSpeed communicates as without ds_quant"]
    refusals.refuse(param_dict, config)
    if arguments.world is not None:
        config.validate_world(arguments.world)
    stage = refusals.stage_of(param_dict)
    shard = _node_shard(param_dict, config, arguments) if stage == 3 else []
    if arguments.json:
        return [json.dumps({KEY: config.resolved()}, indent=2)]
    zero = refusals.section(param_dict, "zero_optimization")
    exact = refusals.exact_gradient_reason(stage, lambda name: zero.get(name, True))
    return [
        f"{path}: valid",
        *_meaning(config, exact, loaded=arguments.load_codecs),
        *shard,
        _STAGES[stage],
    ]


def _node_shard(
    param_dict: dict[str, Any], config: QuantizedCommConfig, arguments: argparse.Namespace
) -> list[str]:
    """What ZeRO-3 keeps on every rank. Raises ``ConfigError`` where that is a full copy."""
    if config.scheme == AUTOTUNE or not config.keeps_node_shard:
        return []
    size, numel = config.node_size or arguments.node_size, arguments.params
    low = any(
        refusals.section(param_dict, name).get("enabled") is True for name in ("bf16", "fp16")
    )
    each = 2 if low else 4
    if size is None:
        return [
            f"node shard: {each} / (ranks per node) bytes per parameter more on every rank; refused"
            " with one rank per node (--node-size and --params check it and give the memory)"
        ]
    world = arguments.world or 2 * size  # taken for several nodes
    memory = None if numel is None else numel * each
    refusals.refuse_full_replica(config, world=world, node_size=size, model_bytes=memory)
    if world == size:
        return ["node shard: none, all ranks are on one node"]
    gigabytes = "" if memory is None else f" ({memory / size / 1e9:.3g} GB)"
    return [f"node shard: {each / size:.3g} bytes per parameter more on every rank{gigabytes}"]


def _meaning(config: QuantizedCommConfig, exact: str | None, *, loaded: bool) -> list[str]:
    """``exact``: why gradients stay on DeepSpeed's own path, if they do."""
    gradients = f"gradients: full precision, because {exact}"
    if config.scheme == AUTOTUNE:
        lines = [f"scheme: {', '.join(CANDIDATES)}, as links and codecs measured at start-up say"]
        lines += [gradients] if exact else []
    else:
        lines = [_role_line("weights", config.weights, loaded)]
        lines.append(gradients if exact else _role_line("gradients", config.gradients, loaded))
    kept = f"full precision: 1-D parameters, parameters under {config.min_numel} elements"
    if config.exclude:
        kept += ", names matching " + " ".join(config.exclude)
    lines.append(kept)
    if config.warmup_steps:
        lines.append(f"warm-up: the first {config.warmup_steps} steps are in full precision")
    return lines


def _role_line(role: str, settings: Any, loaded: bool) -> str:
    if not settings.enabled:
        return f"{role}: full precision"
    if settings.codec is not None:
        return f"{role}: {_codec_of(settings, loaded)}"
    extras = [f"{settings.rounding} rounding"]
    if getattr(settings, "levels", "") == "learned":
        extras.append("learned levels")
    if getattr(settings, "difference", False):
        extras.append("of differences")
    if getattr(settings, "rotation", 0):
        extras.append(f"Hadamard blocks of {settings.rotation}")
    line = f"{role}: {_codes(settings, settings.range)}, {', '.join(extras)}"
    if settings.intra is not None:
        line += f"; inside a node {_codes(settings.intra, settings.range)}"
    return line


def _codec_of(settings: Any, loaded: bool) -> str:
    """A codec of the user's own."""
    if not loaded:
        return f"codec {settings.codec}, not tried (--load-codecs imports it)"
    from ds_quant.module_codec import load

    numel = 2**20
    nbytes = load(settings.codec).wire_bytes(numel)
    line = f"codec {settings.codec}, {nbytes / numel:.3f} bytes per element (bf16: 2)"
    return line + (", of differences" if getattr(settings, "difference", False) else "")


def _codes(settings: Any, value_range: str) -> str:
    numel = 2**20
    nbytes = wire_layout(
        numel,
        bits=settings.bits,
        group_size=settings.group_size,
        has_offset=value_range == "minmax",
    ).nbytes
    return (
        f"{settings.bits}-bit {value_range} codes, groups of {settings.group_size}, "
        f"{nbytes / numel:.3f} bytes per element (bf16: 2)"
    )
