"""The files of facts that block.py and hooks.py write, and what can be read off them.

May import the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Facts = Sequence[Mapping[str, Any]]


def read(events: Path) -> list[dict[str, Any]]:
    """The complete lines of a file of events."""
    if not events.exists():
        return []
    lines = events.read_text("utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def started(facts: Facts) -> set[str]:
    return {fact["test"] for fact in facts if fact["event"] == "start"}


def ended(facts: Facts) -> set[str]:
    return {fact["test"] for fact in facts if fact["event"] == "end"}


def collected(facts: Facts) -> set[str]:
    """Tests that some pytest has found."""
    return {test for fact in facts if fact["event"] == "collected" for test in fact["tests"]}


def file_of(test: str) -> str:
    """The file of a test as it is named in files.py."""
    return test.partition("::")[0].removeprefix("unit/")


def current_file(facts: Facts) -> str:
    """The file of the test that began last."""
    return next((file_of(f["test"]) for f in reversed(facts) if f["event"] == "start"), "")


def begin_of(file: str, facts: Facts) -> float:
    """When the first test of a file began, in seconds since the epoch; 0 if none has."""
    begun = (f["time"] for f in facts if f["event"] == "start" and file_of(f["test"]) == file)
    return next(begun, 0.0)
