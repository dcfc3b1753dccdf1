"""pytest plugin (-p peer.hooks) that writes down which tests ran and how they ended."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from peer import block

block.insert()  # for tests that build an engine or a config without ranks of their own


def pytest_configure() -> None:
    multiprocessing.set_forkserver_preload(["peer.ranks"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A run that is started again because a test hung goes on behind that test."""
    lines = Path(os.environ[block.EVENTS]).read_text("utf-8").splitlines()
    facts = [json.loads(line) for line in lines]
    started = {fact["test"] for fact in facts if fact["event"] == "start"}
    items[:] = [item for item in items if item.nodeid not in started]
    block.note("collected", tests=[item.nodeid for item in items])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        last = str(report.longrepr).strip().splitlines()[-1]
        block.note("unreadable", error=block.on_one_line(last.removeprefix("E ")))


def pytest_runtest_logstart(nodeid: str) -> None:
    block.note("start", test=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    error = "" if report.passed else _error(report.longrepr)
    block.note("end", test=report.nodeid, outcome=report.outcome, error=block.on_one_line(error))


def _error(longrepr: object) -> str:
    if isinstance(longrepr, tuple):  # of a skipped test: path, line, reason
        return str(longrepr[2])
    crash = getattr(longrepr, "reprcrash", None)
    return str(longrepr) if crash is None else crash.message
