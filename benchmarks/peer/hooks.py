"""pytest plugin (-p peer.hooks) that writes down which tests ran and how they ended."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from peer import block

block.insert()  # for tests that build an engine or a config without ranks of their own


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> None:
    """DeepSpeed's fixtures that start ranks are classes, which pytest from 8.4 on does not know."""
    if isinstance(collector, pytest.Module):
        with contextlib.suppress(collector.CollectError):  # pytest's own attempt will report it
            for name, value in list(vars(collector.obj).items()):
                if isinstance(value, type) and getattr(value, "is_dist_fixture", False):
                    setattr(collector.obj, name, _as_fixture(value))


def _as_fixture(starts_ranks: type) -> object:
    def make() -> object:
        return starts_ranks()

    make.is_dist_fixture = True  # DeepSpeed's conftest then calls what it returns
    return pytest.fixture(name=starts_ranks.__name__)(make)


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
