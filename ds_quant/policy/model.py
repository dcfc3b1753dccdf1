"""A model as the formulas need it: shapes that represent all of its parameters, and how often
ZeRO-3 gathers them in a micro-step.

[Note: what stays gathered] DeepSpeed gathers a module's parameters for forward and again for
backward, unless they stay gathered in between. They do if their next use is fewer than
``stage3_max_reuse_distance`` elements away, which is true of half as many elements at the end of
the model, or if the prefetcher has already passed that use. At every module the prefetcher gathers
up to ``stage3_prefetch_bucket_size`` further elements, while fewer than
``stage3_max_live_parameters`` are gathered. So it gets ahead by the elements that exceed the
module's. Tied weights, parameters that always stay gathered and recomputed blocks are not modelled:
the first steps are counted, see ``zero.fetch``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ds_quant.kernels.wire import ceil_div
from ds_quant.policy.cost import ParamSpec


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of a model.

    param_specs: parameters that represent the model; their bytes per parameter hold for all
        ``numel``.
    experts: elements of experts, of which a token uses some.
    trained: elements that are trained.
    modules: number of modules with parameters of their own.
    largest: elements of the largest parameter.
    hidden: width.
    """

    name: str
    numel: int
    layers: int
    param_specs: tuple[ParamSpec, ...]
    trained: int
    modules: int
    largest: int
    hidden: int
    experts: int = 0


def block_param_specs(hidden: int, *, dtype: torch.dtype) -> tuple[ParamSpec, ...]:
    """Return the parameters of one transformer block of width ``hidden``."""
    shapes = {
        "qkv": (3 * hidden, hidden),
        "out": (hidden, hidden),
        "up": (4 * hidden, hidden),
        "down": (hidden, 4 * hidden),
        "norm1": (hidden,),
        "norm2": (hidden,),
    }
    return tuple(
        ParamSpec(f"block.{name}.weight", shape, dtype, trainable=True)
        for name, shape in shapes.items()
    )


def of_size(numel: int, *, dtype: torch.dtype, trained: float = 1.0, experts: int = 0) -> Model:
    """Return a transformer of ``numel`` parameters, 128 times as wide as deep: 12 h^2 per block.

    experts: how many of the parameters are experts.
    trained: share of the parameters that are adapters of frozen weights; 1: all are trained.
    """
    hidden = max(128, round((numel * 128 / 12) ** (1 / 3) / 128) * 128)
    layers = max(1, round(numel / (12 * hidden**2)))
    param_specs = tuple(with_adapters(block_param_specs(hidden, dtype=dtype), trained))
    name = f"{numel / 1e9:.3g} B parameters, {layers} blocks of width {hidden}"
    return Model(
        name=named(name, trained),
        numel=numel,
        layers=layers,
        param_specs=param_specs,
        trained=round(numel * trained),
        modules=layers * len(param_specs),
        largest=4 * hidden**2,
        hidden=hidden,
        experts=experts,
    )


_OF_EXPERTS = re.compile(r"(^|\.)experts\.")


def is_of_experts(name: str) -> bool:
    """Return True for the name of a parameter of experts; shared experts are dense."""
    return _OF_EXPERTS.search(name) is not None


def dense_and_experts(model: Model) -> list[Model]:
    """Split a model with experts into its dense part and them."""
    parts = []
    for numel, of_experts in ((model.numel - model.experts, False), (model.experts, True)):
        own = [spec for spec in model.param_specs if is_of_experts(spec.name) == of_experts]
        specs = tuple(own) or model.param_specs  # of a size alone both parts have the same shapes
        largest = max(torch.Size(spec.shape).numel() for spec in specs)
        part = replace(
            model,
            numel=numel,
            trained=round(numel * model.trained / model.numel),
            param_specs=specs,
            modules=len(specs),
            largest=min(largest, numel),
            experts=numel if of_experts else 0,
        )
        parts.append(part)
    return parts


def part_of(model: Model, parts: int, name: str) -> Model:
    """Return one of so many equal parts of a model, with the same bytes per parameter."""
    return replace(
        model,
        name=name,
        numel=ceil_div(model.numel, parts),
        trained=ceil_div(model.trained, parts),
        largest=ceil_div(model.largest, parts),
        experts=ceil_div(model.experts, parts),
    )


def named(name: str, trained: float) -> str:
    """Return the name of a model with its trained share, if not all is trained."""
    if trained == 1:
        return name
    return f"{name}, {trained:.3g} of them trained"


def with_adapters(param_specs: tuple[ParamSpec, ...], trained: float) -> Iterator[ParamSpec]:
    """Yield the parameters, frozen, with an adapter per matrix.

    trained: share of the adapters in all elements; 1: no adapters, all parameters are trained.
    """
    if trained == 1:
        yield from param_specs
        return
    adapter_ratio = trained / (1 - trained)  # elements of an adapter per frozen element
    for spec in param_specs:
        yield spec._replace(trainable=False)
        if len(spec.shape) > 1:
            numel = torch.Size(spec.shape).numel()
            columns = spec.shape[1]
            rows = max(1, ceil_div(round(numel * adapter_ratio), columns))
            yield ParamSpec(f"{spec.name}.adapter", (rows, columns), spec.dtype, trainable=True)


@dataclass(frozen=True, kw_only=True)
class FetchSettings:
    """Keys of ``zero_optimization`` that decide how often ZeRO-3 gathers, in elements. Defaults are
    DeepSpeed's.
    """

    max_reuse_distance: int = 10**9
    max_live_parameters: int = 10**9
    prefetch_bucket_size: int = 5 * 10**7

    def stay(self, numel: int, modules: int) -> float:
        """Return the elements that stay gathered for backward. See [Note: what stays gathered]."""
        ahead = modules * self.prefetch_bucket_size - numel
        return max(self.max_reuse_distance / 2, min(ahead, self.max_live_parameters))

    def gathers(self, numel: int, modules: int) -> float:
        """Return the average gathers of an element per micro-step, in a model of ``numel``."""
        return 2.0 - min(1.0, self.stay(numel, modules) / max(1, numel))
