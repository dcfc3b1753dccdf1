"""A block in the environment, for DeepSpeed configs that a framework writes and nobody can edit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ds_quant.config import schema
from ds_quant.config.errors import KEY, ConfigError, show
from ds_quant.config.schema import QuantizedCommConfig

VARIABLE = "DS_QUANT_BLOCK"
CONFIG_WINS = f"{VARIABLE} is set, too: the block in the DeepSpeed config is used"


def is_set() -> bool:
    """Whether the variable holds something."""
    return bool(os.environ.get(VARIABLE, "").strip())


def is_source(param_dict: dict[str, Any]) -> bool:
    """Whether the block comes from the variable: one in the config wins."""
    return is_set() and KEY not in param_dict


def parse(param_dict: dict[str, Any], *, load_codecs: bool = True) -> QuantizedCommConfig | None:
    """As ``schema.parse``, with the variable's block where the config has none.

    Raises ``ConfigError``, also for a variable that holds no JSON and names no file.
    """
    if not is_source(param_dict):
        return schema.parse(param_dict, load_codecs=load_codecs)
    try:
        return schema.parse({**param_dict, KEY: _read()}, load_codecs=load_codecs)
    except ConfigError as error:
        raise ConfigError(*(f"{VARIABLE}: {problem}" for problem in error.problems)) from None


def _read() -> Any:
    """JSON text, or the file that it names."""
    value = text = os.environ[VARIABLE].strip()
    try:
        if not value.startswith("{"):
            text = Path(value).read_text("utf-8")
        block = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f'{show(value)}: {why}: allowed: a block such as {{"scheme": "qsdp"}}, or the path of '
            "a file that holds one"
        ) from None
    return block[KEY] if isinstance(block, dict) and KEY in block else block
