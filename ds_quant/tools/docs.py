"""docs/keys.md: every key of the block, from the models, so that page and check cannot disagree.

``ds_quant schema --markdown`` prints it.
"""

from __future__ import annotations

import re
from typing import Any

from ds_quant.config.errors import allowed_in, show
from ds_quant.config.presets import AUTOTUNE, preset_description, preset_names
from ds_quant.config.schema import KEY, json_schema, parse_block

_HEAD = f"""# Keys of the block

Made by `ds_quant schema --markdown` from the models that check the block; do not edit. A key that
is left out takes the value of its scheme (below); the default column is what schemes start from.
All keys lie in `"{KEY}"`; steps are optimizer steps, sizes are elements of a parameter.

| key | allowed | default | effect |
| --- | --- | --- | --- |
"""
_ROLES = ("weights", "gradients")
# Without effect where weights.lossless is true.
_NOT_EXACT = tuple(
    f"weights.{key}"
    for key in (
        "codec", "bits", "group_size", "range", "rounding", "difference", "levels", "level_steps",
        "level_rate",
    )
)  # fmt: skip


def markdown() -> str:
    """The page, without a newline at its end."""
    schema = json_schema()
    definitions = schema["$defs"]
    rows = _rows(definitions["QuantizedCommConfig"], definitions, ())
    lines = [f"| `{'.'.join(path)}` | {allowed} | {default} | {effect} |"
             for path, allowed, default, effect in rows]  # fmt: skip
    return _HEAD + "\n".join(lines) + "\n\n" + _schemes()


def _rows(
    model: dict[str, Any], definitions: dict[str, Any], above: tuple[str, ...]
) -> list[tuple[tuple[str, ...], str, str, str]]:
    """(path, allowed, default, effect) of every key that holds a value."""
    found = []
    for key, node in model["properties"].items():
        path = (*above, key)
        below = _object_of(node, definitions)
        nullable = "anyOf" in node
        if below is None or nullable:
            found.append((path, _allowed(path, node), _default(node), _text(path, node)))
        if below is not None:
            found += _rows(below, definitions, path)
    return found


def _object_of(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any] | None:
    """The model behind a key, if its value is an object."""
    for option in node.get("anyOf", [node]):
        if "$ref" in option:
            return definitions[option["$ref"].rsplit("/", 1)[1]]
    return None


def _allowed(path: tuple[str, ...], node: dict[str, Any]) -> str:
    if path == ("scheme",):
        return f"a scheme below, or `{show(AUTOTUNE)}`"
    if _object_of(node, json_schema()["$defs"]) is not None:
        return "an object with the keys below, or null"
    return _cell(allowed_in(json_schema(), (KEY, *path)))


def _default(node: dict[str, Any]) -> str:
    return f"`{show(node['default'])}`" if "default" in node else ""


def _text(path: tuple[str, ...], node: dict[str, Any]) -> str:
    if path == ("scheme",):  # the list that follows stands in a table of its own
        return node["description"].partition(". ")[0] + "."
    return _cell(node["description"])


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def _schemes() -> str:
    """What each scheme sets, where schemes differ."""
    blocks = {name: _flat(parse_block({"scheme": name}).resolved()) for name in preset_names()}
    keys = [
        key for key in dict.fromkeys(k for block in blocks.values() for k in block)
        if key != "scheme" and len({show(block.get(key)) for block in blocks.values()}) > 1
    ]  # fmt: skip
    lines = ["## Schemes", ""]
    lines += [f"- `{name}`: {_cell(preset_description(name))}" for name in blocks]
    lines += ["", "| key | " + " | ".join(blocks) + " |", "| --- " * (len(blocks) + 1) + "|"]
    for key in keys:
        values = (_value(block, key) for block in blocks.values())
        lines.append(f"| `{key}` | " + " | ".join(values) + " |")
    return "\n".join(lines)


def _flat(block: dict[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in block.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{above}{key}.")
        else:
            found[above + key] = value
    return found


def _value(block: dict[str, Any], key: str) -> str:
    """What a scheme sets; nothing where the role is off or the key does not exist."""
    role = key.split(".")[0]
    off = role in _ROLES and key != f"{role}.enabled" and not block[f"{role}.enabled"]
    off = off or (key in _NOT_EXACT and block["weights.lossless"])
    return "" if off or block.get(key) is None else f"`{show(block[key])}`"
