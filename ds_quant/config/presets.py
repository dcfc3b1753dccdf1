"""Presets: the schemes of configs/presets.yaml, each written like a "quantized_comm" block.

A file NAME.yaml of the user's own beside it is scheme NAME.
"""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import yaml

from ds_quant.resources import resource_dir

AUTOTUNE = "autotune"  # in place of a preset: a scheme of ``policy.choosing``, found at start-up
# Earlier names, which stay accepted.
RENAMED = MappingProxyType({f"lossless_g{bits}": f"lossless_w_g{bits}" for bits in (4, 3, 2)})

RESEARCH, YOURS = "for research", "yours"


def preset_names() -> tuple[str, ...]:
    """List all schemes, group by group."""
    return tuple(name for names in preset_groups().values() for name in names)


def group_of(name: str) -> str:
    """Return the group of a scheme; "" for what is none, such as "autotune"."""
    return next((group for group, names in preset_groups().items() if name in names), "")


def choices() -> str:
    """List what "scheme" may be, in words."""
    return "; ".join(
        (f"{group}: " if group else "")
        + " or ".join(f'"{name}"' for name in (*names, *[AUTOTUNE] * (not group)))
        for group, names in preset_groups().items()
    )


def renamed(block: Any) -> str | None:
    """Tell of an earlier name in the block, in words; None if there is none."""
    name = block.get("scheme") if isinstance(block, dict) else None
    if not isinstance(name, str) or name not in RENAMED:
        return None
    return (
        f'scheme "{name}" is now called "{RENAMED[name]}": its weights are lossless, its gradients '
        "are not; the earlier name stays accepted"
    )


def preset_description(name: str) -> str:
    """Describe the scheme in one line."""
    return _load(name).get("description", "a scheme of your own")


def apply_preset(name: Any, block: dict[str, Any]) -> dict[str, Any]:
    """Merge the values of scheme ``name`` under the block; unchanged without such a scheme."""
    if name not in preset_names():
        return block
    base = {key: value for key, value in deepcopy(_load(name)).items() if key != "description"}
    return _merge(base, block)


@lru_cache
def preset_groups() -> dict[str, dict[str, Any]]:
    """List the schemes as written, in the order in which they are shown: under "" what a user
    meets, then ``RESEARCH`` and, if there are any, ``YOURS``.
    """
    folder = resource_dir("configs")
    shipped = yaml.safe_load((folder / "presets.yaml").read_text("utf-8"))
    yours = {
        path.stem: yaml.safe_load(path.read_text("utf-8"))
        for path in sorted(folder.glob("*.yaml"))
        if path.stem != "presets"
    }
    groups = {"": shipped["presets"], RESEARCH: shipped["research"], YOURS: yours}
    return {group: schemes for group, schemes in groups.items() if schemes}


@lru_cache
def _load(name: str) -> dict[str, Any]:
    """The values of a scheme, over those of the one that it is ``like``."""
    values = dict(preset_groups()[group_of(name)][name])
    like = values.pop("like", None)
    return values if like is None else _merge(_load(like), values)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = {**base, **over}
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merged[key] = _merge(base[key], value)
    return merged
