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
    sys.path.append(os.getcwd())  # where a codec of the user's own may lie
    arguments = _parser().parse_args(argv)
    if arguments.command == "schema":
        print(keys.markdown() if arguments.markdown else json.dumps(json_schema(), indent=2))
        return 0
    if arguments.command != "validate":
        return importlib.import_module(f"ds_quant.tools.{arguments.command}").main(arguments)
    failures = 0
    for path in arguments.paths:
        try:
            print("\n".join(_report(path, load(path), arguments.world)))
        except (OSError, ValueError) as error:
            failures += 1
            print(f"{path}: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ds_quant", description=__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"ds_quant {ds_quant.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    validate = commands.add_parser("validate", help="check the quantized_comm block of a config")
    validate.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="ds_config.json")
    validate.add_argument("--world", type=int, help="number of ranks, to check node_size")
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


def _report(path: Path, param_dict: dict[str, Any], world: int | None) -> list[str]:
    """What the file asks for. Raises ``ConfigError``."""
    config = parse(param_dict)
    if config is None:
        reason = f"{KEY} is disabled" if KEY in param_dict else f"no {KEY} block"
        return [f"{path}: {reason}: DeepSpeed communicates as without ds_quant"]
    zero = param_dict.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    config.validate_stage(stage)
    if world is not None:
        config.validate_world(world)
    block = json.dumps({KEY: config.resolved()}, indent=2)
    return [f"{path}: valid", block, *_meaning(config), _STAGES[stage]]


def _meaning(config: QuantizedCommConfig) -> list[str]:
    if config.scheme == AUTOTUNE:
        lines = [f"scheme: {', '.join(CANDIDATES)}, as links and codecs measured at start-up say"]
    else:
        lines = [_role_line("weights", config.weights), _role_line("gradients", config.gradients)]
    exact = f"full precision: 1-D parameters, parameters under {config.min_numel} elements"
    if config.exclude:
        exact += ", names matching " + " ".join(config.exclude)
    lines.append(exact)
    if config.warmup_steps:
        lines.append(f"warm-up: the first {config.warmup_steps} steps are in full precision")
    return lines


def _role_line(role: str, settings: Any) -> str:
    if not settings.enabled:
        return f"{role}: full precision"
    if settings.codec is not None:
        return f"{role}: {_codec_of(settings)}"
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


def _codec_of(settings: Any) -> str:
    """A codec of the user's own, which has been imported by now."""
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
