"""pytest plugin (-p peer.deepspeed.plugin): puts the block into every config of ZeRO 1 to 3.

A test that hangs fails; its ranks are ended and the next test runs.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
from typing import Any

import pytest

from peer import notes

KEY = "quantized_comm"


def with_block(param_dict: dict[str, Any], block: dict[str, Any]) -> dict[str, Any]:
    """Return the config with the block, if it enables ZeRO 1 to 3 and has none."""
    zero = param_dict.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if stage not in (1, 2, 3) or KEY in param_dict:
        return param_dict
    notes.note(notes.WORLD, int(os.environ.get("WORLD_SIZE", "1")))
    return {**param_dict, KEY: block}


def insert() -> None:
    """Patch the function by which ds_quant reads a config, so that it finds the block."""
    block = notes.block()
    if block is None:
        return
    from ds_quant.config import schema

    original = schema.parse

    def parse(
        param_dict: dict[str, Any], *, load_codecs: bool = True
    ) -> schema.QuantizedCommConfig | None:
        return original(with_block(param_dict, block), load_codecs=load_codecs)

    schema.parse = parse


def pytest_configure() -> None:
    insert()  # for tests that build an engine or a config in this process
    multiprocessing.set_forkserver_preload(["peer.deepspeed.ranks"])


def pytest_collection_finish() -> None:
    """Replace DeepSpeed's helpers that exit pytest when a test hangs, or wait for hung ranks."""
    if (common := sys.modules.get("unit.common")) is None:
        return
    exec_class = common.DistributedExec
    launch, close = exec_class._launch_procs, exec_class._close_pool

    @functools.wraps(launch)
    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            launch(self, *args, **kwargs)
        except pytest.exit.Exception:
            pytest.fail(f"hung: no end within {self.exec_timeout} s", pytrace=False)

    @functools.wraps(close)
    def closed(self: Any, pool: Any, *args: Any, **kwargs: Any) -> None:
        if sys.exc_info()[0] is None:
            close(self, pool, *args, **kwargs)
        else:
            pool.terminate()

    exec_class._launch_procs = launched
    exec_class._close_pool = closed
