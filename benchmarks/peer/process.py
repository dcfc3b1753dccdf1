"""Processes of the peer suite: their environment, their sessions, and the end of all of them.

May import block, the standard library and psutil, which DeepSpeed needs too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from peer import block

POLL_SECONDS = 0.5
BENCHMARKS = Path(__file__).resolve().parents[1]


class SuiteError(Exception):
    """The suite cannot run at all; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all runs of one scheme share."""

    tree: Path  # of the DeepSpeed sources
    block: Mapping[str, Any] | None  # None: without the plugin
    ranks: int  # tests that need more are skipped by DeepSpeed
    file_limit: float  # seconds
    test_limit: float  # seconds without any news from a test
    keyword: str | None  # pytest's -k

    def environment(self, events: Path) -> dict[str, str]:
        paths = [str(BENCHMARKS), str(BENCHMARKS.parent), str(self.tree / "tests")]
        paths += [path for path in [os.environ.get("PYTHONPATH")] if path]
        changes = {
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",  # the sources are not ours
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",  # several ranks share the cores
            "LOCAL_SIZE": str(self.ranks),  # what DeepSpeed takes for the number of accelerators
            "DS_QUANT_DISABLE": "1" if self.block is None else "0",
            block.BLOCK: "" if self.block is None else json.dumps(self.block),
            block.EVENTS: str(events),
        }
        return {**os.environ, **changes}


def check_start(setting: Setting, limit: float) -> None:
    """Compile DeepSpeed's CPU operators and import what the ranks need.

    The fork server would be silent about an import that fails, and a test would not wait for a
    compiler.

    Raises:
        SuiteError: with the end of what was printed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        events, log = Path(scratch, "events"), Path(scratch, "log")
        code = _in_session([sys.executable, "-c", "import peer.ranks"], setting, events, log, limit)
        if code != 0:
            tail = "\n".join(log.read_text("utf-8", "replace").splitlines()[-15:])
            how = f"no end within {limit:g} s" if code is None else f"exit code {code}"
            raise SuiteError(
                f"DeepSpeed's CPU operators and test helpers cannot be loaded ({how}; a file "
                f"'lock' that an interrupted build left in torch's extensions folder also makes "
                f"it wait for ever):\n{tail}"
            )


def _in_session(
    command: Sequence[str], setting: Setting, events: Path, log: Path, limit: float
) -> int | None:
    """Exit code of a command, or None at the time limit."""
    with log.open("ab") as output:
        process = start(command, setting, events, output)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_session(process.pid, patience=0)


def start(
    command: Sequence[str], setting: Setting, events: Path, output: Any
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        cwd=setting.tree / "tests",
        env=setting.environment(events),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def end_session(session: int, *, patience: float) -> int:
    """Kill what is left of a session after `patience` seconds; the number of those processes."""
    deadline = time.monotonic() + patience
    while (left := _members(session)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return len(left)


def _members(session: int) -> list[int]:
    """Processes of a session that are still running."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
        except (ProcessLookupError, PermissionError, psutil.Error):
            continue
    return members
