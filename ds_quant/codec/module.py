"""A Python module as a codec: a number format of the user's own, named in the config block.

docs/adding_a_codec.md is the contract for its author. ``load`` tries the module on a few values, so
that what breaks the contract is named before anything travels.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.reference import random_bits
from ds_quant.kernels.wire import ALIGNMENT, VECTOR_NUMEL, ceil_div

FUNCTIONS = ("wire_bytes", "encode", "decode")
_SIZES = (1, 7, 130, 1000)  # elements that ``load`` tries


class CodecError(ValueError):
    """A module cannot be imported or breaks the contract."""


@dataclass(frozen=True)
class ModuleCodec:
    """Codec made of the functions of a module, which get random numbers with every call."""

    kind: ClassVar[Literal["module"]] = "module"

    module: str
    functions: ModuleType = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """Name of the module."""
        return self.module

    @property
    def digest(self) -> str:
        """8 hex digits of the source, so that ranks can see whether theirs are equal."""
        source = Path(self.functions.__file__).read_bytes() if self.functions.__file__ else b""
        return hashlib.sha256(source).hexdigest()[:8]

    def wire_bytes(self, numel: int) -> int:
        """Exact bytes of one row of `numel` elements."""
        return self.functions.wire_bytes(numel) if numel else 0

    def table(self, levels: Tensor | None, device: torch.device) -> None:
        """No levels."""

    def write(self, x: Tensor, out: Tensor, address: Address | None) -> None:
        """x (rows, numel) floating point -> out (rows, wire_bytes(numel)) uint8."""
        self.functions.encode(x, out, partial(_uniform, x, address))

    def read(self, wire: Tensor, numel: int) -> Tensor:
        """wire (rows, wire_bytes(numel)) uint8 -> (rows, numel) fp32."""
        values = torch.empty(len(wire), 4 * numel, dtype=torch.uint8, device=wire.device)
        self.functions.decode(wire, values.view(torch.float32))
        return values.view(torch.float32)


def _uniform(x: Tensor, address: Address | None) -> Tensor:
    """Draw (rows, numel) fp32 numbers of an address: uniform in [0, 1), multiples of 2^-16."""
    if address is None:
        raise ValueError("address = None: random numbers need an Address")
    rows, numel = x.shape
    vectors = ceil_div(numel, VECTOR_NUMEL)
    bits = random_bits(address, address.first_vector, rows * vectors, x.device)
    return bits.view(rows, vectors * VECTOR_NUMEL)[:, :numel].float() * 2.0**-16


@lru_cache
def load(module: str) -> ModuleCodec:
    """Load the codec in a module that Python can import.

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
        for holds, observed, rule in _trials(codec):
            if not holds:
                raise CodecError(f"{observed}: allowed: {rule}")
    return codec


def _trials(codec: ModuleCodec) -> Iterator[tuple[bool, str, str]]:
    """Yield every rule of the contract: True if it holds, the observation, and the rule."""
    for numel in range(1, 2 * max(_SIZES)):
        size, less = _call(codec, "wire_bytes", numel), codec.wire_bytes(numel - 1)
        observed = f"wire_bytes({numel}) is {size!r}"
        whole = isinstance(size, int) and size > 0 and size % ALIGNMENT == 0
        yield whole, observed, f"a positive multiple of {ALIGNMENT}"
        yield size >= less, f"{observed}, of one element less {less}", "no less than that"
    for numel in _SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            yield from _trials_of(codec, _waves(numel, dtype))
    for value, rule in ((0.0, "zeros"), (float("nan"), "NaN"), (float("inf"), "Inf or NaN")):
        x = _waves(130, torch.float32)[:1] * bool(value)
        x[0, 5] = value
        out = _decoded(codec, _encoded(codec, x)[:, :-ALIGNMENT], 130)
        kept = not bool(out.isfinite().all()) if value else not out.any()
        case = f"values with one {value}" if value else "zeros"
        yield kept, f"decode of {case} gives {float(out[0, 5])}", rule


def _trials_of(codec: ModuleCodec, x: Tensor) -> Iterator[tuple[bool, str, str]]:
    """Run the contract checks on x, with the row shapes and strides of training."""
    (rows, numel), before = x.shape, x.clone()
    case = f"of {rows} rows of {numel} {str(x.dtype).removeprefix('torch.')}"
    wide, other = (_encoded(codec, x, fill) for fill in (0, 255))
    wire, again = wide[:, :-ALIGNMENT], other[:, :-ALIGNMENT]
    intact = bool((other[:, -ALIGNMENT:] == 255).all())
    yield intact, f"encode {case} writes past `out`", "the bytes of `out`"
    yield torch.equal(x, before), f"encode {case} changes x", "reading it"
    rule = "the same ones: write every {} of `out`, take random numbers from uniform()"
    observed = f"encode {case} gives other bytes when it is called again"
    yield torch.equal(wire, again), observed, rule.format("byte")
    out = _decoded(codec, wire, numel)
    observed = f"decode {case} gives other values when it is called again"
    yield torch.equal(out, _decoded(codec, wire, numel, 7)), observed, rule.format("element")
    alone = torch.equal(out[1:], _decoded(codec, wire[1:], numel))
    yield alone, f"decode {case} gives other values than of each row alone", "equal ones"
    alike = numel < 100 or float((out * x.float()).sum()) > 0
    yield alike, f"decode {case} gives values that have nothing to do with x", "near ones"


def _encoded(codec: ModuleCodec, x: Tensor, fill: int = 0) -> Tensor:
    """Return the wire of x in bytes of ``fill``, with some more of them at the end of each row."""
    shape = len(x), codec.wire_bytes(x.shape[1]) + ALIGNMENT
    wide = torch.full(shape, fill, dtype=torch.uint8, device="cpu")  # whatever the user's default
    uniform = partial(_uniform, x, Address(key=1, step=1))
    _call(codec, "encode", x, wide[:, :-ALIGNMENT], uniform)
    return wide


def _decoded(codec: ModuleCodec, wire: Tensor, numel: int, fill: float = 0.0) -> Tensor:
    out = torch.full((len(wire), numel), fill, dtype=torch.float32, device="cpu")
    _call(codec, "decode", wire, out)
    return out


def _call(codec: ModuleCodec, function: str, *arguments: Any) -> Any:
    try:
        return getattr(codec.functions, function)(*arguments)
    except Exception as error:
        shown = ", ".join(
            f"{tuple(a.shape)} {str(a.dtype).removeprefix('torch.')}" if isinstance(a, Tensor)
            else "uniform" if callable(a) else repr(a)
            for a in arguments
        )  # fmt: skip
        raise CodecError(
            f"{function}({shown}) fails with {type(error).__name__}: {error}: allowed: no error"
        ) from error


def _waves(numel: int, dtype: torch.dtype) -> Tensor:
    """Return two different strided rows that look like gradients; not random, which would change
    the random numbers that the user's program draws.
    """
    angle = torch.arange(2 * (numel + 8), dtype=torch.float32, device="cpu")
    angle = angle.view(2, -1)[:, :numel]
    return (torch.sin(angle * 12.9898) * torch.sin(angle * 0.37) * 0.02).to(dtype)
