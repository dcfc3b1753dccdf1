"""The model of an estimate: its parameters by shape, from a size or a Hugging Face model config.

May import torch, cost, gathers; transformers inside a function.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ds_quant import gathers
from ds_quant.cost import Cargo
from ds_quant.layout import ceil_div


@dataclass(frozen=True, kw_only=True)
class Model:
    """``cargo`` stands for the whole model: its bytes per parameter are taken for all ``numel``.

    trained: parameters that are trained. root: modules in the order of forward. hidden: the width.
    """

    name: str
    numel: int
    layers: int
    cargo: tuple[Cargo, ...]
    trained: int
    root: gathers.Module
    hidden: int

    @property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max(unit.numel for unit in self.root.all_units())

    def outline(self, persistent: float) -> gathers.Module:
        """``root``; parameters of at most ``persistent`` elements stay gathered."""
        return _marked(self.root, persistent)


def _marked(module: gathers.Module, persistent: float) -> gathers.Module:
    units = (unit._replace(persistent=unit.numel <= persistent) for unit in module.units)
    return gathers.Module(tuple(units), tuple(_marked(c, persistent) for c in module.children))


def block_cargo(hidden: int, *, dtype: torch.dtype) -> tuple[Cargo, ...]:
    """One transformer block of width ``hidden``."""
    shapes = {"qkv": (3 * hidden, hidden), "out": (hidden, hidden), "up": (4 * hidden, hidden),
              "down": (hidden, 4 * hidden), "norm1": (hidden,), "norm2": (hidden,)}  # fmt: skip
    return tuple(Cargo(f"block.{name}.weight", s, dtype, True) for name, s in shapes.items())


def of_size(numel: int, *, dtype: torch.dtype, trained: float = 1.0) -> Model:
    """A transformer of ``numel`` parameters, 128 times as wide as it is deep: 12 h^2 per block.
    ``trained``: the share of adapters beside frozen weights; 1 for all weights.
    """
    hidden = max(128, round((numel * 128 / 12) ** (1 / 3) / 128) * 128)
    layers = max(1, round(numel / (12 * hidden**2)))
    cargo = tuple(_with_adapters(block_cargo(hidden, dtype=dtype), trained))
    name = f"{numel / 1e9:.3g} B parameters, {layers} blocks of width {hidden}"
    block = [(item.name, torch.Size(item.shape).numel()) for item in cargo]
    blocks = (
        gathers.Module(
            (), tuple(gathers.Module((gathers.Unit((i, part), n),)) for part, n in block)
        )
        for i in range(layers)
    )
    return Model(
        name=_named(name, trained), numel=numel, layers=layers, cargo=cargo,
        trained=round(numel * trained), root=gathers.Module((), tuple(blocks)), hidden=hidden,
    )  # fmt: skip


def _named(name: str, trained: float) -> str:
    return name if trained == 1 else f"{name}, {trained:.3g} of them trained"


def _with_adapters(cargo: tuple[Cargo, ...], trained: float) -> Iterator[Cargo]:
    """Frozen parameters and, per matrix, an adapter; together ``trained`` of all elements."""
    if trained == 1:
        yield from cargo
        return
    share = trained / (1 - trained)
    for item in cargo:
        yield item._replace(trainable=False)
        if len(item.shape) > 1:
            rows = ceil_div(round(torch.Size(item.shape).numel() * share), item.shape[1])
            yield Cargo(f"{item.name}.adapter", (max(1, rows), item.shape[1]), item.dtype, True)


def of_config(path: Path, *, dtype: torch.dtype, trained: float = 1.0) -> Model:
    """The model of a Hugging Face config.json, built without memory for its weights.

    Raises:
        ValueError: transformers is missing, or the file is no config of a causal language model.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ValueError(
            f"--model-config {path} needs transformers: pip install 'ds_quant[hf]', or give "
            "--params"
        ) from error
    settings = json.loads(path.read_text("utf-8"))
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise ValueError(f"--model-config {path}: no model_type, allowed: a Hugging Face config")
    config = AutoConfig.for_model(**settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    cargo = tuple(Cargo(name, tuple(p.shape), dtype, True) for name, p in model.named_parameters())
    numel = sum(p.numel() for p in model.parameters())
    name = f"{settings['model_type']} of {numel / 1e9:.3g} B parameters"
    return Model(
        name=_named(name, trained), numel=numel, layers=config.num_hidden_layers,
        cargo=tuple(_with_adapters(cargo, trained)), trained=round(numel * trained),
        root=_outline(model), hidden=config.hidden_size,
    )  # fmt: skip


def _outline(module: torch.nn.Module) -> gathers.Module:
    units = (gathers.Unit(id(p), p.numel()) for p in module.parameters(recurse=False))
    return gathers.Module(tuple(units), tuple(map(_outline, module.children())))
