"""docs/keys.md: every key of the block, from the models, so that page and check cannot disagree.

``ds_quant schema --markdown`` prints it.
"""

from __future__ import annotations

from collections.abc import Iterator
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
# Without effect where weights.lossless is true.
_NOT_EXACT = tuple(
    f"weights.{key}"
    for key in (
        "codec", "bits", "group_size", "range", "rounding", "difference", "levels", "level_steps",
        "level_rate",
    )
)  # fmt: skip


def markdown() -> str:
    """Return the page, without a newline at its end."""
    definitions = json_schema()["$defs"]
    keys = _keys(definitions["QuantizedCommConfig"], definitions)
    return _HEAD + "\n".join(f"| {' | '.join(row)} |" for row in keys) + "\n\n" + _schemes()


def _keys(model: dict[str, Any], definitions: dict[str, Any], above: str = "") -> Iterator[tuple]:
    """Yield path, allowed, default and effect of every key that holds a value."""
    for key, node in model["properties"].items():
        path, options = above + key, node.get("anyOf", [node])
        models = [definitions[o["$ref"].rsplit("/", 1)[1]] for o in options if "$ref" in o]
        allowed, effect = allowed_in(json_schema(), (KEY, *path.split("."))), node["description"]
        if path == "scheme":  # the list of schemes stands in a table of its own
            allowed, effect = (
                f"a scheme below, or `{show(AUTOTUNE)}`",
                effect.partition(". ")[0] + ".",
            )
        elif models:
            allowed = "an object with the keys below, or null"
        if len(models) < len(options):
            default = f"`{show(node['default'])}`" if "default" in node else ""
            yield f"`{path}`", _cell(allowed), default, _cell(effect)
        if models:
            yield from _keys(models[0], definitions, f"{path}.")


def _schemes() -> str:
    """Return what each scheme sets, where schemes differ."""
    blocks = {name: _flat(parse_block({"scheme": name}).resolved()) for name in preset_names()}
    lines = ["## Schemes", ""]
    lines += [f"- `{name}`: {_cell(preset_description(name))}" for name in blocks]
    lines += ["", "| key | " + " | ".join(blocks) + " |", "| --- " * (len(blocks) + 1) + "|"]
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
    return "\n".join(lines)


def _flat(block: dict[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in block.items():
        nested = isinstance(value, dict)
        found |= _flat(value, f"{above}{key}.") if nested else {above + key: value}
    return found


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
