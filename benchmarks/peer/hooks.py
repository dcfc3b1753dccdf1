"""pytest plugin (-p peer.hooks) that writes down which tests ran and how they ended."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from peer import block

block.insert()  # for tests that build an engine or a config without ranks of their own


def pytest_configure() -> None:
    multiprocessing.set_forkserver_preload(["peer.ranks"])


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A run that is started again, because a test hung or the suite was ended, goes on."""
    block.note("collected", tests=[item.nodeid for item in items])
    lines = Path(os.environ[block.EVENTS]).read_text("utf-8").splitlines()
    facts = [json.loads(line) for line in lines]
    ended = {fact["test"] for fact in facts if fact["event"] == "end"}
    items[:] = [item for item in items if item.nodeid not in ended]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        last = str(report.longrepr).strip().splitlines()[-1]
        file = report.nodeid.removeprefix("unit/")
        block.note("unreadable", file=file, error=block.on_one_line(last.removeprefix("E ")))


def pytest_runtest_logstart(nodeid: str) -> None:
    block.note("start", test=nodeid, time=time.time())


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
