"""The schemes of a comparison, and the DeepSpeed configuration of each.

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
    """A scheme to run.

    label: the entry as it was written.
    name: a preset, or deepspeed_plain.
    overrides: dotted key -> value that replaces the preset's.
    """

    label: str
    name: str
    overrides: dict[str, Any] = field(default_factory=dict)


def parse_schemes(listing: str) -> list[SchemeEntry]:
    """Return the entries of `a,b:key=value,key=value,c`. Values are JSON or else strings.

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
    pieces = [""]
    depth = 0
    for character in listing:
        if character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece.strip() for piece in pieces]


def parse_override(setting: str) -> tuple[str, Any]:
    """Parse `weights.bits=6` to ("weights.bits", 6). The value is JSON or else a string.

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
    """Return the "quantized_comm" block of an entry, None for DeepSpeed as shipped."""
    if entry.name == launch.PLAIN:
        return None
    block: dict[str, Any] = {"scheme": entry.name, "seed": args.seed}
    if args.node_size is not None:
        block["node_size"] = args.node_size
    return with_overrides(block, entry.overrides)


def with_overrides(block: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a block with other values. overrides: by dotted key."""
    block = copy.deepcopy(block)
    for key, value in overrides.items():
        *parents, last = key.split(".")
        section = block
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return block


def deepspeed_config(entry: SchemeEntry, args: argparse.Namespace) -> dict[str, Any]:
    """Return the ds_config.json of a run. Schemes differ in the block only."""
    zero: dict[str, Any] = {"stage": args.stage}
    if args.stage == 3:
        # Gather for forward and again for backward, as a large model does. With its defaults
        # DeepSpeed would keep all parameters of a model this small gathered.
        zero["stage3_param_persistence_threshold"] = 0
        zero["stage3_max_reuse_distance"] = 0
        zero["stage3_max_live_parameters"] = 0
    schedule = {
        "total_num_steps": args.steps,
        "warmup_num_steps": max(1, args.steps // 10),
        "warmup_type": "linear",
        "cos_min_ratio": 0.1,
    }
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
