"""Error messages for a "quantized_comm" block: which key, its value, what is allowed.

What is allowed is read from the JSON schema of the model, so that an error, the schema and the
check itself cannot disagree.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from ds_quant.config.presets import AUTOTUNE

KEY = "quantized_comm"
Location = tuple[str | int, ...]  # ("gradients", "bits"): below the block

# Keys that somebody will look for and that are missing on purpose.
_ABSENT = {
    ("gradients", key): "learned levels are biased and gradients must stay unbiased, so only "
    f"{KEY}.weights has {key}: leave {key} out here"
    for key in ("levels", "level_steps", "level_rate")
}
# Keys that a codec of the user's own replaces.
_QUANTIZER = ("bits", "group_size", "range", "rounding", "levels")
_LEVELS = ("level_steps", "level_rate")  # of learned levels


class ConfigError(ValueError):
    """The "quantized_comm" block is wrong; ``problems`` has one line per mistake."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        if len(problems) == 1:
            super().__init__(problems[0])
        else:
            lines = "".join(f"\n  {problem}" for problem in problems)
            super().__init__(f"{len(problems)} mistakes in the DeepSpeed config:{lines}")


def path_of(location: Location) -> str:
    """("weights", "level_steps", 1) -> "quantized_comm.weights.level_steps[1]"."""
    return KEY + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in location)


def show(value: Any) -> str:
    """Format a value as it stands in the JSON file, shortened."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def did_you_mean(word: str, candidates: Iterable[str], *, cutoff: float = 0.55) -> str | None:
    """Return the candidate nearest in spelling, ignoring case and the kind of dash, or ``None``."""
    plain = {c.lower(): c for c in candidates}
    near = difflib.get_close_matches(
        word.strip().lower().replace("-", "_").replace(" ", "_"), plain, n=1, cutoff=cutoff
    )
    return plain[near[0]] if near else None


def misplaced_block(param_dict: Mapping[Any, Any]) -> list[str]:
    """Find blocks that DeepSpeed would silently ignore or reject: misspelt, or not at the top
    level.
    """
    problems = []
    for key, value in param_dict.items():
        # 0.75 also catches "quantized_communication"; DeepSpeed's own keys reach 0.6 at most.
        if key != KEY and isinstance(key, str) and did_you_mean(key, [KEY], cutoff=0.75):
            problems.append(
                f"{key}={show(value)}: unknown key in the DeepSpeed config; did you mean {KEY}?"
            )
        if isinstance(value, dict) and key != KEY and KEY in value:
            problems.append(
                f"{key}.{KEY}={show(value[KEY])}: move {KEY} to the top level of the DeepSpeed "
                "config"
            )
    return problems


def not_an_object(block: Any, schemes: Sequence[str]) -> str:
    """Describe a block that is not an object."""
    scheme = did_you_mean(block, schemes) if isinstance(block, str) else None
    hint = "" if scheme is None else f'; did you mean {{"scheme": "{scheme}"}}?'
    return f'{KEY}={show(block)}: allowed: an object such as {{"scheme": "qsdp"}}{hint}'


def auto_values(value: Any, location: Location = ()) -> list[str]:
    """Return one sentence per "auto" in the block, at any depth."""
    if isinstance(value, str) and value.strip().lower() == "auto":
        return [
            f'{path_of(location)}="auto": not supported, and Hugging Face accelerate stops at it: '
            "leave the key out to get the scheme's value"
        ]
    if isinstance(value, dict):
        items: Iterable[tuple[Any, Any]] = value.items()
    else:
        items = enumerate(value) if isinstance(value, list | tuple) else ()
    return [line for key, item in items for line in auto_values(item, (*location, key))]


def explain(error: ValidationError, *, schema: dict[str, Any], block: dict) -> list[str]:
    """Return one sentence per mistake. ``schema``: of the block; ``block``: what the user wrote."""
    return [_sentence(e, schema, block) for e in error.errors(include_url=False)]


def without_effect(config: Any, block: dict[str, Any]) -> list[str]:
    """Find keys the user wrote that a value set by the scheme makes irrelevant."""
    if config.scheme == AUTOTUNE:
        return [
            f"{path_of((key,))}={show(block[key])} conflicts with {path_of(('scheme',))}="
            f'"{AUTOTUNE}", which chooses it: leave {key} out or set scheme to a preset'
            for key in ("weights", "gradients", "node_shard")
            if block.get(key) is not None
        ]
    problems = []
    for role in ("weights", "gradients"):
        settings, written = getattr(config, role), block.get(role, {})
        if settings.codec is not None:
            problems += [
                f"{path_of((role, key))}={show(written[key])}: no effect with "
                f"{path_of((role, 'codec'))}={show(settings.codec)}: leave one of them out"
                for key in _QUANTIZER
                if key in written
            ]
        if settings.enabled or "enabled" in written:
            continue
        problems += [
            f"{path_of((role, key))}={show(value)}: no effect, {path_of((role, 'enabled'))}=false "
            f"(set by scheme {config.scheme}): set it to true or choose another scheme"
            for key, value in written.items()
            if key != "cross"  # how often they travel, quantized or not
        ]
    weights = block.get("weights", {})
    if config.weights.exactly_differ:
        by = "" if "lossless" in weights else f" (set by scheme {config.scheme})"
        return problems + [
            f"{path_of(('weights', key))}={show(weights[key])}: no effect with "
            f"{path_of(('weights', 'lossless'))}=true{by}: leave {key} out, or set lossless to "
            "false"
            for key in (*_QUANTIZER, *_LEVELS, "codec", "difference")
            if key in weights
        ]
    if config.weights.enabled and config.weights.levels == "uniform":
        problems += [
            f"{path_of(('weights', key))}={show(weights[key])}: no effect with uniform levels: "
            f'set {path_of(("weights", "levels"))} to "learned" or leave {key} out'
            for key in _LEVELS
            if key in weights
        ]
    return problems


def allowed_in(schema: dict[str, Any], location: Location) -> str:
    """Describe the values allowed at one place of ``schema``; ValueError outside of it."""
    node = _node(schema, location)
    if node is None:
        raise ValueError(f"{'.'.join(map(str, location))}: no such key")
    return _allowed(node)


def _sentence(error: Mapping[str, Any], schema: dict[str, Any], block: dict) -> str:
    location: Location = error["loc"]
    context = error.get("ctx", {})
    if error["type"] == "extra_forbidden":
        return _unknown_key(location, error["input"], schema)
    if error["type"] == "conflict":
        settings = context["settings"].items()
        both = (_setting((*location, key), value, block) for key, value in settings)
        return f"{' conflicts with '.join(both)}: {context['fix']}"
    node = _node(schema, location)
    if node is None:  # a key that is not a string
        return f"{path_of(location)}: {error['msg']}"
    allowed = context["allowed"] if error["type"] == "rule" else _allowed(node)
    hint = "" if error["type"] == "rule" else _spelling_hint(error["input"], node)
    return f"{path_of(location)}={show(error['input'])}: allowed: {allowed}{hint}"


def _setting(location: Location, value: Any, block: Any) -> str:
    """path=value, and who set it if that was not the user."""
    for part in location:
        block = block.get(part) if isinstance(block, dict) else None
    return f"{path_of(location)}={show(value)}{'' if block is not None else ' (set by the scheme)'}"


def _unknown_key(location: Location, value: Any, schema: dict[str, Any]) -> str:
    path, key = f"{path_of(location)}={show(value)}", str(location[-1])
    if location in _ABSENT:
        return f"{path}: not supported: {_ABSENT[location]}"
    here = list(_properties(_node(schema, location[:-1]) or {}))
    elsewhere = [c for c in _all_locations(schema) if c[-1] == key]
    elsewhere = [c for c in elsewhere if len(c) == min(map(len, elsewhere))]
    near = did_you_mean(key, here)
    if elsewhere:
        hint = "; did you mean " + " or ".join(path_of(c) for c in elsewhere) + "?"
    else:
        hint = f"; did you mean {path_of((*location[:-1], near))}?" if near else ""
    return f"{path}: unknown key: allowed: {', '.join(here)}{hint}"


def _all_locations(schema: dict[str, Any], above: Location = ()) -> list[Location]:
    found: list[Location] = []
    for key in _properties(_node(schema, above) or {}):
        found += [(*above, key), *_all_locations(schema, (*above, key))]
    return found


def _node(schema: dict[str, Any], location: Location) -> dict[str, Any] | None:
    """The schema of one place in the block, with $ref followed; ``None`` outside the schema."""
    node: dict[str, Any] | None = schema
    for part in location:
        node = node.get("items") if isinstance(part, int) else _properties(node).get(part)
        if node is None:
            return None
        node = _followed(schema, node)
    return node


def _followed(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    """The node with $ref followed, also in its alternatives."""
    if "$ref" in node:
        return schema["$defs"][node["$ref"].rsplit("/", 1)[1]]
    if "anyOf" in node:
        return {**node, "anyOf": [_followed(schema, option) for option in node["anyOf"]]}
    return node


def _properties(node: dict[str, Any]) -> dict[str, Any]:
    """Keys of an object, also of one that may be null."""
    objects = [option for option in node.get("anyOf", [node]) if "properties" in option]
    return objects[0]["properties"] if objects else {}


def _allowed(node: dict[str, Any]) -> str:
    if "anyOf" in node:
        return " or ".join(_allowed(option) for option in node["anyOf"])
    if "enum" in node:
        return " or ".join(show(choice) for choice in node["enum"])
    kind = node.get("type")
    if kind in ("integer", "number"):
        step = node.get("multipleOf")
        noun = {"integer": "a whole number", "number": "a number"}[kind]
        return (f"a multiple of {step}" if step else noun) + _bounds(node)
    if kind == "object":
        return "an object with the keys " + ", ".join(node.get("properties", {}))
    if kind == "array":
        return f"a list, each item {_allowed(node['items'])}"
    if kind == "string":
        return "a string, not empty" if "minLength" in node else "a string"
    return {"boolean": "true or false", "null": "null"}[kind]


def _bounds(node: dict[str, Any]) -> str:
    low, high = node.get("minimum"), node.get("maximum")
    if low is not None and high is not None:
        return f" from {low} to {high}"
    words = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    parts = [f"{word} {node[limit]}" for limit, word in words.items() if limit in node]
    return " " + " and ".join(parts) if parts else ""


def _spelling_hint(value: Any, node: dict[str, Any]) -> str:
    options = node.get("anyOf", [node])
    choices = [c for option in options for c in option.get("enum", ()) if isinstance(c, str)]
    near = did_you_mean(value, choices) if isinstance(value, str) else None
    return "" if near is None else f"; did you mean {show(near)}?"
