"""Which schemes a comparison runs, and the DeepSpeed configuration of each.

May import the standard library and launch.
"""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import dataclass, field
from typing import Any

import launch


@dataclass(frozen=True, kw_only=True)
class SchemeEntry:
    """A scheme to run: `name` of a preset (or deepspeed_plain) and keys that replace its values."""

    label: str
    name: str
    overrides: dict[str, Any] = field(default_factory=dict)  # dotted key -> value


def parse_schemes(listing: str) -> list[SchemeEntry]:
    """Entries of `a,b:key=value,key=value,c`; values are JSON or else strings.

    Raises:
        ValueError: an empty or repeated entry, or overrides of deepspeed_plain.
    """
    grouped: list[list[str]] = []
    for piece in split_outside_brackets(listing):
        head = piece.partition("=")[0]
        if "=" in piece and ":" not in head and grouped:
            grouped[-1].append(piece)
        else:
            grouped.append([piece])
    entries = [_entry(",".join(pieces)) for pieces in grouped]
    labels = [entry.label for entry in entries]
    if repeated := sorted({label for label in labels if labels.count(label) > 1}):
        raise ValueError(f"schemes: given twice: {', '.join(repeated)}")
    return entries


def _entry(label: str) -> SchemeEntry:
    name, _, rest = label.partition(":")
    if not name or "=" in name:
        raise ValueError(f"schemes: {label!r}: allowed: name or name:key=value,key=value")
    overrides = dict(parse_override(piece) for piece in split_outside_brackets(rest) if rest)
    if name == launch.PLAIN and overrides:
        raise ValueError(f"schemes: {label!r}: {launch.PLAIN} has no block to override")
    return SchemeEntry(label=label, name=name, overrides=overrides)


def split_outside_brackets(listing: str) -> list[str]:
    """Split at commas, but not inside [] or {}."""
    pieces, depth = [""], 0
    for character in listing:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece.strip() for piece in pieces]


def parse_override(setting: str) -> tuple[str, Any]:
    """`weights.bits=6` as ("weights.bits", 6); the value is JSON, or else a string.

    Raises:
        ValueError: there is no key or no "=".
    """
    key, equals, value = setting.partition("=")
    if not key or not equals:
        raise ValueError(f"override {setting!r}: allowed: key=value, such as weights.bits=6")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def block_of(entry: SchemeEntry, args: argparse.Namespace) -> dict[str, Any] | None:
    """The "quantized_comm" block of an entry, None for DeepSpeed as shipped."""
    if entry.name == launch.PLAIN:
        return None
    block: dict[str, Any] = {"scheme": entry.name, "seed": args.seed}
    if args.node_size is not None:
        block["node_size"] = args.node_size
    return with_overrides(block, entry.overrides)


def with_overrides(block: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """A copy of a block in which dotted keys have replaced values."""
    block = copy.deepcopy(block)
    for key, value in overrides.items():
        *parents, last = key.split(".")
        place = block
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return block


def deepspeed_config(entry: SchemeEntry, args: argparse.Namespace) -> dict[str, Any]:
    """The whole ds_config.json of a run; only the block differs between schemes."""
    zero: dict[str, Any] = {"stage": args.stage}
    if args.stage == 3:
        # Gather for forward and again for backward, as for a model that does not fit. By default
        # DeepSpeed would keep all parameters of a model this small gathered.
        released = ("param_persistence_threshold", "max_reuse_distance", "max_live_parameters")
        zero |= {f"stage3_{name}": 0 for name in released}
    schedule = {"total_num_steps": args.steps, "warmup_num_steps": max(1, args.steps // 10),
                "warmup_type": "linear", "cos_min_ratio": 0.1}  # fmt: skip
    adam = {"lr": args.lr, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": args.accumulation,
        "gradient_clipping": 1.0,
        "steps_per_print": args.steps,
        "optimizer": {"type": "AdamW", "params": adam},
        "scheduler": {"type": "WarmupCosineLR", "params": schedule},
        "bf16": {"enabled": args.dtype == "bf16"},
        "zero_optimization": zero,
    }
    block = block_of(entry, args)
    return config if block is None else {**config, "quantized_comm": block}
