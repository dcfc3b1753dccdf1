"""Command lines of the tools. Standard library only, so that ``validate`` stays light."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_commands(commands: argparse._SubParsersAction) -> None:
    """doctor, probe, estimate."""
    _doctor(commands.add_parser("doctor", help="check this machine and try the plugin on it"))


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="all facts as JSON")
    parser.add_argument("--no-processes", action="store_true", help="leave out the exchange")
    parser.add_argument(
        "--timeout", type=positive, default=120.0, metavar="SECONDS",
        help="limit of the exchange between two processes (120)",
    )  # fmt: skip


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
    """A whole number from 1, also as 7e9."""
    number = positive(value)
    if number != int(number):
        raise argparse.ArgumentTypeError(f"{value!r}: allowed: whole numbers from 1")
    return int(number)


def file(value: str) -> Path:
    """A file that exists."""
    path = Path(value)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{value!r}: no such file")
    return path
