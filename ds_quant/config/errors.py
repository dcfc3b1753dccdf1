"""Error messages for a "quantized_comm" block: which key, its value, what is allowed.

What is allowed is read from the JSON schema of the model that checks it, so that both agree.
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
Places = dict[Location, dict[str, Any]]  # of every key the JSON schema, see places_of

# Keys that somebody will look for and that are missing on purpose.
_ABSENT = {
    ("gradients", key): "learned levels are biased and gradients must stay unbiased, so only "
    f"{KEY}.weights has {key}: leave {key} out here"
    for key in ("levels", "level_steps", "level_rate")
}
# Keys that a codec of the user's own replaces.
_QUANTIZER = ("bits", "group_size", "range", "rounding", "levels")
_LEVELS = ("level_steps", "level_rate")  # of learned levels
QUANTIZED = (*_QUANTIZER, *_LEVELS, "codec", "difference")  # without effect on lossless weights


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


def explain(error: ValidationError, *, places: Places) -> list[str]:
    """Return one sentence per mistake."""
    return [_sentence(e, places) for e in error.errors(include_url=False)]


def conflicts(config: Any, block: dict[str, Any]) -> list[str]:
    """Say which settings of a role contradict each other, whoever made them."""
    found = []
    for role in ("weights", "gradients"):
        settings, written = getattr(config, role), block.get(role, {})
        values = settings.model_dump(mode="json")
        for *keys, fix in settings.conflicts():
            both = (
                f"{path_of((role, key))}={show(values[key])}"
                + " (set by the scheme)" * (key not in written)
                for key in keys
            )
            found.append(f"{' conflicts with '.join(both)}: {fix}")
    return found


def without_effect(config: Any, block: dict[str, Any]) -> list[str]:
    """Find keys the user wrote that a value set by the scheme makes irrelevant."""
    if config.scheme == AUTOTUNE:
        return [
            f"{path_of((key,))}={show(block[key])} conflicts with {path_of(('scheme',))}="
            f'"{AUTOTUNE}", which chooses it: leave {key} out or set scheme to a preset'
            for key in ("weights", "gradients", "node_shard")
            if block.get(key) is not None
        ]
    rules: list[tuple[str, Iterable[str], str]] = []  # role, keys, why they have no effect
    for role in ("weights", "gradients"):
        settings, written = getattr(config, role), block.get(role, {})
        if settings.codec is not None:
            codec = f"{path_of((role, 'codec'))}={show(settings.codec)}"
            rules.append((role, _QUANTIZER, f" with {codec}: leave one of them out"))
        if not settings.enabled and "enabled" not in written:
            off = f"{path_of((role, 'enabled'))}=false (set by scheme {config.scheme})"
            keys = [key for key in written if key != "cross"]  # how often, quantized or not
            rules.append((role, keys, f", {off}: set it to true or choose another scheme"))
    weights = config.weights
    if weights.exactly_differ:
        by = "" if "lossless" in block.get("weights", {}) else f" (set by scheme {config.scheme})"
        fix = "leave {key} out, or set lossless to false"
        rules.append(
            ("weights", QUANTIZED, f" with {path_of(('weights', 'lossless'))}=true{by}: {fix}")
        )
    elif weights.enabled and weights.levels == "uniform":
        fix = f'set {path_of(("weights", "levels"))} to "learned" or leave {{key}} out'
        rules.append(("weights", _LEVELS, f" with uniform levels: {fix}"))
    return [
        f"{path_of((role, key))}={show(block[role][key])}: no effect{why.replace('{key}', key)}"
        for role, keys, why in rules
        for key in keys
        if key in block.get(role, {})
    ]


def _sentence(error: Mapping[str, Any], places: Places) -> str:
    location, value = error["loc"], error["input"]
    if error["type"] == "extra_forbidden":
        return _unknown_key(location, value, places)
    options = _options(location, places)
    if not options:  # a key that is not a string
        return f"{path_of(location)}: {error['msg']}"
    if error["type"] == "rule":
        allowed, words = error["ctx"]["allowed"], error["ctx"]["words"]
    else:
        words = [word for option in options for word in option.get("enum", ())]
        allowed = in_words(options)
    words = [word for word in words if isinstance(word, str)]
    near = isinstance(value, str) and did_you_mean(value, words)
    hint = f"; did you mean {show(near)}?" if near else ""
    return f"{path_of(location)}={show(value)}: allowed: {allowed}{hint}"


def _unknown_key(location: Location, value: Any, places: Places) -> str:
    path, key = f"{path_of(location)}={show(value)}", str(location[-1])
    if location in _ABSENT:
        return f"{path}: not supported: {_ABSENT[location]}"
    here = [place[-1] for place in places if place[:-1] == location[:-1]]
    elsewhere = [place for place in places if place[-1] == key]
    elsewhere = [place for place in elsewhere if len(place) == min(map(len, elsewhere))]
    if not elsewhere and (near := did_you_mean(key, here)):
        elsewhere = [(*location[:-1], near)]
    hint = f"; did you mean {' or '.join(map(path_of, elsewhere))}?" if elsewhere else ""
    return f"{path}: unknown key: allowed: {', '.join(here)}{hint}"


# ---- what a key may be ----


def places_of(schema: dict[str, Any], above: Location = (), *, definitions: Any = None) -> Places:
    """Return every key below a JSON schema of an object; "anyOf" lists what it may be."""
    found, definitions = {}, definitions or schema["$defs"]
    for key, place in schema["properties"].items():
        options = [
            definitions[option["$ref"].rpartition("/")[2]] if "$ref" in option else option
            for option in place.get("anyOf") or place.get("allOf", [place])  # allOf: pydantic 2.8
        ]
        found[(*above, key)] = {**place, "anyOf": options}
        for option in options:
            if "properties" in option:
                found |= places_of(option, (*above, key), definitions=definitions)
    return found


def _options(location: Location, places: Places) -> list[dict[str, Any]]:
    """What a place, perhaps in a list, may be; nothing outside of the block."""
    keys = tuple(part for part in location if isinstance(part, str))
    options = places[keys]["anyOf"] if keys in places else []
    for _ in location[len(keys) :]:
        options = [option["items"] for option in options if "items" in option]
    return options


def in_words(options: Iterable[dict[str, Any]]) -> str:
    """What values of JSON schemas are: "a whole number from 2 to 8 or null"."""
    return " or ".join(map(_in_words, options))


def _in_words(option: dict[str, Any]) -> str:
    if "enum" in option:
        return " or ".join(map(show, option["enum"]))
    kind = option["type"]
    if kind in ("integer", "number"):
        step, noun = option.get("multipleOf"), "whole number" if kind == "integer" else "number"
        return f"a {f'multiple of {step}' if step else noun}{_bounds(option)}"
    if kind == "object":
        return "an object with the keys " + ", ".join(option["properties"])
    if kind == "array":
        return f"a list, each item {_in_words(option['items'])}"
    empty, nul = ", not empty" * ("minLength" in option), " (no NUL bytes)" * ("pattern" in option)
    return {"boolean": "true or false", "null": "null"}.get(kind, f"a string{empty}{nul}")


def _bounds(limits: Mapping[str, Any]) -> str:
    if "minimum" in limits and "maximum" in limits:
        return f" from {limits['minimum']} to {limits['maximum']}"
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most",
             "exclusiveMaximum": "below"}  # fmt: skip
    parts = [f"{word} {limits[key]}" for key, word in words.items() if key in limits]
    return " " + " and ".join(parts) if parts else ""
