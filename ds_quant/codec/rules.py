"""Settings of a GroupCodec: allowed values, and values that exclude each other.

``GroupCodec`` checks itself with this table. ``config/schema.py`` reads it for the keys of the
block, without loading torch. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

Range = Literal["minmax", "absmax", "gaussian"]
Rounding = Literal["nearest", "stochastic", "random_shift"]
Levels = Literal["uniform", "learned"]

BITS = range(2, 9)
GAUSSIAN_BITS = range(2, 6)  # that have a table of levels
GROUP_SIZES = range(32, 65537, 32)
RANGES: tuple[str, ...] = get_args(Range)
ROUNDINGS: tuple[str, ...] = get_args(Rounding)
LEVELS: tuple[str, ...] = get_args(Levels)

SETTINGS: dict[str, Sequence[Any]] = {
    "range": RANGES,
    "rounding": ROUNDINGS,
    "levels": LEVELS,
    "bits": BITS,
    "group_size": GROUP_SIZES,
}


class Rule(NamedTuple):
    """A setting at one of ``values`` restricts another setting to ``allowed``.

    remedy: the reason and a change that satisfies the rule, for messages about the block; empty
        if a block may break the rule.
    """

    setting: str
    values: tuple[str, ...]
    restricted: str
    allowed: tuple[Any, ...]
    remedy: str

    def is_broken_by(self, settings: Any) -> bool:
        """Return True if an object with these attributes breaks the rule."""
        if getattr(settings, self.setting) not in self.values:
            return False
        return getattr(settings, self.restricted) not in self.allowed


GAUSSIAN_NEEDS = (
    "Gaussian levels are for groups of 128 that random signs and a Hadamard transform have made "
    "look normal"
)
RULES = (
    Rule(
        "range",
        ("absmax", "gaussian"),
        "rounding",
        ("nearest", "stochastic"),
        'a shift moves the min-max grid: set range to "minmax" or rounding to "nearest"',
    ),
    Rule(
        "levels",
        ("learned",),
        "range",
        ("minmax",),
        'learned levels divide the min-max range: set range to "minmax"',
    ),
    Rule(
        "levels",
        ("learned",),
        "rounding",
        ("nearest",),
        'a value goes to its nearest learned level: set rounding to "nearest"',
    ),
    Rule(
        "range",
        ("gaussian",),
        "bits",
        tuple(GAUSSIAN_BITS),
        f"Gaussian levels have {GAUSSIAN_BITS[0]} to {GAUSSIAN_BITS[-1]} bits: set bits to one of "
        'these, or take other levels, such as scheme "qsdp"',
    ),
    Rule(
        "range",
        ("gaussian",),
        "group_size",
        (128,),
        f"{GAUSSIAN_NEEDS}: set group_size to 128",
    ),
    # A block may: its rounding is then that of the codec inside a node.
    Rule("range", ("gaussian",), "rounding", ("nearest",), ""),
)


def range_of_width(value_range: str, bits: int) -> str:
    """Return the range of a codec that is given other bits: above 5, absmax replaces gaussian."""
    if value_range == "gaussian" and bits not in GAUSSIAN_BITS:
        return "absmax"
    return value_range


def broken_rules(settings: Any) -> Iterator[Rule]:
    """Yield the rules that an object breaks, as far as it has the attributes of a GroupCodec."""
    for rule in RULES:
        if hasattr(settings, rule.setting) and rule.is_broken_by(settings):
            yield rule
