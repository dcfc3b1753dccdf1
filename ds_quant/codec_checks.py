"""Checks of what reaches a codec: settings, shapes and dtypes. May import torch, layout."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import torch

from ds_quant.layout import round_up


class Sized(Protocol):
    """What the checks need to know of a codec."""

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
    """One row of ``nbytes``, or several."""
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
