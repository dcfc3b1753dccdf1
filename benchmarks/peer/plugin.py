"""pytest plugin (-p peer.plugin): puts the block into every config that enables ZeRO 1 to 3.

PEER_SUITE_BLOCK is the block as JSON; empty: configs stay as they are. All processes write the
number of ranks with the block and the errors of ranks to the file PEER_SUITE_NOTES. The largest
number of a test becomes its property "world" in the JUnit file. A test that hangs fails; its ranks
are ended and the next test runs.
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
    """Append a line with a single write, because all processes share the file."""
    handle = os.open(os.environ[NOTES], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(handle, (json.dumps([kind, value]) + "\n").encode())
    os.close(handle)


def noted(kind: str) -> list[Any]:
    """Return what the processes of the current test have noted."""
    path = Path(os.environ[NOTES])
    if not path.exists():
        return []
    notes = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [value for note_kind, value in notes if note_kind == kind]


def with_block(param_dict: dict[str, Any], block: dict[str, Any]) -> dict[str, Any]:
    """Return the config with the block, if it enables ZeRO 1 to 3 and has none."""
    zero = param_dict.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if stage not in (1, 2, 3) or KEY in param_dict:
        return param_dict
    note("world", int(os.environ.get("WORLD_SIZE", "1")))
    return {**param_dict, KEY: block}


def insert() -> None:
    """Patch the function by which ds_quant reads a config, so that it finds the block."""
    block = json.loads(os.environ.get(BLOCK) or "null")
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
    multiprocessing.set_forkserver_preload(["peer.ranks"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.user_properties.append(("test", item.nodeid))


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


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    Path(os.environ[NOTES]).unlink(missing_ok=True)
    try:
        return (yield)
    finally:
        item.user_properties.append(("world", max(noted("world"), default=0)))
        for error in noted("rank_error")[:1]:
            item.user_properties.append(("rank_error", error))
