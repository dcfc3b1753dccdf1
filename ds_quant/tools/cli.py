"""The ``ds_quant`` command: check a config, a machine or a plan before a job starts.

Every command is a module of this folder with a function ``main``; only "schema" is docs.py.
Modules are imported when they run: ``schema`` and ``migrate`` load neither torch nor deepspeed, so
that they answer at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import ds_quant
from ds_quant.config.environment import VARIABLE
from ds_quant.tools.arguments import count, file, numel, positive, share
from ds_quant.tools.files import MISTAKES, reason_of

FRONTS = ("zero", "fsdp2", "ddp")
_LOAD_CODECS = "import and try codecs that the config names"
AddArgument = Callable[..., argparse.Action]


def main(argv: list[str] | None = None) -> int:
    """Run a command; the exit code is 1 if anything is wrong."""
    arguments = _parser().parse_args(argv)
    if sys.stdout is None:  # shell: >&-
        sys.exit("ds_quant: standard output is closed")
    try:
        return _run(arguments)
    except BrokenPipeError:  # the reader has closed the pipe, such as "| head"
        code = 0
    except MISTAKES as error:
        print(f"ds_quant {arguments.command}: {reason_of(error)}", file=sys.stderr)
        code = 1
    try:
        sys.stdout.flush()
    except OSError:
        # At its exit Python would flush again and end with code 120.
        if sys.__stdout__ is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())
    return code


def _run(arguments: argparse.Namespace) -> int:
    if getattr(arguments, "load_codecs", False):
        sys.path.append(os.getcwd())  # so that a codec in the working folder is found
    module = "docs" if arguments.command == "schema" else arguments.command
    code: int = importlib.import_module(f"ds_quant.tools.{module}").main(arguments)
    sys.stdout.flush()  # here, so that main reports a full disk
    return code


# ---- arguments ----


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds_quant", description="Check a config, a machine or a plan before a job starts."
    )
    parser.add_argument("--version", action="version", version=f"ds_quant {ds_quant.__version__}")
    command = parser.add_subparsers(dest="command", required=True).add_parser
    _validate(command("validate", help="check the quantized_comm block of a config").add_argument)
    _schema(command("schema", help="print the JSON schema of the block").add_argument)
    _migrate(command("migrate", help="turn ZeRO++, MiCS and 1-bit keys into a block").add_argument)
    _doctor(command("doctor", help="check this machine and try the plugin on it").add_argument)
    _probe(command("probe", help="measure the links between processes").add_argument)
    _estimate(command("estimate", help="predict the step of each scheme").add_argument)
    _plot(command("plot", help="draw the metrics of a run: bytes, error, seconds").add_argument)
    return parser


def _validate(add: AddArgument) -> None:
    add("paths", nargs="*", type=Path, metavar="PATH", help="ds_config.json, or a block alone")
    add(
        "--front",
        choices=FRONTS,
        help="check the block for DeepSpeed ZeRO, FSDP2 or DDP (zero; fsdp2 for a block alone)",
    )
    add("--env", action="store_true", help=f"use the block of {VARIABLE} if a file has none")
    add("--world", type=count, help="number of ranks, to check node_size")
    add("--node-size", type=count, help="ranks per node, if the launcher sets them")
    add("--params", type=numel, help="parameters such as 7b, for memory in GB")
    add("--codecs", action="store_true", help="describe the codecs, too")
    add("--load-codecs", action="store_true", help=_LOAD_CODECS)
    add("--json", action="store_true", help="print the block with every key instead")


def _schema(add: AddArgument) -> None:
    add("--markdown", action="store_true", help="print docs/keys.md instead")


def _migrate(add: AddArgument) -> None:
    add("path", type=file, metavar="PATH", help="ds_config.json")
    add(
        "-o",
        dest="out",
        type=Path,
        metavar="FILE",
        help="the new file, may exist (default: PATH with .ds_quant before .json, must not)",
    )


def _doctor(add: AddArgument) -> None:
    add("--json", action="store_true", help="print all facts as JSON")
    add("--no-processes", action="store_true", help="leave out the two processes")
    add(
        "--timeout",
        type=positive,
        metavar="SECONDS",
        help="limit of the two processes (120, more on a loaded host)",
    )


def _probe(add: AddArgument) -> None:
    add("--out", type=Path, default=Path("probe.json"), help="JSON for estimate (probe.json)")
    add("--node-size", type=count, help="ranks per node (as launched)")


def _plot(add: AddArgument) -> None:
    add("metrics", type=file, metavar="METRICS", help="the file of quantized_comm.metrics.file")
    add("--out", type=Path, metavar="FILE", help=".png, .svg or .pdf (METRICS with .png)")


def _estimate(add: AddArgument) -> None:
    add("--front", choices=FRONTS, default="zero", help="DeepSpeed ZeRO, FSDP2 or DDP (zero)")
    add("--params", type=numel, help="parameters, such as 7b or 7e9")
    add(
        "--trained",
        type=share,
        default=1.0,
        metavar="SHARE",
        help="share of the parameters that is trained; LoRA: about 0.01 (1)",
    )
    add("--model-config", type=file, help="config.json of a Hugging Face causal language model")
    add("--tp", type=count, help="FSDP2: ranks of tensor parallelism (1)")
    add("--ep", type=count, help="FSDP2: ranks of expert parallelism (1)")
    add("--expert-params", type=numel, help="parameters of experts, without --model-config")
    add("--ds-config", type=file, help="DeepSpeed config: stage, accumulation, dtype, block")
    add("--load-codecs", action="store_true", help=_LOAD_CODECS)
    add("--stage", type=int, choices=(1, 2, 3), help="ZeRO stage (3)")
    add("--accumulation", type=count, help="micro-steps per optimizer step (1)")
    add("--dtype", choices=("bf16", "fp16", "fp32"), help="of weights and gradients (bf16)")
    add("--nodes", type=count, help="(1, or as probed)")
    add("--gpus", type=count, help="per node (1, or as probed)")
    add("--link", type=positive, metavar="GBIT", help="Gb/s into one node from the others")
    add("--intra", type=positive, metavar="GBIT", help="Gb/s into one GPU from its node (200)")
    add("--latency", type=positive, help="seconds per collective (2e-5, or as probed)")
    add("--probe", type=file, help="links as measured by 'ds_quant probe'")
    add("--step", type=positive, metavar="SECONDS", help="compute of one optimizer step")
    add(
        "--measured",
        type=positive,
        metavar="SECONDS",
        help="a whole step with DeepSpeed as shipped, to compute the rate that the link reaches",
    )
    add("--gpu-memory", type=positive, metavar="GB", help="per GPU: take only schemes that fit")
    add("--encode", type=positive, default=1e11, help="parameters per second and GPU (1e11)")
    add("--all", action="store_true", help="show every scheme and its memory")
    add("--json", action="store_true", help="print the rows as JSON")
