"""A model as the formulas see it: shapes that stand for all of its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ds_quant.kernels.wire import ceil_div
from ds_quant.policy.cost import PricedParam


@dataclass(frozen=True, kw_only=True)
class Model:
    """``cargo`` stands for the whole model: its bytes per parameter are taken for all ``numel``.

    trained: parameters that are trained. modules: those with parameters of their own. largest:
    elements of the largest parameter. hidden: the width.
    """

    name: str
    numel: int
    layers: int
    cargo: tuple[PricedParam, ...]
    trained: int
    modules: int
    largest: int
    hidden: int


def block_cargo(hidden: int, *, dtype: torch.dtype) -> tuple[PricedParam, ...]:
    """One transformer block of width ``hidden``."""
    shapes = {"qkv": (3 * hidden, hidden), "out": (hidden, hidden), "up": (4 * hidden, hidden),
              "down": (hidden, 4 * hidden), "norm1": (hidden,), "norm2": (hidden,)}  # fmt: skip
    return tuple(PricedParam(f"block.{name}.weight", s, dtype, True) for name, s in shapes.items())


def of_size(numel: int, *, dtype: torch.dtype, trained: float = 1.0) -> Model:
    """A transformer of ``numel`` parameters, 128 times as wide as it is deep: 12 h^2 per block.
    ``trained``: the share of adapters beside frozen weights; 1 for all weights.
    """
    hidden = max(128, round((numel * 128 / 12) ** (1 / 3) / 128) * 128)
    layers = max(1, round(numel / (12 * hidden**2)))
    cargo = tuple(with_adapters(block_cargo(hidden, dtype=dtype), trained))
    name = f"{numel / 1e9:.3g} B parameters, {layers} blocks of width {hidden}"
    return Model(
        name=named(name, trained), numel=numel, layers=layers, cargo=cargo,
        trained=round(numel * trained), modules=layers * len(cargo), largest=4 * hidden**2,
        hidden=hidden,
    )  # fmt: skip


def named(name: str, trained: float) -> str:
    """Add the share that is trained, if that is not all."""
    return name if trained == 1 else f"{name}, {trained:.3g} of them trained"


def with_adapters(cargo: tuple[PricedParam, ...], trained: float) -> Iterator[PricedParam]:
    """Frozen parameters and, per matrix, an adapter; together ``trained`` of all elements."""
    if trained == 1:
        yield from cargo
        return
    share = trained / (1 - trained)
    for item in cargo:
        yield item._replace(trainable=False)
        if len(item.shape) > 1:
            rows = ceil_div(round(torch.Size(item.shape).numel() * share), item.shape[1])
            yield PricedParam(
                f"{item.name}.adapter", (max(1, rows), item.shape[1]), item.dtype, True
            )
