"""The model of an estimate: its parameters by shape, from a size or a Hugging Face model config.

May import torch, cost; transformers inside a function.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from ds_quant.cost import Cargo


@dataclass(frozen=True, kw_only=True)
class Model:
    """``cargo`` stands for the whole model: its bytes per parameter are taken for all ``numel``."""

    name: str
    numel: int
    layers: int
    cargo: tuple[Cargo, ...]


def block_cargo(hidden: int, *, dtype: torch.dtype) -> tuple[Cargo, ...]:
    """One transformer block of width ``hidden``."""
    shapes = {"qkv": (3 * hidden, hidden), "out": (hidden, hidden), "up": (4 * hidden, hidden),
              "down": (hidden, 4 * hidden), "norm1": (hidden,), "norm2": (hidden,)}  # fmt: skip
    return tuple(Cargo(f"block.{name}.weight", s, dtype, True) for name, s in shapes.items())


def of_size(numel: int, *, dtype: torch.dtype) -> Model:
    """A transformer of ``numel`` parameters, 128 times as wide as it is deep: 12 h^2 per block."""
    hidden = max(128, round((numel * 128 / 12) ** (1 / 3) / 128) * 128)
    layers = max(1, round(numel / (12 * hidden**2)))
    name = f"{numel / 1e9:.3g} B parameters, {layers} blocks of width {hidden}"
    cargo = block_cargo(hidden, dtype=dtype)
    return Model(name=name, numel=numel, layers=layers, cargo=cargo)


def of_config(path: Path, *, dtype: torch.dtype) -> Model:
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
    return Model(name=name, numel=numel, layers=config.num_hidden_layers, cargo=cargo)
