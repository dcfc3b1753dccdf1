"""A Python module as a codec: a number format of the user's own, named in the config block.

docs/adding_a_codec.md is the contract for its author. ``load`` tries the module on a few values, so
that what breaks the contract is named before anything travels.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ds_quant.codec.codec import check_rows, check_sum
from ds_quant.kernels.philox import random_bits
from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.wire import ALIGNMENT, VECTOR_NUMEL, ceil_div

FUNCTIONS = ("wire_bytes", "encode", "decode")
_SIZES = (1, 7, 130, 1000)  # elements that ``load`` tries


class CodecError(ValueError):
    """A module cannot be imported or breaks the contract."""


@dataclass(frozen=True)
class ModuleCodec:
    """See Codec; sums, differences and random numbers are added to the module's functions."""

    module: str
    functions: ModuleType = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """That of the module."""
        return self.module

    @property
    def digest(self) -> str:
        """8 hex digits of the source, so that ranks can see whether theirs are equal."""
        source = Path(self.functions.__file__).read_bytes() if self.functions.__file__ else b""
        return hashlib.sha256(source).hexdigest()[:8]

    def wire_bytes(self, numel: int) -> int:
        """Exact bytes of one row of `numel` elements."""
        return self.functions.wire_bytes(numel) if numel else 0

    def encode(
        self,
        x: Tensor,  # (rows, numel) floating point
        out: Tensor,  # (rows, wire_bytes(numel)) uint8
        *,
        address: Address | None = None,
        levels: Tensor | None = None,  # unused
        base: Tensor | None = None,  # (rows, numel) floating point
    ) -> None:
        """See Codec. With a base, x - base is encoded, rounded to fp32 once."""
        check_rows("x", x, "out", out, self)
        if x.numel():
            x = x.detach()
            x = x if base is None else x.float() - base.float()
            self.functions.encode(x, out, partial(_uniform, x, address))

    def decode(
        self,
        wire: Tensor,  # (rows, wire_bytes(numel)) uint8
        out: Tensor,  # (rows, numel) floating point
        *,
        levels: Tensor | None = None,  # unused
        add: bool = False,
    ) -> None:
        """See Codec. ``add``: to what `out` holds, in fp32, before the cast."""
        check_rows("out", out, "wire", wire, self)
        out = out.detach()
        if out.numel():
            values = torch.empty(out.shape, dtype=torch.float32, device=out.device)
            self.functions.decode(wire, values)
            out.copy_(values.add_(out) if add else values)

    def decode_sum(
        self,
        wire: Tensor,  # (rows, wire_bytes(numel)) uint8
        out: Tensor,  # (numel,) fp32
        *,
        scale: float = 1.0,
        own: tuple[int, Tensor] | None = None,  # place, (numel,) floating point
        levels: Tensor | None = None,  # unused
    ) -> None:
        """See Codec."""
        check_sum(wire, out, self)
        out = out.detach().zero_()
        values = torch.empty_like(out)
        for index, row in enumerate(wire):
            if own is not None and index == own[0]:
                out.add_(own[1])
            if out.numel():
                self.functions.decode(row.view(1, -1), values.view(1, -1))
                out.add_(values)
        if own is not None and own[0] == len(wire):
            out.add_(own[1])
        out.mul_(scale)


def _uniform(x: Tensor, address: Address | None) -> Tensor:
    """Random numbers (rows, numel) fp32 of an address, uniform in [0, 1), multiples of 2^-16."""
    if address is None:
        raise ValueError("address = None: random numbers need an Address")
    rows, numel = x.shape
    vectors = ceil_div(numel, VECTOR_NUMEL)
    bits = torch.empty(rows * vectors, VECTOR_NUMEL, dtype=torch.uint16, device=x.device)
    random_bits(address, address.first_vector, bits)
    return bits.view(rows, -1)[:, :numel].to(torch.float32).mul_(2.0**-16)


@lru_cache
def load(module: str) -> ModuleCodec:
    """The codec in a module that Python can import.

    Raises:
        CodecError: there is none, or it breaks the contract.
    """
    where = "beside the training script or on PYTHONPATH"
    allowed = f"allowed: a module {where} with {', '.join(FUNCTIONS)}"
    try:
        functions = importlib.import_module(module)
    except Exception as error:
        raise CodecError(f"{allowed}: {type(error).__name__}: {error}") from error
    missing = [name for name in FUNCTIONS if not callable(getattr(functions, name, None))]
    if missing:
        raise CodecError(f"{allowed}: it has no function {' and no '.join(missing)}")
    codec = ModuleCodec(module, functions)
    with torch.no_grad():
        _check_sizes(codec)
        for numel in _SIZES:
            for dtype in (torch.float32, torch.bfloat16):
                _check_values(codec, _waves(numel, dtype))
        _check_special(codec)
    return codec


def _require(fact: bool, found: str, allowed: str) -> None:
    if not fact:
        raise CodecError(f"{found}: allowed: {allowed}")


def _check_sizes(codec: ModuleCodec) -> None:
    before = 0
    for numel in range(1, 2 * max(_SIZES)):
        found = _called(codec, "wire_bytes", numel)
        shown = f"wire_bytes({numel}) is {found!r}"
        whole = isinstance(found, int) and found > 0 and found % ALIGNMENT == 0
        _require(whole, shown, f"a positive multiple of {ALIGNMENT}")
        _require(found >= before, f"{shown}, of one element less {before}", "no less than that")
        before = found


def _check_values(codec: ModuleCodec, x: Tensor) -> None:
    """Bytes and values of two rows, in the shapes and strides in which they really come."""
    rows, numel = x.shape
    kept, what = x.clone(), f"of {rows} rows of {numel} {str(x.dtype).removeprefix('torch.')}"
    wires = []
    for fill in (0, 255):
        wide = _full(rows, codec.wire_bytes(numel) + ALIGNMENT, fill, dtype=torch.uint8)
        wires.append(wide[:, :-ALIGNMENT])
        _called(codec, "encode", x, wires[-1], partial(_uniform, x, Address(key=1, step=1)))
        intact = bool((wide[:, -ALIGNMENT:] == fill).all())
        _require(intact, f"encode {what} writes past `out`", "the bytes of `out`")
    _require(torch.equal(x, kept), f"encode {what} changes x", "reading it")
    _require(
        torch.equal(*wires), f"encode {what} gives other bytes when it is called again",
        "the same ones: write every byte of `out`, take random numbers from uniform()",
    )  # fmt: skip
    found = [_full(rows, numel, fill) for fill in (0, 7)]
    for values in found:
        _called(codec, "decode", wires[0], values)
    _require(
        torch.equal(*found), f"decode {what} gives other values when it is called again",
        "the same ones: write every element of `out`",
    )  # fmt: skip
    alone = _full(1, numel, 0)
    _called(codec, "decode", wires[0][1:], alone)
    same = torch.equal(alone[0], found[0][1])
    _require(same, f"decode {what} gives other values than of each row alone", "equal ones")
    alike = float((found[0] * x.float()).sum()) > 0 if numel >= 100 else True
    _require(alike, f"decode {what} gives values that have nothing to do with x", "near ones")


def _check_special(codec: ModuleCodec) -> None:
    """Zeros stay zeros; NaN and Inf do not turn into plausible numbers."""
    for value, rule in ((0.0, "zeros"), (float("nan"), "NaN"), (float("inf"), "Inf or NaN")):
        x = _full(1, 130, 0) if value == 0 else _waves(130, torch.float32)[:1]
        x[0, 5] = value
        wire, found = _full(1, codec.wire_bytes(130), 0, dtype=torch.uint8), _full(1, 130, 0)
        _called(codec, "encode", x, wire, partial(_uniform, x, Address(key=1, step=1)))
        _called(codec, "decode", wire, found)
        kept = not found.any() if value == 0 else not bool(found.isfinite().all())
        what = "zeros" if value == 0 else f"values with one {value}"
        _require(kept, f"decode of {what} gives {float(found[0, 5])}", f"{rule}")


def _called(codec: ModuleCodec, function: str, *arguments: Any) -> Any:
    call: Callable[..., Any] = getattr(codec.functions, function)
    try:
        return call(*arguments)
    except Exception as error:
        shown = ", ".join(
            f"{tuple(a.shape)} {str(a.dtype).removeprefix('torch.')}" if isinstance(a, Tensor)
            else getattr(a, "__name__", "uniform" if callable(a) else repr(a))
            for a in arguments
        )  # fmt: skip
        raise CodecError(
            f"{function}({shown}) fails with {type(error).__name__}: {error}: allowed: no error"
        ) from error


def _full(rows: int, width: int, fill: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """On the CPU, whatever the user's defaults are."""
    return torch.full((rows, width), fill, dtype=dtype, device="cpu")


def _waves(numel: int, dtype: torch.dtype) -> Tensor:
    """Two different rows that look like gradients; not random, which would change the random
    numbers that the user's program draws. Rows are strided.
    """
    angle = torch.arange(2 * (numel + 8), dtype=torch.float32, device="cpu")
    angle = angle.view(2, -1)[:, :numel]
    return (torch.sin(angle * 12.9898) * torch.sin(angle * 0.37) * 0.02).to(dtype)
