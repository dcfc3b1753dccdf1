"""Error messages for a "quantized_comm" block: the key, its value, the allowed values, a fix.

Allowed values are read from the JSON schema of the model that checks them, so that both agree.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ds_quant.config.presets import AUTOTUNE

if TYPE_CHECKING:
    from ds_quant.config.schema import QuantizedCommConfig

KEY = "quantized_comm"
Location = tuple[str | int, ...]  # ("gradients", "bits"): below the block
KeySchemas = dict[Location, dict[str, Any]]  # the JSON schema of every key, see key_schemas_of

# Keys users may expect that are deliberately unsupported.
_UNSUPPORTED = {
    ("gradients", key): "learned levels are biased and gradients must stay unbiased, so only "
    f"{KEY}.weights has {key}: leave {key} out here"
    for key in ("levels", "level_steps", "level_rate")
}
# Keys of a block that a config may also have for another program.
_COMMON_KEYS = ("enabled", "seed", "metrics", "backend")
# Keys that the user's own codec replaces.
_CODEC_KEYS = ("bits", "group_size", "range", "rounding", "levels")
# Keys of learned levels.
_LEVEL_KEYS = ("level_steps", "level_rate")
# Keys without effect on lossless weights.
UNUSED_BY_LOSSLESS = (*_CODEC_KEYS, *_LEVEL_KEYS, "codec", "difference")

_SHOWN = 3  # keys of another block that a message names


class ConfigError(ValueError):
    """The "quantized_comm" block is wrong; ``problems`` has one line per mistake."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        if len(problems) == 1:
            super().__init__(problems[0])
        else:
            lines = "".join(f"\n  {problem}" for problem in problems)
            super().__init__(f"{len(problems)} mistakes:{lines}")


class AttachError(ValueError):
    """An argument of ``attach`` that cannot be served: a model, an optimizer, or a second call that
    differs from the first.
    """


def path_of(location: Location) -> str:
    """Format a location: ("weights", "level_steps", 1) as "...weights.level_steps[1]"."""
    path = KEY
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path


def show(value: object) -> str:
    """Format a value as in the JSON file, shortened to 60 characters."""
    text = json.dumps(value, default=repr)
    if len(text) > 60:
        return text[:57] + "..."
    return text


def did_you_mean(word: str, candidates: Iterable[str], *, cutoff: float = 0.55) -> str | None:
    """Return the candidate nearest in spelling, or None if none is near.

    Case is ignored; dashes and blanks count as underscores.
    """
    by_spelling = {candidate.lower(): candidate for candidate in candidates}
    spelling = word.strip().lower().replace("-", "_").replace(" ", "_")
    matches = difflib.get_close_matches(spelling, by_spelling, n=1, cutoff=cutoff)
    return by_spelling[matches[0]] if matches else None


def differences(
    first: Mapping[str, Any], other: Mapping[str, Any], *, of: str, prefix: str = ""
) -> Iterator[str]:
    """Yield the values of ``other`` that differ, as "seed=1 (rank 0: 0)". of: names ``first``."""
    # The scheme first, from which most other differences follow.
    for key in sorted({*first, *other}, key=lambda key: (key != "scheme", key)):
        expected, actual = first.get(key), other.get(key)
        if isinstance(expected, dict) and isinstance(actual, dict):
            yield from differences(expected, actual, of=of, prefix=f"{prefix}{key}.")
        elif expected != actual:
            yield f"{prefix}{key}={show(actual)} ({of}: {show(expected)})"


def another_block(first: QuantizedCommConfig, second: QuantizedCommConfig) -> str | None:
    """Describe the first keys of a block that differ from that of the first call of ``attach``.
    None if they are equal.
    """
    if second == first:
        return None
    found = differences(
        first.resolved(), second.resolved(), of="in the first call", prefix=f"{KEY}."
    )
    return f"with another block: {', '.join(islice(found, _SHOWN))}"


def misplaced_block(param_dict: Mapping[Any, Any], keys_of_block: Container[object]) -> list[str]:
    """Return one sentence per block that is misspelt or not at the top level, and per key of a
    block that stands beside it.

    DeepSpeed would ignore or reject these without naming the block.
    """
    problems = []
    for key, value in param_dict.items():
        if KEY in param_dict and key in keys_of_block and key not in _COMMON_KEYS:
            problems.append(f"{key}={show(value)}: move {key} into {KEY}")
        # 0.75 also catches "quantized_communication"; DeepSpeed's own keys reach 0.6 at most.
        if key != KEY and isinstance(key, str) and did_you_mean(key, [KEY], cutoff=0.75):
            problems.append(f"{key}={show(value)}: unknown key: did you mean {KEY}?")
        if isinstance(value, dict) and key != KEY and KEY in value:
            problems.append(
                f"{key}.{KEY}={show(value[KEY])}: move {KEY} to the top level of the config"
            )
    return problems


def not_an_object(block: object, schemes: Sequence[str]) -> str:
    """Describe a block that is not an object."""
    hint = ""
    if isinstance(block, str):
        scheme = did_you_mean(block, schemes)
        if scheme is not None:
            hint = f'did you mean {{"scheme": "{scheme}"}}? '
    return f'{KEY}={show(block)}: {hint}allowed: an object such as {{"scheme": "autotune"}}'


def auto_values(value: object, location: Location = ()) -> list[str]:
    """Return one sentence per "auto" in the block, at any depth."""
    if isinstance(value, str) and value.strip().lower() == "auto":
        return [
            f'{path_of(location)}="auto": not supported, and Hugging Face accelerate stops at it: '
            "leave the key out to get the scheme's value"
        ]
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    sentences = []
    for key, item in items:
        sentences += auto_values(item, (*location, key))
    return sentences


def explain(error: ValidationError, *, key_schemas: KeySchemas) -> list[str]:
    """Return one sentence per mistake that pydantic found."""
    return [_sentence(mistake, key_schemas) for mistake in error.errors(include_url=False)]


def conflicts(config: QuantizedCommConfig, block: dict[str, Any]) -> list[str]:
    """Return one sentence per two settings of a role that contradict each other.

    block: the block as the user wrote it; other settings are marked as the scheme's.
    """
    scheme = _scheme_in_words(config, block)
    sentences = []
    for role in ("weights", "gradients"):
        settings = getattr(config, role)
        written = block.get(role, {})
        values = settings.model_dump(mode="json")
        for first, second, fix in settings.conflicts():
            # A key of the user comes first.
            keys = sorted((first, second), key=lambda key: key not in written)
            named = []
            for key in keys:
                setting = f"{path_of((role, key))}={show(values[key])}"
                if key not in written:
                    setting += f" (set by {scheme})"
                named.append(setting)
            sentences.append(f"{named[0]} conflicts with {named[1]}: {fix}")
    return sentences


def _scheme_in_words(config: QuantizedCommConfig, block: Mapping[str, Any]) -> str:
    """Name the scheme of a block, which the user may have left out."""
    if "scheme" in block:
        return f"scheme {show(config.scheme)}"
    return f"scheme {show(config.scheme)}, the default"


def without_effect(config: QuantizedCommConfig, block: dict[str, Any]) -> list[str]:
    """Return one sentence per key that the user wrote and another setting makes irrelevant.

    block: the block as the user wrote it.
    """
    if config.scheme == AUTOTUNE:
        return _chosen_by_autotune(block)
    sentences = []
    for role in ("weights", "gradients"):
        written = block.get(role, {})
        for keys, reason in _irrelevant_keys(config, role, written):
            for key in keys:
                if key in written:
                    setting = f"{path_of((role, key))}={show(written[key])}"
                    sentences.append(f"{setting}: no effect{reason.replace('{key}', key)}")
    return sentences


def _chosen_by_autotune(block: dict[str, Any]) -> list[str]:
    """Return one sentence per key of the user that autotune would overwrite."""
    autotune = f'{path_of(("scheme",))}="{AUTOTUNE}"'
    return [
        f"{path_of((key,))}={show(block[key])} conflicts with {autotune}, which chooses it: "
        f"leave {key} out or set scheme to a preset"
        for key in ("weights", "gradients", "node_shard")
        if block.get(key) is not None
    ]


def _irrelevant_keys(
    config: QuantizedCommConfig, role: str, written: Mapping[str, Any]
) -> Iterator[tuple[Iterable[str], str]]:
    """Yield keys of a role without effect, and the words that go on after "no effect".

    "{key}" in these words stands for the key.

    written: the keys of the role as the user wrote them.
    """
    settings = getattr(config, role)
    if settings.codec is not None:
        codec = f"{path_of((role, 'codec'))}={show(settings.codec)}"
        yield (*_CODEC_KEYS, "returned_bits"), f" with {codec}: leave one of them out"
    if not settings.enabled and "enabled" not in written:
        enabled = f"{path_of((role, 'enabled'))}=false (set by scheme {show(config.scheme)})"
        # "cross" also holds for gradients in full precision.
        keys = [key for key in written if key != "cross"]
        yield keys, f", {enabled}: set it to true or choose another scheme"
    if role != "weights":
        return
    if settings.sends_lossless_differences:
        lossless = f"{path_of(('weights', 'lossless'))}=true"
        if "lossless" not in written:
            lossless += f" (set by scheme {show(config.scheme)})"
        yield UNUSED_BY_LOSSLESS, f" with {lossless}: leave {{key}} out, or set lossless to false"
    elif settings.enabled and settings.levels == "uniform":
        levels = path_of(("weights", "levels"))
        yield _LEVEL_KEYS, f' with uniform levels: set {levels} to "learned" or leave {{key}} out'


def _sentence(mistake: Mapping[str, Any], key_schemas: KeySchemas) -> str:
    """Describe a mistake of pydantic's: the key, its value, the allowed values."""
    location = mistake["loc"]
    value = mistake["input"]
    if mistake["type"] == "extra_forbidden":
        return _unknown_key(location, value, key_schemas)
    options = _options(location, key_schemas)
    if not options:  # a key that is not a string
        return f"{path_of(location)}: {mistake['msg']}"
    if mistake["type"] == "rule":
        allowed = mistake["ctx"]["allowed"]
        words = mistake["ctx"]["words"]
    else:
        allowed = in_words(options)
        words = [word for option in options for word in option.get("enum", ())]
    hint = ""
    if isinstance(value, str):
        near = did_you_mean(value, [word for word in words if isinstance(word, str)])
        if near is not None:
            hint = f"did you mean {show(near)}? "
    return f"{path_of(location)}={show(value)}: {hint}allowed: {allowed}"


def _unknown_key(location: Location, value: object, key_schemas: KeySchemas) -> str:
    """Describe an unknown key: the one that was meant, and the keys allowed beside it."""
    setting = f"{path_of(location)}={show(value)}"
    if location in _UNSUPPORTED:
        return f"{setting}: not supported: {_UNSUPPORTED[location]}"
    *parent, key = location
    siblings = [str(known[-1]) for known in key_schemas if [*known[:-1]] == parent]
    meant = [known for known in key_schemas if known[-1] == key]
    if meant:
        depth = min(len(known) for known in meant)
        meant = [known for known in meant if len(known) == depth]
    else:
        near = did_you_mean(str(key), siblings)
        if near is not None:
            meant = [(*parent, near)]
    hint = ""
    if meant:
        hint = f"did you mean {' or '.join(map(path_of, meant))}? "
    return f"{setting}: unknown key: {hint}allowed: {', '.join(siblings)}"


# ---- allowed values of a key ----


def key_schemas_of(
    schema: dict[str, Any], parent: Location = (), *, definitions: dict[str, Any] | None = None
) -> KeySchemas:
    """Return the JSON schema of every key below an object; "anyOf" lists its alternatives.

    definitions: the schemas that "$ref" names; by default those of ``schema``.
    """
    if definitions is None:
        definitions = schema["$defs"]
    key_schemas: KeySchemas = {}
    for key, key_schema in schema["properties"].items():
        # pydantic 2.8 writes "allOf" around a reference.
        written = key_schema.get("anyOf") or key_schema.get("allOf", [key_schema])
        options = []
        for option in written:
            if "$ref" in option:
                option = definitions[option["$ref"].rpartition("/")[2]]
            options.append(option)
        location = (*parent, key)
        key_schemas[location] = {**key_schema, "anyOf": options}
        for option in options:
            if "properties" in option:
                key_schemas |= key_schemas_of(option, location, definitions=definitions)
    return key_schemas


def _options(location: Location, key_schemas: KeySchemas) -> list[dict[str, Any]]:
    """Return JSON-schema options of a key or list item; empty outside the block."""
    keys = tuple(part for part in location if isinstance(part, str))
    if keys not in key_schemas:
        return []
    options = key_schemas[keys]["anyOf"]
    for _ in location[len(keys) :]:
        options = [option["items"] for option in options if "items" in option]
    return options


def in_words(options: Iterable[dict[str, Any]]) -> str:
    """Describe values of JSON schemas: "a whole number from 2 to 8 or null"."""
    return " or ".join(map(_in_words, options))


def _in_words(option: dict[str, Any]) -> str:
    if "enum" in option:
        return " or ".join(map(show, option["enum"]))
    kind = option["type"]
    if kind in ("integer", "number"):
        return f"a {_number(option)}{_bounds(option)}"
    if kind == "object":
        return "an object with the keys " + ", ".join(option["properties"])
    if kind == "array":
        return f"a list, each item {_in_words(option['items'])}"
    if kind == "boolean":
        return "true or false"
    if kind == "null":
        return "null"
    words = "a string"
    if "minLength" in option:
        words += ", not empty"
    if "pattern" in option:
        words += " (no NUL bytes)"
    return words


def _number(option: Mapping[str, Any]) -> str:
    if "multipleOf" in option:
        return f"multiple of {option['multipleOf']}"
    return "whole number" if option["type"] == "integer" else "number"


def _bounds(limits: Mapping[str, Any]) -> str:
    if "minimum" in limits and "maximum" in limits:
        return f" from {limits['minimum']} to {limits['maximum']}"
    words = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    parts = [f"{word} {limits[key]}" for key, word in words.items() if key in limits]
    return " " + " and ".join(parts) if parts else ""
