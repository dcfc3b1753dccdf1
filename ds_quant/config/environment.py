"""The block as a front finds it: given by the program, or in an environment variable."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_quant.config import schema
from ds_quant.config.errors import KEY, ConfigError, did_you_mean, misplaced_block, show
from ds_quant.config.presets import AUTOTUNE, RENAMED, preset_names
from ds_quant.config.schema import QuantizedCommConfig

VARIABLE = "DS_QUANT_BLOCK"
KILL_VARIABLE = "DS_QUANT_KILL_FILE"  # names a file whose existence switches quantization off
_ALLOWED = (
    'a block such as {"scheme": "autotune"}, the path of a file that holds one, or the name of a '
    "preset"
)
CONFIG_WINS = f"{VARIABLE} is set, too: the block in the DeepSpeed config is used"


def is_set() -> bool:
    """Return True if the variable is set and not blank."""
    return bool(os.environ.get(VARIABLE, "").strip())


def is_source(param_dict: dict[str, Any]) -> bool:
    """Return True if the block comes from the variable. A block in the config has priority."""
    return is_set() and KEY not in param_dict


def parse(param_dict: dict[str, Any], *, load_codecs: bool = True) -> QuantizedCommConfig | None:
    """Parse as ``schema.parse`` does, with the variable's block if the config has none.

    Raises:
        ConfigError: also if the variable names no block, see ``read``.
    """
    if not is_source(param_dict):
        return schema.parse(param_dict, load_codecs=load_codecs)
    try:
        block = read(os.environ[VARIABLE])
        return schema.parse({**param_dict, KEY: block}, load_codecs=load_codecs)
    except ConfigError as error:
        problems = [f"{VARIABLE}: {problem}" for problem in error.problems]
        raise ConfigError(*problems) from None


def read(source: str) -> object:
    """Return the block that a text names: a preset, JSON, or the path of a file that holds JSON.

    The JSON may also be a whole DeepSpeed config with a block.

    Raises:
        ConfigError: the text is none of these.
    """
    source = source.strip()
    if not source:
        raise ConfigError(f'block="": allowed: {_ALLOWED}')
    if source in (*preset_names(), *RENAMED, AUTOTUNE):
        return {"scheme": source}
    try:
        text = source if source.startswith("{") else Path(source).read_text("utf-8")
        block = json.loads(text, object_pairs_hook=without_duplicates)
    except ConfigError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        similar = did_you_mean(source, preset_names())
        hint = "" if similar is None else f'did you mean "{similar}"? '
        raise ConfigError(f"{show(source)}: {reason}: {hint}allowed: {_ALLOWED}") from None
    if isinstance(block, dict) and KEY in block:
        if problems := misplaced_block(block, QuantizedCommConfig.model_fields):
            raise ConfigError(*problems)
        return block[KEY]
    return block


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of JSON of its keys and values.

    Raises:
        ConfigError: a key is set twice.
    """
    names = [name for name, _ in pairs]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ConfigError(f"{', '.join(duplicates)}: set twice in one object: leave one out")
    return dict(pairs)


def block_of(
    given: Mapping[str, Any] | str | Path | None, *, load_codecs: bool = True
) -> QuantizedCommConfig | None:
    """Parse the block that ``attach`` was given: an object, a text or file; None: the variable's.

    load_codecs: as of ``schema.parse``.

    Returns:
        None if there is no block or a disabled one, see ``reason_of_no_block``.

    Raises:
        ConfigError
    """
    source: object = given
    origin = ""
    if given is None:
        if not is_set():
            return None
        source = os.environ[VARIABLE]
        origin = f"{VARIABLE}: "
    try:
        if isinstance(source, (str, Path)):
            source = read(str(source))
        if isinstance(source, Mapping):
            source = dict(source)
            if problems := misplaced_block(source, QuantizedCommConfig.model_fields):
                raise ConfigError(*problems)
            source = source.get(KEY, source)
        config = schema.parse_block(source, load_codecs=load_codecs)
    except ConfigError as error:
        if not origin:
            raise
        raise ConfigError(*[origin + problem for problem in error.problems]) from None
    return config if config.enabled else None


def reason_of_no_block(given: object) -> str:
    """Return the reason why ``block_of`` has returned None."""
    if given is None and not is_set():
        return f"no block was given and {VARIABLE} is not set: nothing is quantized"
    return "enabled=false: nothing is quantized"
