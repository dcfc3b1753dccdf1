"""Presets: the schemes of configs/presets.yaml, each written like a "quantized_comm" block.

A user's file NAME.yaml in the same folder is scheme NAME.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import yaml

from ds_quant.config.deprecation import warn_deprecated
from ds_quant.resources import resource_dir

AUTOTUNE = "autotune"  # instead of a preset: measured and chosen at start-up, see policy.choosing
# Earlier names, accepted up to a release.
RENAMED_UNTIL = "2.0"
RENAMED = MappingProxyType({f"lossless_g{bits}": f"lossless_w_g{bits}" for bits in (4, 3, 2)})

RESEARCH, YOURS = "for research", "yours"


def preset_names() -> tuple[str, ...]:
    """List all schemes, group by group."""
    return tuple(name for names in preset_groups().values() for name in names)


def group_of(name: str) -> str:
    """Return the group of a scheme; "" for other words, such as "autotune"."""
    for group, names in preset_groups().items():
        if name in names:
            return group
    return ""


def choices() -> str:
    """List the values of "scheme" in words, group by group."""
    parts = []
    for group, names in preset_groups().items():
        if group:
            parts.append(f"{group}: {_quoted(names)}")
        else:
            parts.append(_quoted([*names, AUTOTUNE]))
    return "; ".join(parts)


def _quoted(names: Iterable[str]) -> str:
    return " or ".join(f'"{name}"' for name in names)


def successor(name: str) -> str:
    """Return the name of a scheme today, and warn if ``name`` is an earlier one."""
    if name not in RENAMED:
        return name
    warn_deprecated(
        f'scheme "{name}"',
        f'"{RENAMED[name]}"',
        removal=RENAMED_UNTIL,
        reason="its weights are lossless, its gradients are not",
    )
    return RENAMED[name]


def preset_description(name: str) -> str:
    """Describe the scheme in one line."""
    return _load(name).get("description", "a scheme of your own")


def apply_preset(name: object, block: dict[str, Any]) -> dict[str, Any]:
    """Return the block over the values of scheme ``name``; the block itself if unknown."""
    if not isinstance(name, str) or name not in preset_names():
        return block
    preset = deepcopy(_load(name))
    preset.pop("description", None)
    return _merge(preset, block)


@lru_cache
def preset_groups() -> dict[str, dict[str, Any]]:
    """Return the schemes as written in YAML, by group, in the order of lists and messages.

    Group "" holds the recommended schemes. ``YOURS`` is there only if the user has a file.
    """
    folder = resource_dir("configs")
    presets = yaml.safe_load((folder / "presets.yaml").read_text("utf-8"))
    groups = {"": presets["presets"], RESEARCH: presets["research"]}
    yours = {}
    for path in sorted(folder.glob("*.yaml")):
        if path.stem != "presets":
            yours[path.stem] = yaml.safe_load(path.read_text("utf-8"))
    if yours:
        groups[YOURS] = yours
    return groups


@lru_cache
def _load(name: str) -> dict[str, Any]:
    """Return the values of a scheme, over those of the scheme named by its key "like"."""
    values = dict(preset_groups()[group_of(name)][name])
    like = values.pop("like", None)
    if like is None:
        return values
    return _merge(_load(like), values)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the values of ``over``; objects are merged key by key."""
    merged = {**base, **over}
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merged[key] = _merge(base[key], value)
    return merged
