"""A model as the formulas see it: shapes that stand for all of its parameters, and how often ZeRO-3
gathers them in a micro-step.

[Note: what stays gathered] DeepSpeed gathers a module's parameters for forward and again for
backward, unless they stay gathered in between: if their next use is fewer than
``stage3_max_reuse_distance`` elements away, as half as many at the end of the model are, or if the
prefetcher has passed that use already. At every module it gathers up to
``stage3_prefetch_bucket_size`` elements more, while fewer than ``stage3_max_live_parameters`` are
gathered, so it gets ahead by what exceeds the module. Tied weights, parameters that stay gathered
for good and blocks that are computed again are left out: the first steps are counted, see
``zero.fetch``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ds_quant.kernels.wire import ceil_div
from ds_quant.policy.cost import ParamSpec


@dataclass(frozen=True, kw_only=True)
class Model:
    """``cargo`` stands for the whole model: its bytes per parameter are taken for all ``numel``.

    trained: parameters that are trained. modules: those with parameters of their own. largest:
    elements of the largest parameter. hidden: the width.
    """

    name: str
    numel: int
    layers: int
    param_specs: tuple[ParamSpec, ...]
    trained: int
    modules: int
    largest: int
    hidden: int


def block_cargo(hidden: int, *, dtype: torch.dtype) -> tuple[ParamSpec, ...]:
    """One transformer block of width ``hidden``."""
    shapes = {"qkv": (3 * hidden, hidden), "out": (hidden, hidden), "up": (4 * hidden, hidden),
              "down": (hidden, 4 * hidden), "norm1": (hidden,), "norm2": (hidden,)}  # fmt: skip
    return tuple(ParamSpec(f"block.{name}.weight", s, dtype, True) for name, s in shapes.items())


def of_size(numel: int, *, dtype: torch.dtype, trained: float = 1.0) -> Model:
    """A transformer of ``numel`` parameters, 128 times as wide as it is deep: 12 h^2 per block.
    ``trained``: the share of adapters beside frozen weights; 1 for all weights.
    """
    hidden = max(128, round((numel * 128 / 12) ** (1 / 3) / 128) * 128)
    layers = max(1, round(numel / (12 * hidden**2)))
    param_specs = tuple(with_adapters(block_cargo(hidden, dtype=dtype), trained))
    name = f"{numel / 1e9:.3g} B parameters, {layers} blocks of width {hidden}"
    return Model(
        name=named(name, trained), numel=numel, layers=layers, param_specs=param_specs,
        trained=round(numel * trained), modules=layers * len(param_specs), largest=4 * hidden**2,
        hidden=hidden,
    )  # fmt: skip


def named(name: str, trained: float) -> str:
    """Add the share that is trained, if that is not all."""
    return name if trained == 1 else f"{name}, {trained:.3g} of them trained"


def with_adapters(param_specs: tuple[ParamSpec, ...], trained: float) -> Iterator[ParamSpec]:
    """Frozen parameters and, per matrix, an adapter; together ``trained`` of all elements."""
    if trained == 1:
        yield from param_specs
        return
    share = trained / (1 - trained)
    for item in param_specs:
        yield item._replace(trainable=False)
        if len(item.shape) > 1:
            rows = ceil_div(round(torch.Size(item.shape).numel() * share), item.shape[1])
            yield ParamSpec(f"{item.name}.adapter", (max(1, rows), item.shape[1]), item.dtype, True)


@dataclass(frozen=True, kw_only=True)
class FetchSettings:
    """The keys of ``zero_optimization`` that decide, with DeepSpeed's defaults, in elements."""

    max_reuse_distance: int = 10**9
    max_live_parameters: int = 10**9
    prefetch_bucket_size: int = 5 * 10**7

    def stay(self, numel: int, modules: int) -> float:
        """Return how many elements stay gathered for backward. See [Note: what stays gathered]."""
        ahead = modules * self.prefetch_bucket_size - numel
        return max(self.max_reuse_distance / 2, min(ahead, self.max_live_parameters))

    def gathers(self, numel: int, modules: int) -> float:
        """Gathers of an element per micro-step, on average, with ``numel`` of them in all."""
        return 2.0 - min(1.0, self.stay(numel, modules) / max(1, numel))
