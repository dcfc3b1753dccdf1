"""The ``ds_quant`` command: check a config, a machine or a plan before a job starts.

``validate`` and ``schema`` load neither torch nor deepspeed, so that they answer at once; the
other commands are in tools/.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ds_quant
from ds_quant.config import environment
from ds_quant.config.environment import VARIABLE
from ds_quant.config.presets import AUTOTUNE, renamed
from ds_quant.config.schema import KEY, ConfigError, QuantizedCommConfig, json_schema, parse
from ds_quant.kernels.wire import BF16_BYTES, FP32_BYTES, wire_layout
from ds_quant.policy import choosing, refusals
from ds_quant.tools import docs

_LOAD_CODECS = "import and try codecs that the config names"
_STAGES = {
    1: "ZeRO-1: updated weights gathered after the step, gradients reduced once per step",
    2: "ZeRO-2: updated weights gathered after the step, gradients reduced every micro-step",
    3: "ZeRO-3: weights gathered for forward and backward, gradients reduced every micro-step",
}
_ONCE = ", between nodes of several ranks once per step"  # gradients, under ZeRO-2 and 3
_YAML = re.compile(r"(\s|#[^\n]*\n)*(---|[\w.]+:\s)")


# What wrong files and values raise is told in one line; other errors are bugs.
_MISTAKES = (OSError, ValueError, RecursionError, OverflowError)
_WORDS = {RecursionError: "nested too deeply", OverflowError: "a number is too large"}


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console script; the exit code is 1 if anything is wrong."""
    arguments = _parser().parse_args(argv)
    if sys.stdout is None:  # as of ">&-"
        sys.exit("ds_quant: standard output is closed")
    try:
        return _run(arguments)
    except BrokenPipeError:  # as of "| head": nobody reads on
        code = 0
    except _MISTAKES as error:
        print(f"ds_quant {arguments.command}: {_WORDS.get(type(error), error)}", file=sys.stderr)
        code = 1
    try:
        sys.stdout.flush()
    except OSError:  # Python would try again at its exit, and end with 120
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())
    return code


@contextmanager
def about(subject: object) -> Iterator[None]:
    """Name the file or option in the message of a mistake, which becomes a ValueError."""
    try:
        yield
    except _MISTAKES as error:
        why = getattr(error, "strerror", None) or _WORDS.get(type(error), error)
        raise ValueError(f"{subject}: {why}") from error


def _run(arguments: argparse.Namespace) -> int:
    if getattr(arguments, "load_codecs", False):
        sys.path.append(os.getcwd())  # where a codec of the user's own may lie
    if arguments.command == "schema":
        print(docs.markdown() if arguments.markdown else json.dumps(json_schema(), indent=2))
        code = 0
    elif arguments.command == "validate":
        if not arguments.paths and not arguments.env:
            raise ConfigError(f"no file: give a DeepSpeed config, or --env for {VARIABLE} alone")
        code = max([_validate(path, arguments) for path in arguments.paths or [None]])
    else:
        code = importlib.import_module(f"ds_quant.tools.{arguments.command}").main(arguments)
    sys.stdout.flush()  # here, so that main tells of a full disk
    return code


def _validate(path: Path | None, arguments: argparse.Namespace) -> int:
    try:
        with about(path or "--env"):
            lines = _of_variable(arguments) if path is None else _report(path, arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


def load(path: Path) -> dict[str, Any]:
    """Read the file as DeepSpeed does: JSON with comments, duplicate keys refused."""
    import hjson

    text = path.read_text("utf-8")
    if _YAML.match(text):
        raise ConfigError(
            "YAML, and DeepSpeed reads JSON: write it in braces; of accelerate's YAML give "
            "the file that deepspeed_config_file names"
        )
    config = hjson.loads(text, object_pairs_hook=_without_duplicates)
    if not isinstance(config, dict):
        raise ConfigError("a DeepSpeed config is an object in braces")
    return config


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [key for key, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{', '.join(twice)}: set twice in one object")
    return dict(pairs)


def _report(path: Path, arguments: argparse.Namespace) -> list[str]:
    """Describe what the file asks for. Raises ``ConfigError`` where start-up would."""
    param_dict = load(path)
    from_variable = arguments.env and environment.is_source(param_dict)
    read = environment.parse if arguments.env else parse
    stage = refusals.stage_of(param_dict)
    block = partial(read, param_dict, load_codecs=arguments.load_codecs)
    try:
        config = block()
    except ConfigError:  # told with what else is wrong
        refusals.together(block, partial(refusals.refuse_unsupported, param_dict))
        raise
    if config is None:
        reason = f"{KEY} is disabled" if KEY in param_dict else f"no {KEY} block"
        return [f"{path}: {reason}: DeepSpeed communicates as without ds_quant"]
    each = (
        2 if refusals.low_precision(param_dict) or refusals.automatic_precision(param_dict) else 4
    )
    shard = partial(_node_shard, each, config, arguments, stage)
    world = partial(config.validate_world, arguments.world or config.node_size or 1)
    refusals.together(partial(refusals.refuse, param_dict, config), world, shard)
    if arguments.json:
        return [json.dumps({KEY: config.resolved()}, indent=2)]
    zero = refusals.section(param_dict, "zero_optimization")
    exact = refusals.exact_gradient_reason(stage, lambda name: zero.get(name, True))
    return [
        f"{path}: valid" + (f", block from {VARIABLE}" if from_variable else ""),
        *filter(None, [renamed(param_dict.get(KEY))]),
        *_meaning(config, exact, arguments, stage, each),
        *shard(),
        _STAGES[stage] + _ONCE * (stage > 1 and config.gradients.cross == "step"),
        *not_plain_json(path),
    ]


def not_plain_json(path: Path) -> list[str]:
    """Say where a file is not JSON, though DeepSpeed reads it."""
    try:
        json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        return [
            f"DeepSpeed reads this file, Hugging Face does not: line {error.lineno}: {error.msg}"
        ]
    return []


def _of_variable(arguments: argparse.Namespace) -> list[str]:
    """Describe the block of the variable alone."""
    if not environment.is_set():
        raise ConfigError(f"{VARIABLE} is not set")
    config = environment.parse({}, load_codecs=arguments.load_codecs)
    if config is None:
        return [f"{VARIABLE}: {KEY} is disabled"]
    if arguments.json:
        return [json.dumps({KEY: config.resolved()}, indent=2)]
    return [f"{VARIABLE}: valid", *_meaning(config, None, arguments)]


def _node_shard(
    each: int, config: QuantizedCommConfig, arguments: argparse.Namespace, stage: Any
) -> list[str]:
    """Describe what ZeRO-3 keeps on every rank, of weights of ``each`` bytes. Raises
    ``ConfigError`` for a full copy.
    """
    if stage != 3 or config.scheme == AUTOTUNE or not config.keeps_node_shard:
        return []
    size, numel = config.node_size or arguments.node_size, arguments.params
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


def _meaning(
    config: QuantizedCommConfig,
    exact: str | None,
    arguments: argparse.Namespace,
    stage: int = 3,
    each: int = 2,
) -> list[str]:
    """``exact``: why gradients stay on DeepSpeed's own path, if they do. each: bytes of an element
    in full precision.
    """
    loaded = arguments.load_codecs
    gradients = f"gradients: full precision, because {exact}"
    if config.scheme == AUTOTUNE:
        place = choosing.Place(stage, 2, config.node_size or arguments.node_size or 8)
        tried = " or ".join(choosing.tuned(place))
        lines = [f"scheme: {tried}, whichever is measured to be faster at start-up"]
        lines += [gradients] if exact else []
    else:
        lines = [_role_line("weights", config.weights, loaded)]
        lines.append(gradients if exact else _role_line("gradients", config.gradients, loaded))
    kept = f"full precision ({each} bytes each): 1-D parameters, "
    kept += f"parameters under {config.min_numel} elements"
    if config.exclude:
        kept += ", names matching " + " ".join(config.exclude)
    lines.append(kept)
    if config.warmup_steps:
        lines.append(f"warm-up: the first {config.warmup_steps} steps are in full precision")
    return lines


_NUMEL = 2**20  # whose bytes per element are shown


def _role_line(role: str, settings: Any, loaded: bool) -> str:
    if not settings.enabled:
        return f"{role}: full precision"
    # Keys that only one role has.
    own = {"lossless": False, "levels": "", "difference": False, "rotation": 0} | dict(settings)
    if own["lossless"]:
        from ds_quant.policy.cost import LOSSLESS_BITS

        return (
            f"{role}: lossless differences, {LOSSLESS_BITS} bits per element at a learning rate of "
            "3e-4, 16 at most"
        )
    differ = ", of differences" * own["difference"]
    if settings.codec is not None:
        return f"{role}: {_codec_of(settings, loaded)}{differ * loaded}"
    gaussian, rounding = settings.range == "gaussian", f", {settings.rounding} rounding"
    line = f"{role}: {_codes(settings, settings.range)}"
    line += ", nearest level, scale of EDEN" if gaussian else rounding
    line += ", learned levels" * (own["levels"] == "learned") + differ
    line += f", Hadamard blocks of {own['rotation']}" if own["rotation"] else ""
    if settings.intra is not None:
        inside = _codes(settings.intra, "absmax" if gaussian else settings.range)
        line += f"; inside a node {inside}{rounding * gaussian}"
    return line


def _codec_of(settings: Any, loaded: bool) -> str:
    """Describe a codec of the user's own."""
    if not loaded:
        return f"codec {settings.codec}, not tried (--load-codecs imports it)"
    from ds_quant.codec.module import load

    nbytes = load(settings.codec).wire_bytes(_NUMEL)
    return f"codec {settings.codec}, {nbytes / _NUMEL:.3f} bytes per element"


def _codes(settings: Any, value_range: str) -> str:
    layout = wire_layout(
        _NUMEL, bits=settings.bits, group_size=settings.group_size,
        has_offset=value_range == "minmax",
        scale_bytes=BF16_BYTES if value_range == "gaussian" else FP32_BYTES,
    )  # fmt: skip
    return (
        f"{settings.bits}-bit {value_range} codes, groups of {settings.group_size}, "
        f"{layout.nbytes / _NUMEL:.3f} bytes per element"
    )


# ---- arguments of the commands ----


_POWERS = {"k": 3, "m": 6, "b": 9, "t": 12}  # 7b: as models are named


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ds_quant", description=__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"ds_quant {ds_quant.__version__}")
    command = parser.add_subparsers(dest="command", required=True).add_parser
    add = command("validate", help="check the quantized_comm block of a config").add_argument
    add("paths", nargs="*", type=Path, metavar="PATH", help="ds_config.json")
    add("--env", action="store_true", help=f"with the block of {VARIABLE} where a file has none")
    add("--world", type=count, help="number of ranks, to check node_size")
    add("--node-size", type=count, help="ranks per node, where the launcher says so")
    add("--params", type=numel, help="parameters such as 7b, for memory in GB")
    add("--load-codecs", action="store_true", help=_LOAD_CODECS)
    add("--json", action="store_true", help="print the block with every key instead")
    add = command("schema", help="print the JSON schema of the block, for editors").add_argument
    add("--markdown", action="store_true", help="as docs/keys.md")
    add = command("migrate", help="turn ZeRO++, MiCS and 1-bit keys into a block").add_argument
    add("path", type=file, metavar="PATH", help="ds_config.json")
    beside = "the new file, which may exist (beside the old one, with .ds_quant before .json)"
    add("-o", dest="out", type=Path, metavar="FILE", help=beside)
    add = command("doctor", help="check this machine and try the plugin on it").add_argument
    add("--json", action="store_true", help="all facts as JSON")
    add("--no-processes", action="store_true", help="leave out the exchange")
    add("--timeout", type=positive, metavar="SECONDS",
        help="limit of the two processes (120, more on a loaded host)")  # fmt: skip
    add = command("probe", help="measure the links between processes").add_argument
    add("--out", type=Path, default=Path("probe.json"), help="JSON for estimate (probe.json)")
    add("--node-size", type=count, help="ranks per node (as launched)")
    add("--hostfile", type=file, help="start it on these hosts with the deepspeed launcher")
    _estimate(command("estimate", help="predict what each scheme would bring").add_argument)
    add = command("plot", help="draw the metrics of a run: bytes, error, seconds").add_argument
    add("metrics", type=file, metavar="METRICS", help="the file of quantized_comm.metrics.file")
    add("--out", type=Path, metavar="FILE", help=".png, .svg or .pdf (METRICS with .png)")
    return parser


def _estimate(add: Callable[..., Any]) -> None:
    add("--params", type=numel, help="parameters, such as 7b or 7e9")
    add("--trained", type=share, default=1.0, metavar="SHARE",
        help="of the parameters, the others are frozen; LoRA: about 0.01 (1)")  # fmt: skip
    add("--model-config", type=file, help="config.json of a Hugging Face causal language model")
    add("--ds-config", type=file, help="DeepSpeed config: stage, accumulation, dtype, its block")
    add("--load-codecs", action="store_true", help=_LOAD_CODECS)
    add("--stage", type=int, choices=(1, 2, 3), help="ZeRO stage (3)")
    add("--accumulation", type=count, help="micro-steps per optimizer step (1)")
    add("--dtype", choices=("bf16", "fp16", "fp32"), help="of weights and gradients (bf16)")
    add("--nodes", type=count, help="(1, or as probed)")
    add("--gpus", type=count, help="per node (1, or as probed)")
    add("--link", type=positive, metavar="GBIT", help="Gb/s into one node from the others")
    add("--intra", type=positive, metavar="GBIT", help="Gb/s into one GPU from its node")
    add("--latency", type=positive, help="seconds per collective (2e-5, or as probed)")
    add("--probe", type=file, help="links as measured by 'ds_quant probe'")
    add("--step", type=positive, metavar="SECONDS", help="compute of one optimizer step")
    whole = "a whole step with DeepSpeed as shipped, to find the rate that the link reaches"
    add("--measured", type=positive, metavar="SECONDS", help=whole)
    add("--gpu-memory", type=positive, metavar="GB", help="per GPU: leave out what does not fit")
    add("--encode", type=positive, default=1e11, help="parameters per second and GPU (1e11)")
    add("--all", action="store_true", help="every scheme, memory and accumulation")
    add("--json", action="store_true", help="the rows as JSON")
    add("--plot", type=Path, help="PNG of the speed-up against the link rate")


def positive(value: str) -> float:
    """A number above 0."""
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{value!r}: allowed: numbers above 0")
    return number


def count(value: str) -> int:
    """A whole number from 1, also as 7e9 or 7b; no model and no cluster has more than 1e15."""
    power = _POWERS.get(value[-1:].lower(), 0)
    number = positive(f"{value[:-1]}e{power}" if power else value)
    if number != int(number) or number > 1e15:
        raise argparse.ArgumentTypeError(f"{value!r}: allowed: whole numbers from 1 to 1e15")
    return int(number)


def numel(value: str) -> int:
    """Parameters of a model: a number so small that billions are meant is asked about."""
    number = count(value)
    if number < 1000:
        raise argparse.ArgumentTypeError(f"{value!r}: {value} billion? write {value}b")
    return number


def share(value: str) -> float:
    """A number above 0 and up to 1."""
    number = positive(value)
    if number > 1:
        raise argparse.ArgumentTypeError(f"{value!r}: allowed: above 0, up to 1")
    return number


def file(value: str) -> Path:
    """A file that exists."""
    path = Path(value)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{value!r}: no such file")
    return path
