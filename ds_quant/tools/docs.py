"""docs/keys.md: every key of the block, from the models, so that page and check cannot disagree.

``ds_quant schema --markdown`` prints it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ds_quant.config.errors import QUANTIZED, in_words, show
from ds_quant.config.presets import AUTOTUNE, preset_description, preset_groups
from ds_quant.config.schema import KEY, QuantizedCommConfig, parse_block

_HEAD = f"""# Keys of the block

All keys lie in `"{KEY}"`; most runs need the first table only. A key that is left out takes the
value of its scheme ([below](#schemes)); the default column is what schemes start from. Steps are
optimizer steps, sizes elements of a parameter. Made by `ds_quant schema --markdown`; do not edit.
"""
# Who sets a key; "" is what is in no other group.
_GROUPS = {
    "For a training run": "scheme enabled node_size exclude min_numel warmup_steps node_shard "
    "allow_full_replica gradients.cross metrics.interval metrics.file",
    "For many hosts": "handshake_timeout payload_checksum checksum_steps fallback.on_nonfinite "
    "fallback.steps",
    "For authors of schemes": "",
    "For tests and experiments": "backend slices weights.levels weights.level_steps "
    "weights.level_rate weights.intra.group_size",
}
_NOT_EXACT = [f"weights.{key}" for key in QUANTIZED]


def markdown() -> str:
    """Return the page, without a newline at its end."""
    rows = dict(_keys())
    rest = [key for key in rows if key not in " ".join(_GROUPS.values()).split()]
    lines = [_HEAD]
    for title, keys in _GROUPS.items():
        lines += [f"## {title}", "", "| key | allowed | default | effect |"]
        lines += ["| --- | --- | --- | --- |", *(rows[key] for key in keys.split() or rest), ""]
    return "\n".join([*lines, _schemes()])


def _keys() -> Iterator[tuple[str, str]]:
    """Yield every key that holds a value, and its row: allowed values, default and effect."""
    for location, place in QuantizedCommConfig.key_schemas().items():
        allowed, holds_keys = in_words(place["anyOf"]), "properties" in place["anyOf"][0]
        if location == ("scheme",):
            allowed = f"a scheme below, or `{show(AUTOTUNE)}`"
        elif holds_keys:
            allowed = "an object with the keys below, or null"
        if not holds_keys or place["default"] is None:
            key, default, effect = ".".join(location), show(place["default"]), place["description"]
            yield key, f"| `{key}` | {_cell(allowed)} | `{default}` | {_cell(effect)} |"


def _schemes() -> str:
    """Return what each scheme sets, where schemes differ."""
    lines = ["## Schemes"]
    for group, names in preset_groups().items():
        lines += ["", f"{group.capitalize()}:"] if group else []
        lines += ["", *(f"- `{name}`: {_cell(preset_description(name))}" for name in names)]
        lines += ["", *_table(names)]
    return "\n".join(lines)


def _table(names: Iterable[str]) -> list[str]:
    """What the schemes set, where they differ."""
    blocks = {name: _flat(parse_block({"scheme": name}).resolved()) for name in names}
    lines = ["| key | " + " | ".join(blocks) + " |", "| --- " * (len(blocks) + 1) + "|"]
    for key in dict.fromkeys(key for block in blocks.values() for key in block if key != "scheme"):
        found = [show(block.get(key)) for block in blocks.values()]
        enabled = f"{key.partition('.')[0]}.enabled"
        if len(set(found)) > 1:
            off = [
                (key != enabled and not block.get(enabled, True))
                or (key in _NOT_EXACT and block["weights.lossless"])
                for block in blocks.values()
            ]
            cells = ("" if gone or value == "null" else f"`{value}`"
                     for gone, value in zip(off, found, strict=True))  # fmt: skip
            lines.append(f"| `{key}` | {' | '.join(cells)} |")
    return lines


def _flat(block: dict[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in block.items():
        nested = isinstance(value, dict)
        found |= _flat(value, f"{above}{key}.") if nested else {above + key: value}
    return found


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*")
