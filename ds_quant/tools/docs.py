"""``ds_quant schema``: the JSON schema of the block, or docs/keys.md.

The page is made from the models that check the block, so that both agree.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from typing import Any

from ds_quant.config.errors import UNUSED_BY_LOSSLESS, in_words, show
from ds_quant.config.presets import AUTOTUNE, preset_description, preset_groups
from ds_quant.config.schema import KEY, QuantizedCommConfig, json_schema, parse_block

_HEAD = f"""# Keys of the block

All keys lie in `"{KEY}"`; most runs need the first table only. A key that is left out takes the
value of its scheme ([below](#schemes)), or the default if the scheme does not set it. A block
without `scheme` means `qsdp`, from which blocks of your own start; the advice is `autotune`, which
refuses the keys of `weights` and `gradients`. Steps are optimizer steps, sizes elements of a
parameter. Made by `ds_quant schema --markdown`; do not edit.
"""
# Keys by the people who set them; "" stands for the keys of no other group.
_GROUPS = {
    "For a training run": "scheme enabled node_size exclude min_numel warmup_steps node_shard "
    "allow_full_replica gradients.cross metrics.interval metrics.file",
    "For many hosts": "handshake_timeout payload_checksum checksum_steps fallback.on_nonfinite "
    "fallback.steps",
    "For authors of schemes": "",
    "For tests and experiments": "backend slices weights.levels weights.level_steps "
    "weights.level_rate weights.intra.group_size",
}
_NOT_LOSSLESS = [f"weights.{key}" for key in UNUSED_BY_LOSSLESS]


def main(arguments: argparse.Namespace) -> int:
    """Print the schema or the page."""
    if arguments.markdown:
        print(markdown())
    else:
        print(json.dumps(json_schema(), indent=2))
    return 0


def markdown() -> str:
    """Return the page, without a newline at its end."""
    rows = dict(_rows())
    grouped = " ".join(_GROUPS.values()).split()
    lines = [_HEAD]
    for title, keys in _GROUPS.items():
        lines += [f"## {title}", "", "| key | allowed | default | effect |"]
        lines.append("| --- | --- | --- | --- |")
        shown = keys.split() or [key for key in rows if key not in grouped]
        lines += [*(rows[key] for key in shown), ""]
    return "\n".join([*lines, _schemes()])


def _rows() -> Iterator[tuple[str, str]]:
    """Yield every key with a value, and its row: allowed values, default and effect."""
    for location, key_schema in QuantizedCommConfig.key_schemas().items():
        options = key_schema["anyOf"]
        is_object = "properties" in options[0]
        if is_object and key_schema["default"] is not None:
            continue  # its keys have rows
        if location == ("scheme",):
            allowed = f"a scheme below, or `{show(AUTOTUNE)}`"
        elif is_object:
            allowed = "an object with the keys below, or null"
        else:
            allowed = in_words(options)
        key = ".".join(map(str, location))
        default = show(key_schema["default"])
        effect = _cell(key_schema["description"])
        yield key, f"| `{key}` | {_cell(allowed)} | `{default}` | {effect} |"


def _schemes() -> str:
    """Return the section of schemes: descriptions, and the keys in which they differ."""
    lines = ["## Schemes"]
    for group, names in preset_groups().items():
        if group:
            lines += ["", f"{group.capitalize()}:"]
        lines += ["", *(f"- `{name}`: {_cell(preset_description(name))}" for name in names)]
        lines += ["", *_table(names)]
    return "\n".join(lines)


def _table(names: Iterable[str]) -> list[str]:
    """Return a column per scheme and a row per key in which they differ.

    A cell is empty if the value is null or has no effect in the scheme.
    """
    blocks = {name: _flat(parse_block({"scheme": name}).resolved()) for name in names}
    lines = ["| key | " + " | ".join(blocks) + " |", "| --- " * (len(blocks) + 1) + "|"]
    keys = dict.fromkeys(key for block in blocks.values() for key in block)
    for key in keys:
        if key == "scheme" or len({show(block.get(key)) for block in blocks.values()}) == 1:
            continue
        cells = []
        for block in blocks.values():
            is_shown = _has_effect(key, block) and block.get(key) is not None
            cells.append(f"`{show(block[key])}`" if is_shown else "")
        lines.append(f"| `{key}` | {' | '.join(cells)} |")
    return lines


def _has_effect(key: str, block: dict[str, Any]) -> bool:
    """Return True if a key has an effect beside the other values of a scheme."""
    enabled = f"{key.partition('.')[0]}.enabled"
    if key != enabled and not block.get(enabled, True):
        return False
    return key not in _NOT_LOSSLESS or not block["weights.lossless"]


def _flat(block: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested objects by path: "weights.bits"."""
    values: dict[str, Any] = {}
    for key, value in block.items():
        if isinstance(value, dict):
            values |= _flat(value, f"{prefix}{key}.")
        else:
            values[prefix + key] = value
    return values


def _cell(text: str) -> str:
    """Escape the text of a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*")
