"""Types of command-line arguments. Errors name the value and what is allowed."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path

_POWERS = {"k": 3, "m": 6, "b": 9, "t": 12}  # sizes of models: 7b


def positive(value: str) -> float:
    """Parse a finite number above 0."""
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ArgumentTypeError(f"{value!r}: allowed: numbers above 0")
    return number


def count(value: str) -> int:
    """Parse a whole number from 1, also as 7e9 or 7b.

    At most 1e15: more than any model has parameters or any cluster ranks.
    """
    power = _POWERS.get(value[-1:].lower())
    try:
        number = float(value if power is None else f"{value[:-1]}e{power}")
    except ValueError:
        number = 0.0
    if not 1 <= number <= 1e15 or number != int(number):
        raise ArgumentTypeError(
            f"{value!r}: allowed: whole numbers from 1 to 1e15, also as 7e9 or 7b"
        )
    return int(number)


def numel(value: str) -> int:
    """Parse the parameters of a model. Refuses numbers below 1000, which leave out "b"."""
    number = count(value)
    if number < 1000:
        raise ArgumentTypeError(f"{value!r}: {value} billion? write {value}b")
    return number


def share(value: str) -> float:
    """Parse a number above 0 and up to 1."""
    number = positive(value)
    if number > 1:
        raise ArgumentTypeError(f"{value!r}: allowed: above 0, up to 1")
    return number


def file(value: str) -> Path:
    """Parse the path of an existing file."""
    path = Path(value)
    if not path.is_file():
        raise ArgumentTypeError(f"{value!r}: no such file")
    return path
