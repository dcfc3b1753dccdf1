"""pytest plugin (-p peer.plugin): the block in every config that enables ZeRO 1 to 3.

PEER_SUITE_BLOCK is the block as JSON (empty: leave configs alone), PEER_SUITE_NOTES the file in
which all processes note ranks with the block and errors of ranks. A test's largest number of ranks
with the block becomes its property "world" in the JUnit file. A test that hangs fails, its ranks
are ended, and the next one runs.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest

BLOCK, NOTES, KEY = "PEER_SUITE_BLOCK", "PEER_SUITE_NOTES", "quantized_comm"


def note(kind: str, value: Any) -> None:
    """Append a line by a single write, because all processes share the file."""
    handle = os.open(os.environ[NOTES], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(handle, (json.dumps([kind, value]) + "\n").encode())
    os.close(handle)


def noted(kind: str) -> list[Any]:
    """Return what the processes of the current test have noted."""
    path = Path(os.environ[NOTES])
    lines = map(json.loads, path.read_text("utf-8").splitlines()) if path.exists() else ()
    return [value for found, value in lines if found == kind]


def with_block(param_dict: dict[str, Any], block: dict[str, Any]) -> dict[str, Any]:
    """Return the config as somebody who uses the plugin would have written it."""
    zero = param_dict.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if stage not in (1, 2, 3) or KEY in param_dict:
        return param_dict
    note("world", int(os.environ.get("WORLD_SIZE", "1")))
    return {**param_dict, KEY: block}


def insert() -> None:
    """Let ds_quant, which reads every config by one function, find the block in it."""
    block = json.loads(os.environ.get(BLOCK) or "null")
    if block is None:
        return
    from ds_quant.config import schema

    original = schema.parse
    schema.parse = lambda param_dict: original(with_block(param_dict, block))


def pytest_configure() -> None:
    insert()  # for tests that build an engine or a config without ranks of their own
    multiprocessing.set_forkserver_preload(["peer.ranks"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.user_properties.append(("test", item.nodeid))


def pytest_collection_finish() -> None:
    """DeepSpeed's helpers leave pytest when a test hangs, and wait for ranks that never end."""
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

    exec_class._launch_procs, exec_class._close_pool = launched, closed


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    Path(os.environ[NOTES]).unlink(missing_ok=True)
    try:
        return (yield)
    finally:
        item.user_properties += [("world", max(noted("world"), default=0))]
        item.user_properties += [("rank_error", error) for error in noted("rank_error")[:1]]
