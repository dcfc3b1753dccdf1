"""Checks of what reaches a codec: settings, shapes and dtypes.

GroupCodec is the one quantizer, CastCodec the do-nothing codec that is the baseline of every test
and the path of tensors that are not quantized.

Shapes of all methods: a message is (rows, wire_bytes(numel)) uint8, one row per peer; rows may be
strided, so a message can be a column slice of a bigger one. Values are (rows, numel) of any
floating-point dtype, rows may be strided too. 0 rows and 0 elements are valid everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch

from ds_quant.kernels import dispatch, gaussian, scratch
from ds_quant.kernels.hadamard import BlockRotation
from ds_quant.kernels.packing import layout_of
from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.wire import ALIGNMENT, round_up

RANGES = ("minmax", "absmax", "gaussian")
ROUNDINGS = ("nearest", "stochastic", "random_shift")
LEVELS = ("uniform", "learned")
CAST_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Codec(Protocol):
    """Interface of a codec: an exact size and three pure functions."""

    @property
    def name(self) -> str:
        """Short name for logs and tables, e.g. "int8 minmax g1024 stochastic" or "bf16"."""

    def wire_bytes(self, numel: int) -> int:
        """Exact bytes of one row of `numel` elements; a multiple of 16, 0 for no elements."""

    def encode(
        self,
        x: torch.Tensor,  # (rows, numel) floating point
        out: torch.Tensor,  # (rows, wire_bytes(numel)) uint8
        *,
        address: Address | None = None,
        levels: torch.Tensor | None = None,  # (2^bits,) fp32
    ) -> None:
        """Write every byte of `out`. x is not modified."""

    def decode(
        self,
        wire: torch.Tensor,  # (rows, wire_bytes(numel)) uint8
        out: torch.Tensor,  # (rows, numel) floating point
        *,
        levels: torch.Tensor | None = None,  # (2^bits,) fp32
    ) -> None:
        """Decode in fp32 and cast once to the dtype of `out`."""

    def decode_sum(
        self,
        wire: torch.Tensor,  # (rows, wire_bytes(numel)) uint8
        out: torch.Tensor,  # (numel,) fp32
        *,
        scale: float = 1.0,
        own: tuple[int, torch.Tensor] | None = None,  # place, (numel,) floating point
        levels: torch.Tensor | None = None,  # (2^bits,) fp32
    ) -> None:
        """out = scale * sum of the decoded rows: fp32, in row order, scaled once at the end.

        The values ``own[1]`` are added as row ``own[0]``, which the wire leaves out.
        """


@dataclass(frozen=True, kw_only=True)
class GroupCodec:
    """Quantizer of groups of consecutive elements (QSDP's bucketed quantizer, and SDP4Bit's with
    range "absmax"); its numbers are [Note: numbers] of kernels/reference.py.

    bits: 2 to 8 bits per code; fewer bytes, more error.
    group_size: elements that share a range; multiple of 32, 32 to 65536; smaller is more exact
        and costs 4 or 8 bytes per group.
    range: "minmax" (scale and offset), "absmax" (scale only, symmetric) or "gaussian" (scale only,
        levels of a normal distribution; 2 to 4 bits, whole groups of 128, nearest), which takes
        values that a rotation of 128 has made look normal and is unbiased over its signs.
    rounding: "nearest", "stochastic" (unbiased per element) or "random_shift" (unbiased, one
        shift per address, min-max only). The last two need an address to encode.
    levels: "uniform", or "learned" with a table of 2^bits fp32 values in units of code steps
        (min-max and nearest only). Passing no table means the initial one, 0, 1, 2, ...
    backend: "auto" takes the kernels for the device of the tensors where they work, "torch" the
        reference; the bytes are the same.
    """

    bits: int = 8
    group_size: int = 1024
    range: str = "minmax"
    rounding: str = "nearest"
    levels: str = "uniform"
    backend: str = "auto"

    def __post_init__(self) -> None:
        check_int("bits", self.bits, low=2, high=8, multiple=1)
        check_int("group_size", self.group_size, low=32, high=65536, multiple=32)
        check_choice("range", self.range, RANGES)
        check_choice("rounding", self.rounding, ROUNDINGS)
        check_choice("levels", self.levels, LEVELS)
        check_choice("backend", self.backend, dispatch.BACKENDS)
        if self.rounding == "random_shift" and self.range != "minmax":
            raise ValueError(
                f"rounding = 'random_shift' with range = {self.range!r}: it needs range 'minmax'"
            )
        if self.range == "gaussian":
            self._check_gaussian()
        if self.levels == "learned" and (self.range, self.rounding) != ("minmax", "nearest"):
            raise ValueError(
                f"levels = 'learned' with range = {self.range!r} and rounding = "
                f"{self.rounding!r}: it needs range 'minmax' and rounding 'nearest'"
            )

    def _check_gaussian(self) -> None:
        allowed = {"bits": gaussian.BITS, "group_size": (gaussian.GROUP,), "rounding": ("nearest",)}
        for field, values in allowed.items():
            if getattr(self, field) not in values:
                raise ValueError(
                    f"{field} = {getattr(self, field)!r} with range = 'gaussian': allowed are "
                    + ", ".join(map(repr, values))
                )

    @property
    def has_offset(self) -> bool:
        """Whether groups carry an offset (zero point) besides their scale."""
        return self.range == "minmax"

    @property
    def is_gaussian(self) -> bool:
        """Whether codes name levels of a normal distribution."""
        return self.range == "gaussian"

    @property
    def name(self) -> str:
        """e.g. "int8 minmax g1024 stochastic"."""
        suffix = " learned" if self.levels == "learned" else ""
        return f"int{self.bits} {self.range} g{self.group_size} {self.rounding}{suffix}"

    def wire_bytes(self, numel: int) -> int:
        """Exact bytes of one row of `numel` elements."""
        return layout_of(self, numel).nbytes

    def encode(
        self,
        x: torch.Tensor,  # (rows, numel) floating point
        out: torch.Tensor,  # (rows, wire_bytes(numel)) uint8
        *,
        address: Address | None = None,
        levels: torch.Tensor | None = None,  # (2^bits,) fp32
        base: torch.Tensor | None = None,  # (rows, numel) floating point
        rotation: BlockRotation | None = None,
    ) -> None:
        """See Codec. With a base, x - base is encoded, rounded to fp32 once. What a rotation makes
        of x is encoded instead; then `out` holds whole rotation blocks.

        ValueError without an address when the rounding is random.
        """
        self._check_rotation(rotation)
        check_rows("x", x, "out", out, self, block=rotation.block if rotation else 1)
        self._check_whole(x.shape[1], rotation)
        if self.rounding != "nearest" and address is None:
            raise ValueError(f"address = None: rounding {self.rounding!r} needs an Address")
        levels = self.table(levels, x.device)
        options = {"address": address, "levels": levels, "base": base, "rotation": rotation}
        dispatch.kernel("encode", self, x.device)(x, out, self, **options)

    def decode(
        self,
        wire: torch.Tensor,  # (rows, wire_bytes(numel)) uint8
        out: torch.Tensor,  # (rows, numel) floating point
        *,
        levels: torch.Tensor | None = None,  # (2^bits,) fp32
        add: bool = False,
    ) -> None:
        """See Codec. ``add``: to what `out` holds, in fp32, before the cast."""
        check_rows("out", out, "wire", wire, self)
        self._check_whole(out.shape[1])
        options = {"levels": self.table(levels, wire.device), "add": add}
        dispatch.kernel("decode", self, wire.device)(wire, out.detach(), self, **options)

    def decode_sum(
        self,
        wire: torch.Tensor,  # (rows, wire_bytes(numel)) uint8
        out: torch.Tensor,  # (numel,) fp32, or bf16 or fp16: cast once at the end
        *,
        scale: float = 1.0,
        own: tuple[int, torch.Tensor] | None = None,  # place, (numel on the wire,) floating
        levels: torch.Tensor | None = None,  # (2^bits,) fp32
        rotation: BlockRotation | None = None,
    ) -> None:
        """See Codec. A rotation is undone before the sum is scaled; the wire holds whole blocks."""
        self._check_rotation(rotation)
        block = rotation.block if rotation else 1
        check_sum(wire, out, self, block=block, dtypes=CAST_NAMES)
        self._check_whole(out.shape[0], rotation)
        options = {"levels": self.table(levels, wire.device), "rotation": rotation}
        total = out = out.detach()
        device, dtype = wire.device, out.dtype
        if dtype != torch.float32 and dispatch.sum_dtype(self, dtype, device) != dtype:
            total = scratch.take("sum", tuple(out.shape), dtype=torch.float32, device=device)
        run = dispatch.kernel("decode_sum", self, device)
        run(wire, total, self, scale=scale, own=own, **options)
        if total is not out:
            out.copy_(total)

    def _check_rotation(self, rotation: BlockRotation | None) -> None:
        if rotation is not None and self.group_size % rotation.block:
            raise ValueError(
                f"rotation block = {rotation.block}: must divide group_size = {self.group_size}"
            )

    def _check_whole(self, numel: int, rotation: BlockRotation | None = None) -> None:
        """Gaussian groups are whole: a rotation fills them up."""
        on_wire = round_up(numel, rotation.block) if rotation else numel
        if self.is_gaussian and on_wire % self.group_size:
            raise ValueError(
                f"numel = {numel} with range = 'gaussian': allowed are multiples of "
                f"{self.group_size}, or a rotation of {self.group_size}"
            )

    def table(self, levels: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
        """The levels that the kernels need: those given, or else the initial or Gaussian ones."""
        if self.levels != "learned":
            if levels is not None:
                raise ValueError("levels: a table was passed to a codec with levels 'uniform'")
            return gaussian.table_of(self.bits, device) if self.is_gaussian else None
        count = 1 << self.bits
        if levels is None:
            return torch.arange(count, device=device).to(torch.float32)
        if levels.shape != (count,) or levels.dtype != torch.float32:
            raise ValueError(
                f"levels: shape {tuple(levels.shape)} {levels.dtype}, must be ({count},) fp32"
            )
        return levels.detach().contiguous()


@dataclass(frozen=True)
class CastCodec:
    """Raw values of one dtype on the wire, padded to 16 bytes: full precision, and the baseline.

    dtype: torch.bfloat16, torch.float16 or torch.float32.
    """

    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.dtype not in CAST_NAMES:
            allowed = ", ".join(str(dtype) for dtype in CAST_NAMES)
            raise ValueError(f"dtype = {self.dtype}: allowed are {allowed}")

    @property
    def name(self) -> str:
        """ "bf16", "fp16" or "fp32"."""
        return CAST_NAMES[self.dtype]

    def wire_bytes(self, numel: int) -> int:
        """Exact bytes of one row of `numel` elements."""
        if numel < 0:
            raise ValueError(f"numel = {numel}: must not be negative")
        return round_up(numel * self.dtype.itemsize, ALIGNMENT)

    def encode(
        self,
        x: torch.Tensor,  # (rows, numel) floating point
        out: torch.Tensor,  # (rows, wire_bytes(numel)) uint8
        *,
        address: Address | None = None,
        levels: torch.Tensor | None = None,  # unused, as is the address
    ) -> None:
        """See Codec."""
        check_rows("x", x, "out", out, self)
        nbytes = x.shape[1] * self.dtype.itemsize
        out[:, nbytes:].zero_()
        values = self._values(out[:, :nbytes])
        if values is not None:
            values.copy_(x.detach())
        else:
            out[:, :nbytes].copy_(x.detach().to(self.dtype).contiguous().view(torch.uint8))

    def decode(
        self,
        wire: torch.Tensor,  # (rows, wire_bytes(numel)) uint8
        out: torch.Tensor,  # (rows, numel) floating point
        *,
        levels: torch.Tensor | None = None,  # unused
    ) -> None:
        """See Codec."""
        check_rows("out", out, "wire", wire, self)
        out.detach().copy_(self._read(wire, out.shape[1]))

    def decode_sum(
        self,
        wire: torch.Tensor,  # (rows, wire_bytes(numel)) uint8
        out: torch.Tensor,  # (numel,) fp32
        *,
        scale: float = 1.0,
        own: tuple[int, torch.Tensor] | None = None,  # place, (numel,) floating point
        levels: torch.Tensor | None = None,  # unused
    ) -> None:
        """See Codec."""
        check_sum(wire, out, self)
        out = out.detach()
        rows = list(self._read(wire, out.shape[0]))
        if own is not None:
            rows.insert(*own)
        if not rows:
            out.zero_()
        for index, row in enumerate(rows):
            out.copy_(row) if index == 0 else out.add_(row)
        if scale != 1.0:
            out.mul_(scale)

    def _read(self, wire: torch.Tensor, numel: int) -> torch.Tensor:
        section = wire[:, : numel * self.dtype.itemsize]
        values = self._values(section)
        if values is None:
            values = section.clone(memory_format=torch.contiguous_format).view(self.dtype)
        return values

    def _values(self, section: torch.Tensor) -> torch.Tensor | None:
        """A view of bytes as values, or None where their alignment does not allow one."""
        itemsize = self.dtype.itemsize
        if section.numel() == 0:
            return section.to(self.dtype)[:, : section.shape[1] // itemsize]
        aligned = section.storage_offset() % itemsize == 0 and section.data_ptr() % itemsize == 0
        if aligned and section.stride(1) == 1 and section.stride(0) % itemsize == 0:
            return section.view(self.dtype)
        return None


# ---- checks of what reaches a codec ----


class Sized(Protocol):
    """The part of a codec that the checks read."""

    def wire_bytes(self, numel: int) -> int: ...


_FP32 = MappingProxyType({torch.float32: "fp32"})


def check_int(field: str, value: int, *, low: int, high: int, multiple: int) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not low <= value <= high or value % multiple:
        step = f" in multiples of {multiple}" if multiple > 1 else ""
        raise ValueError(f"{field} = {value!r}: allowed are {low} to {high}{step}")


def check_choice(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{field} = {value!r}: allowed are {', '.join(map(repr, allowed))}")


def check_rows(
    values_name: str,
    values: torch.Tensor,
    bytes_name: str,
    wire: torch.Tensor,
    codec: Sized,
    *,
    block: int = 1,  # the wire holds whole blocks
) -> None:
    if values.dim() != 2 or not values.is_floating_point():
        raise ValueError(
            f"{values_name}: shape {tuple(values.shape)} {values.dtype}, must be (rows, numel) "
            "floating point"
        )
    expected = (values.shape[0], codec.wire_bytes(round_up(values.shape[1], block)))
    if wire.shape != expected or wire.dtype != torch.uint8:
        raise ValueError(
            f"{bytes_name}: shape {tuple(wire.shape)} {wire.dtype}, must be {expected} uint8"
        )


def check_bytes(name: str, wire: torch.Tensor, nbytes: int) -> None:
    """Raise ValueError unless `wire` is one row of ``nbytes``, or several."""
    if wire.shape[-1] != nbytes or wire.dtype != torch.uint8:
        raise ValueError(
            f"{name}: shape {tuple(wire.shape)} {wire.dtype}, must be (..., {nbytes}) uint8"
        )


def check_sum(
    wire: torch.Tensor,
    out: torch.Tensor,
    codec: Sized,
    *,
    block: int = 1,
    dtypes: Mapping[torch.dtype, str] = _FP32,
) -> None:
    if out.dim() != 1 or out.dtype not in dtypes:
        allowed = " or ".join(dtypes.values())
        raise ValueError(f"out: shape {tuple(out.shape)} {out.dtype}, must be (numel,) {allowed}")
    nbytes = codec.wire_bytes(round_up(out.shape[0], block))
    if wire.dim() != 2 or wire.shape[1] != nbytes or wire.dtype != torch.uint8:
        raise ValueError(
            f"wire: shape {tuple(wire.shape)} {wire.dtype}, must be (rows, {nbytes}) uint8"
        )
