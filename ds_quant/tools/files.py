"""Read config files, and name the file or option in the message of a mistake."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ds_quant.config.environment import without_duplicates
from ds_quant.config.errors import ConfigError

# Errors that wrong files and values raise. They are shown in one line; other errors are bugs.
MISTAKES = (OSError, ValueError, RecursionError, OverflowError)
_YAML = re.compile(r"(\s|#[^\n]*\n)*(---|[\w.]+:\s)")


def reason_of(error: BaseException) -> str:
    """Return the message of a mistake, in words where Python's message needs the source code."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, OverflowError):
        return "a number is too large"
    return str(error)


@contextmanager
def about(subject: object) -> Iterator[None]:
    """Turn a mistake into a ValueError that names the file or option."""
    try:
        yield
    except MISTAKES as error:
        reason = getattr(error, "strerror", None) or reason_of(error)
        raise ValueError(f"{subject}: {reason}") from error


def load(path: Path) -> dict[str, Any]:
    """Read a file as DeepSpeed does: JSON with comments, without duplicate keys.

    Raises:
        ConfigError: the file is YAML, holds no object or sets a key twice.
    """
    import hjson

    text = path.read_text("utf-8")
    if _YAML.match(text):
        raise ConfigError(
            "YAML, and DeepSpeed reads JSON: write it in braces; of accelerate's YAML give "
            "the file that deepspeed_config_file names"
        )
    config = hjson.loads(text, object_pairs_hook=without_duplicates)
    if not isinstance(config, dict):
        raise ConfigError("a DeepSpeed config is an object in braces")
    return config


def not_plain_json(path: Path) -> list[str]:
    """Return a sentence if a file that DeepSpeed reads is no plain JSON, else an empty list."""
    try:
        json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        return [
            f"DeepSpeed reads this file, Hugging Face does not: line {error.lineno}: {error.msg}"
        ]
    return []
