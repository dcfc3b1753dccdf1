"""The codecs: GroupCodec quantizes groups, CastCodec sends a dtype unchanged.

A codec says what is sent and how many bytes that takes. Tasks of kernels/batch.py encode and decode
with it, ``bound.encode`` and ``bound.decode`` single tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from ds_quant.codec.rules import SETTINGS, broken_rules
from ds_quant.kernels import reference
from ds_quant.kernels.wire import ALIGNMENT, layout_of, round_up
from ds_quant.kernels.wire import Codec as Codec  # the union of all kinds

CAST_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True, kw_only=True)
class GroupCodec:
    """Quantizer of groups of consecutive elements (QSDP's bucketed quantizer, and SDP4Bit's with
    range "absmax"); its numbers are [Note: numbers] of kernels/reference.py.

    bits: 2 to 8 bits per code; fewer bytes, more error.
    group_size: elements that share a range; multiple of 32, 32 to 65536; smaller is more exact
        and costs 4 or 8 bytes per group.
    range: "minmax" (scale and offset), "absmax" (scale only, symmetric) or "gaussian" (scale only,
        levels of a normal distribution; 2 to 5 bits, whole groups of 128, nearest), which takes
        values that a rotation of 128 has made look normal and is unbiased over its signs.
    rounding: "nearest", "stochastic" (unbiased per element) or "random_shift" (unbiased, one
        shift per address, min-max only). The last two need an address to encode.
    levels: "uniform", or "learned" with a table of 2^bits fp32 values in units of code steps
        (min-max and nearest only). Passing no table means the initial one, 0, 1, 2, ...
    """

    bits: int = 8
    group_size: int = 1024
    range: str = "minmax"
    rounding: str = "nearest"
    levels: str = "uniform"

    kind: ClassVar[Literal["groups"]] = "groups"

    def __post_init__(self) -> None:
        for setting, allowed in SETTINGS.items():
            value = getattr(self, setting)
            # A bool or a float may equal an int.
            if value not in allowed or type(value) is not type(allowed[0]):
                raise self._refusal(setting, allowed)
        broken = next(broken_rules(self), None)
        if broken is not None:
            raise self._refusal(broken.restricted, broken.allowed)

    def _refusal(self, setting: str, allowed: Sequence[Any]) -> ValueError:
        """Return the error that names a setting, its value and the allowed values."""
        if isinstance(allowed, range):
            shown = f"{allowed[0]} to {allowed[-1]}"
            if allowed.step > 1:
                shown += f" in multiples of {allowed.step}"
        else:
            shown = ", ".join(map(repr, allowed))
        value = getattr(self, setting)
        return ValueError(f"{setting} = {value!r} in {self.name}: allowed are {shown}")

    @property
    def has_offset(self) -> bool:
        """Return True if groups carry an offset (zero point) besides their scale."""
        return self.range == "minmax"

    @property
    def is_gaussian(self) -> bool:
        """Return True if codes name levels of a normal distribution."""
        return self.range == "gaussian"

    @property
    def name(self) -> str:
        """e.g. "int8 minmax g1024 stochastic"."""
        suffix = " learned" if self.levels == "learned" else ""
        return f"int{self.bits} {self.range} g{self.group_size} {self.rounding}{suffix}"

    def wire_bytes(self, numel: int) -> int:
        """Exact bytes of one row of `numel` elements."""
        return layout_of(self, numel).nbytes

    def table(self, levels: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
        """The levels that the kernels need: those given, or else the initial or Gaussian ones."""
        if self.levels != "learned":
            if levels is not None:
                raise ValueError("levels: a table was passed to a codec with levels 'uniform'")
            return reference.gaussian_table(self.bits, device) if self.is_gaussian else None
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

    dtype: torch.bfloat16, torch.float16 or torch.float32. tight: without padding, so that small
    tensors lie side by side, see [Note: small tensors] of comm/small_tensors.py.
    """

    dtype: torch.dtype = torch.bfloat16
    tight: bool = False

    kind: ClassVar[Literal["cast"]] = "cast"

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
        nbytes = numel * self.dtype.itemsize
        return nbytes if self.tight else round_up(nbytes, ALIGNMENT)

    def table(self, levels: torch.Tensor | None, device: torch.device) -> None:
        """No levels."""
