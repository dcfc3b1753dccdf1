"""pytest plugin (-p peer.notes): notes of the ranks become properties in the JUnit file.

All processes of a test write to the file PEER_SUITE_NOTES: the number of ranks with the block, the
fronts that were attached, refusals and errors. PEER_SUITE_BLOCK is the block as JSON; empty: none.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

BLOCK = "PEER_SUITE_BLOCK"
NOTES = "PEER_SUITE_NOTES"
RANKS = "PEER_SUITE_RANKS"
TEST = "test"  # pytest's node id; the name in JUnit lacks the file
WORLD = "world"  # ranks with the block
FRONT = "front"  # the start-up line of a front, by its first rank
REFUSAL = "refusal"
RANK_ERROR = "rank_error"


def block() -> dict[str, Any] | None:
    """Return the block of this run, None without the plugin."""
    found: dict[str, Any] | None = json.loads(os.environ.get(BLOCK) or "null")
    return found


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.user_properties.append((TEST, item.nodeid))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    Path(os.environ[NOTES]).unlink(missing_ok=True)
    try:
        return (yield)
    finally:
        item.user_properties.append((WORLD, max(noted(WORLD), default=0)))
        item.user_properties.append((FRONT, len(noted(FRONT))))
        for kind in (REFUSAL, RANK_ERROR):
            for text in noted(kind)[:1]:
                item.user_properties.append((kind, text))
