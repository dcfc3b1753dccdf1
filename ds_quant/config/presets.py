"""Presets: the schemes in configs/, one YAML file each, written like a "quantized_comm" block."""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from typing import Any

import yaml

from ds_quant.resources import resource_dir

AUTOTUNE = "autotune"  # in place of a preset: one of CANDIDATES, chosen at start-up

# In the order of what they lose, the most exact one first. Only schemes whose loss stays with that
# of full precision (benchmarks/results/convergence.json, and in their papers). Left out: zeropp,
# whose gradients have six to eight times the error of sdp4bit's (errors_cpu.json); qsdp_w4g4 and
# qw4, whose weights themselves have 4 bits; the families eden and lossless, whose loss is being
# studied and whose bytes depend on the learning rate; the others are parts or variants of sdp4bit.
CANDIDATES = ("full_precision", "qsdp", "sdp4bit")
# Loses what qsdp loses and keeps a node shard for it: whether that is worth the memory says a user.
BY_HAND = ("qsdp_shard",)


@lru_cache
def preset_names() -> tuple[str, ...]:
    """List the schemes in configs/, sorted."""
    return tuple(sorted(path.stem for path in resource_dir("configs").glob("*.yaml")))


def preset_description(name: str) -> str:
    """Describe the scheme in one line."""
    return _load(name)["description"]


def apply_preset(name: Any, block: dict[str, Any]) -> dict[str, Any]:
    """Merge the values of scheme ``name`` under the block; unchanged without such a scheme."""
    if name not in preset_names():
        return block
    base = deepcopy(_load(name))
    del base["description"]
    return _merge(base, block)


@lru_cache
def _load(name: str) -> dict[str, Any]:
    return yaml.safe_load((resource_dir("configs") / f"{name}.yaml").read_text("utf-8"))


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = {**base, **over}
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merged[key] = _merge(base[key], value)
    return merged
