"""Error messages for a "quantized_comm" block: which key, its value, what is allowed.

What is allowed is read from the types of the model that checks it, so that both agree.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ds_quant.config.presets import AUTOTUNE

KEY = "quantized_comm"
Location = tuple[str | int, ...]  # ("gradients", "bits"): below the block
Model = type[BaseModel]

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


def explain(error: ValidationError, *, model: Model, block: dict) -> list[str]:
    """Return one sentence per mistake. ``model``: of the block; ``block``: what the user wrote."""
    return [_sentence(e, model, block) for e in error.errors(include_url=False)]


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
        keys = [*_QUANTIZER, *_LEVELS, "codec", "difference"]
        rules.append(("weights", keys, f" with {path_of(('weights', 'lossless'))}=true{by}: {fix}"))
    elif weights.enabled and weights.levels == "uniform":
        fix = f'set {path_of(("weights", "levels"))} to "learned" or leave {{key}} out'
        rules.append(("weights", _LEVELS, f" with uniform levels: {fix}"))
    return [
        f"{path_of((role, key))}={show(block[role][key])}: no effect{why.replace('{key}', key)}"
        for role, keys, why in rules
        for key in keys
        if key in block.get(role, {})
    ]


def allowed_in(model: Model, location: Location) -> str:
    """Describe the values allowed at one place of ``model``; ValueError outside of it."""
    found = _type_at(model, location)
    if found is None:
        raise ValueError(f"{'.'.join(map(str, location))}: no such key")
    return _in_words(found)


def model_in(annotation: Any) -> Model | None:
    """The model that a key holds, perhaps beside null; None if it holds a value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(model_in, get_args(annotation))), None)


def _sentence(error: Mapping[str, Any], model: Model, block: dict) -> str:
    location: Location = error["loc"]
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(location, error["input"], model)
    if kind == "conflict":
        settings = context["settings"].items()
        both = (_setting((*location, key), value, block) for key, value in settings)
        return f"{' conflicts with '.join(both)}: {context['fix']}"
    found = _type_at(model, location)
    if found is None:  # a key that is not a string
        return f"{path_of(location)}: {error['msg']}"
    if kind == "rule":
        allowed, words = context["allowed"], context.get("words", ())
    else:
        allowed, words = _in_words(found), _literals(found)
    near = did_you_mean(error["input"], words) if isinstance(error["input"], str) else None
    hint = "" if near is None else f"; did you mean {show(near)}?"
    return f"{path_of(location)}={show(error['input'])}: allowed: {allowed}{hint}"


def _setting(location: Location, value: Any, block: Any) -> str:
    """path=value, and who set it if that was not the user."""
    for part in location:
        block = block.get(part) if isinstance(block, dict) else None
    return f"{path_of(location)}={show(value)}{'' if block is not None else ' (set by the scheme)'}"


def _unknown_key(location: Location, value: Any, model: Model) -> str:
    path, key = f"{path_of(location)}={show(value)}", str(location[-1])
    if location in _ABSENT:
        return f"{path}: not supported: {_ABSENT[location]}"
    parent = model_in(_type_at(model, location[:-1]))
    here = list(parent.model_fields) if parent else []
    elsewhere = [c for c in _all_locations(model) if c[-1] == key]
    elsewhere = [c for c in elsewhere if len(c) == min(map(len, elsewhere))]
    near = did_you_mean(key, here)
    if elsewhere:
        hint = "; did you mean " + " or ".join(path_of(c) for c in elsewhere) + "?"
    else:
        hint = f"; did you mean {path_of((*location[:-1], near))}?" if near else ""
    return f"{path}: unknown key: allowed: {', '.join(here)}{hint}"


def _all_locations(model: Model, above: Location = ()) -> list[Location]:
    found: list[Location] = []
    for key, field in model.model_fields.items():
        inner = model_in(field.annotation)
        found += [(*above, key), *(_all_locations(inner, (*above, key)) if inner else ())]
    return found


# ---- what a type allows ----


_LIMITS = ("ge", "gt", "le", "lt", "multiple_of", "min_length", "pattern")


def _type_at(model: Model, location: Location) -> Any:
    """The type of one place in the block, with its limits; ``None`` outside the model."""
    found: Any = model
    for part in location:
        if isinstance(part, int):  # of a list, or a key that is no string
            found = next(iter(get_args(get_args(found)[0])), None) if get_args(found) else None
            continue
        inner = model_in(found)
        field = inner.model_fields.get(part) if inner else None
        if field is None:
            return None
        found = Annotated[(field.annotation, *field.metadata, None)]
    return found


def _in_words(kind: Any) -> str:
    """What values of a type are: "a whole number from 2 to 8"."""
    limits: dict[str, Any] = {}
    if get_origin(kind) is Annotated:
        kind, *metadata = get_args(kind)
        limits = _limits(metadata)
    options = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_in_words(option) for option in options)
    if get_origin(kind) is Literal:
        return " or ".join(map(show, options))
    if get_origin(kind) is tuple:
        return f"a list, each item {_in_words(options[0])}"
    if kind is str:
        return f"a string{', not empty' * ('min_length' in limits)}" + (
            " (no NUL bytes)" * ("pattern" in limits)
        )
    if kind in (int, float):
        step = limits.get("multiple_of")
        noun = "a whole number" if kind is int else "a number"
        return (f"a multiple of {step}" if step else noun) + _bounds(limits)
    if model := model_in(kind):
        return "an object with the keys " + ", ".join(model.model_fields)
    return {bool: "true or false", NoneType: "null"}[kind]


def _limits(metadata: Iterable[Any]) -> dict[str, Any]:
    """As ``Field`` calls them."""
    found: dict[str, Any] = {}
    for item in metadata:
        if isinstance(item, FieldInfo):
            found |= _limits(item.metadata)
        found |= {name: getattr(item, name) for name in _LIMITS if hasattr(item, name)}
    return found


def _bounds(limits: Mapping[str, Any]) -> str:
    low, high = limits.get("ge"), limits.get("le")
    if low is not None and high is not None:
        return f" from {low} to {high}"
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    parts = [f"{word} {limits[key]}" for key, word in words.items() if key in limits]
    return " " + " and ".join(parts) if parts else ""


def _literals(kind: Any) -> list[str]:
    """The words that a type may be."""
    if get_origin(kind) is Literal:
        return [word for word in get_args(kind) if isinstance(word, str)]
    return [word for option in get_args(kind) for word in _literals(option)]
