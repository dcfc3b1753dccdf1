"""Command lines of the tools. Standard library only, so that ``validate`` stays light."""

from __future__ import annotations

import argparse
from pathlib import Path

_POWERS = {"k": 3, "m": 6, "b": 9, "t": 12}  # 7b: as models are named


def add_commands(commands: argparse._SubParsersAction) -> None:
    """doctor, probe, estimate."""
    _doctor(commands.add_parser("doctor", help="check this machine and try the plugin on it"))
    _probe(commands.add_parser("probe", help="measure the links between processes"))
    _estimate(commands.add_parser("estimate", help="predict what each scheme would bring"))


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="all facts as JSON")
    parser.add_argument("--no-processes", action="store_true", help="leave out the exchange")
    parser.add_argument(
        "--timeout", type=positive, default=120.0, metavar="SECONDS",
        help="limit of the exchange between two processes (120)",
    )  # fmt: skip


def _probe(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, default=Path("probe.json"), help="JSON for estimate (probe.json)")
    add("--node-size", type=count, help="ranks per node (as launched)")
    add("--hostfile", type=file, help="start it on these hosts with the deepspeed launcher")


def _estimate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--params", type=count, help="parameters, such as 7b or 7e9")
    add("--trained", type=share, default=1.0, metavar="SHARE",
        help="of the parameters, the others are frozen; LoRA: about 0.01 (1)")  # fmt: skip
    add("--model-config", type=file, help="config.json of a Hugging Face causal language model")
    add("--ds-config", type=file, help="DeepSpeed config: stage, accumulation, dtype, its block")
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
    add("--gpu-memory", type=positive, metavar="GB", help="per GPU: leave out what does not fit")
    add("--encode", type=positive, default=1e11, help="parameters per second and GPU (1e11)")
    add("--json", action="store_true", help="the rows as JSON")
    add("--plot", type=Path, help="PNG of the speed-up against the link rate")
    add("--validate-against", type=file, metavar="RESULTS",
        help="show prediction against the step times of a result file of speed.py")  # fmt: skip


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
    """A whole number from 1, also as 7e9 or 7b."""
    power = _POWERS.get(value[-1:].lower(), 0)
    number = positive(f"{value[:-1]}e{power}" if power else value)
    if number != int(number):
        raise argparse.ArgumentTypeError(f"{value!r}: allowed: whole numbers from 1")
    return int(number)


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
