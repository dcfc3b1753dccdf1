"""Integer arithmetic of messages: padding, groups, bit planes, shard ranges, wire offsets.

Every size in the project comes from here, so that a formula exists once. Standard library only.

[Note: wire layout]
One row of a message holds, each section on a 16-byte boundary and the gaps filled with zeros:

    plane 0 | plane 1 | ... | scales (num_groups fp32) | offsets (num_groups fp32, min-max only)

The scales of Gaussian levels are bf16.

Codes of b bits travel as bit planes whose widths are powers of two (5 bits = 4 + 1), the first
plane holding the lowest bits of every code. Element i of a plane of width p sits in bits
[i * p, i * p + p) of a little-endian bit string: at 4 bits element 0 is the low nibble of byte 0.
A plane is ceil(numel / 8) * p bytes long; codes past numel are zero.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from ds_quant.kernels.random_bits import Address

Tensor = Any  # torch.Tensor; this module does not import torch

ALIGNMENT = 16  # bytes; one vector load of the kernels
FP32_BYTES = 4
BF16_BYTES = 2
VECTOR_NUMEL = 8  # elements served by one Philox call; planes are padded to whole vectors

_PLANES = {8: (8,), 7: (4, 2, 1), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}


def ceil_div(a: int, b: int) -> int:
    """Smallest integer that is at least a / b, for b > 0."""
    return -(-a // b)


def round_up(n: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least n."""
    return ceil_div(n, multiple) * multiple


def planes(bits: int) -> tuple[int, ...]:
    """Widths of the bit planes of a code, lowest bits first. ValueError unless 2 <= bits <= 8."""
    if bits not in _PLANES:
        raise ValueError(f"bits = {bits!r}: allowed are 2 to 8")
    return _PLANES[bits]


@dataclass(frozen=True)
class WireLayout:
    """Where the sections of one row lie, in bytes from its start. See [Note: wire layout]."""

    numel: int
    num_groups: int
    plane_offsets: tuple[int, ...]
    scale_offset: int
    offset_offset: int | None  # None when the codec has no offsets
    nbytes: int


@lru_cache(maxsize=4096)
def wire_layout(
    numel: int, *, bits: int, group_size: int, has_offset: bool, scale_bytes: int = FP32_BYTES
) -> WireLayout:
    """Layout of a row of `numel` elements; 0 elements take 0 bytes.

    The last group may be short; it has its own range over the elements that exist.
    ValueError for a negative numel or bits outside 2..8.
    """
    if numel < 0:
        raise ValueError(f"numel = {numel}: must not be negative")
    widths = planes(bits)
    num_groups = ceil_div(numel, group_size)
    position = 0
    offsets = []
    for width in widths:
        offsets.append(position)
        position = round_up(position + ceil_div(numel, VECTOR_NUMEL) * width, ALIGNMENT)
    scale_offset = position
    position = round_up(position + num_groups * scale_bytes, ALIGNMENT)
    offset_offset = None
    if has_offset:
        offset_offset = position
        position = round_up(position + num_groups * FP32_BYTES, ALIGNMENT)
    return WireLayout(numel, num_groups, tuple(offsets), scale_offset, offset_offset, position)


class WireFormat(Hashable, Protocol):
    """Members of every codec. Instances are keys of caches, so equal ones hash alike."""

    @property
    def name(self) -> str:
        """Short name for logs and tables, e.g. "int8 minmax g1024 stochastic" or "bf16"."""

    def wire_bytes(self, numel: int) -> int:
        """Exact bytes of one row of `numel` elements; a multiple of 16, 0 for no elements."""

    def table(self, levels: Tensor | None, device: Any) -> Tensor | None:
        """Return the levels of the codes, (2^bits,) fp32: the given ones or the codec's own."""


class Cast(WireFormat, Protocol):
    """Interface of CastCodec: numbers of one dtype."""

    @property
    def kind(self) -> Literal["cast"]: ...

    @property
    def dtype(self) -> Any: ...  # torch.float32, bfloat16 or float16


class GroupFormat(WireFormat, Protocol):
    """Interface of GroupCodec: codes of groups."""

    @property
    def kind(self) -> Literal["groups"]: ...

    @property
    def bits(self) -> int: ...

    @property
    def group_size(self) -> int: ...

    @property
    def rounding(self) -> str: ...  # nearest, stochastic or random_shift

    @property
    def levels(self) -> str: ...  # uniform or learned

    @property
    def has_offset(self) -> bool: ...

    @property
    def is_gaussian(self) -> bool: ...  # [Note: Gaussian levels] of reference.py


class UserFormat(WireFormat, Protocol):
    """Interface of ModuleCodec: bytes that Python functions of the user read and write."""

    @property
    def kind(self) -> Literal["module"]: ...

    def write(self, x: Tensor, out: Tensor, address: Address | None) -> None: ...

    def read(self, wire: Tensor, numel: int) -> Tensor: ...


Codec = GroupFormat | Cast | UserFormat  # `kind` tells them apart


def without_user_codec(codec: Codec) -> GroupFormat | Cast:
    """Return the codec as one that kernels take. TypeError for codecs of the user."""
    if codec.kind == "module":
        raise TypeError(f"codec {codec.name}: kernels take groups and casts, use torch")
    return codec


def as_groups(codec: Codec) -> GroupFormat:
    """Return a codec of groups as such. TypeError for others."""
    if codec.kind != "groups":
        raise TypeError(f"codec {codec.name}: it has no groups")
    return codec


def as_cast(codec: Codec) -> Cast:
    """Return a codec that casts as such. TypeError for others."""
    if codec.kind != "cast":
        raise TypeError(f"codec {codec.name}: it is no cast")
    return codec


def layout_of(fmt: GroupFormat | Cast, numel: int) -> WireLayout:
    """Layout of a row in a format; numbers of a cast lie one behind the other."""
    if fmt.kind == "cast":
        nbytes = fmt.wire_bytes(numel)
        return WireLayout(numel, 0, (0,), nbytes, None, nbytes)
    return wire_layout(
        numel,
        bits=fmt.bits,
        group_size=fmt.group_size,
        has_offset=fmt.has_offset,
        scale_bytes=scale_bytes(fmt),
    )


def scale_bytes(fmt: GroupFormat) -> int:
    """Bytes of the scale of a group."""
    return BF16_BYTES if fmt.is_gaussian else FP32_BYTES


def shard_range(numel: int, world: int, rank: int) -> tuple[int, int]:
    """(start, stop) of a rank's ZeRO-3 shard: ceil(numel / world) elements, clamped to numel.

    The last shards are short or empty when world does not divide numel, as in DeepSpeed.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank = {rank}: must lie in 0..{world - 1}")
    shard_numel = ceil_div(numel, world)
    start = min(rank * shard_numel, numel)
    return start, min(start + shard_numel, numel)
