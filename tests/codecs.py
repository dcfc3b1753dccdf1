"""Lists of codecs, and their formats on the wire page."""

from __future__ import annotations

import itertools

from ds_quant.codec.codec import CAST_NAMES, Codec, GroupCodec
from ds_quant.codec.rules import LEVELS, RANGES, ROUNDINGS
from tests.unit.wire_oracle import Format, Sent


def codecs(**fixed) -> list[GroupCodec]:
    """Every valid codec with the given fields; groups of 32 unless said otherwise."""
    found = []
    fields = dict(bits=range(2, 9), group_size=(32,), range=RANGES, rounding=ROUNDINGS)
    fields["levels"] = LEVELS
    fields.update({name: (value,) for name, value in fixed.items()})
    for values in itertools.product(*fields.values()):
        chosen = dict(zip(fields, values, strict=True))
        if chosen["range"] == "gaussian":
            continue
        learned = chosen["levels"] == "learned"
        if chosen["rounding"] == "random_shift" and chosen["range"] == "absmax":
            continue
        if learned and (chosen["range"], chosen["rounding"]) != ("minmax", "nearest"):
            continue
        found.append(GroupCodec(**chosen))
    return found


def format_of(codec: Codec) -> Sent:
    """As wire_oracle.py has it."""
    if not isinstance(codec, GroupCodec):
        return CAST_NAMES[codec.dtype]
    return Format(
        bits=codec.bits, group=codec.group_size, minmax=codec.range == "minmax",
        gaussian=codec.is_gaussian, rounding=codec.rounding,
    )  # fmt: skip
