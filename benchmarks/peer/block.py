"""Gives every config of a process that enables ZeRO 1 to 3 the block under test.

Runs in pytest's process and in every rank, so it learns from the environment what to do:
PEER_SUITE_BLOCK is the block as JSON (empty: leave the configs alone), PEER_SUITE_EVENTS the file
to which all processes append one JSON line per fact. May import the standard library and ds_quant.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

BLOCK = "PEER_SUITE_BLOCK"
EVENTS = "PEER_SUITE_EVENTS"
KEY = "quantized_comm"
MAX_ERROR = 400  # characters of an error that are kept


def append(path: str | Path, event: str, **facts: Any) -> None:
    """Append one line; by a single write, because all processes share the file."""
    line = json.dumps({"event": event, **facts}) + "\n"
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)


def note(event: str, **facts: Any) -> None:
    """Append one line to the file that the environment names."""
    append(os.environ[EVENTS], event, **facts)


def on_one_line(text: str) -> str:
    """An error without line breaks and without the place of DeepSpeed's sources."""
    return " ".join(text.replace(f"{Path.cwd()}/", "").split())[:MAX_ERROR]


def with_block(param_dict: dict[str, Any], block: dict[str, Any]) -> dict[str, Any]:
    """The config as somebody who uses the plugin would have written it."""
    zero = param_dict.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if stage not in (1, 2, 3) or KEY in param_dict:
        return param_dict
    note("block", stage=stage, world=int(os.environ.get("WORLD_SIZE", "1")))
    return {**param_dict, KEY: block}


def insert() -> None:
    """Let ds_quant, which reads every config by one function, find the block in it."""
    block = json.loads(os.environ[BLOCK] or "null")
    if block is None:
        return
    from ds_quant.config import (
        schema,  # this also plants the hook that waits for DeepSpeed's engine
    )

    original = schema.parse
    schema.parse = lambda param_dict: original(with_block(param_dict, block))
