"""Runs test files under one scheme, within time limits.

A test that hangs takes pytest and its ranks with it; the rest is run by a new pytest. May import
block, facts, files, process and the standard library.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peer import facts, process
from peer.block import append
from peer.files import LEFT_OUT
from peer.process import Setting, SuiteError

PATIENCE = 5.0  # seconds in which processes may end by themselves after pytest has
_TIME_IS_UP = "not ended at the time limit of its file"


@dataclass(frozen=True, kw_only=True)
class Runner:
    """One scheme; `events` is the file of its facts, `stop` ends everything when it is set."""

    setting: Setting
    events: Path
    stop: threading.Event
    begin: float = field(default_factory=time.time)

    def run(self, files: Sequence[str]) -> None:
        """Run files of the tree's tests/unit in as few pytest processes as possible; tests that
        have an "end" already are not run again. Ends that nobody else could write are added.

        Raises:
            SuiteError: `stop` was set.
        """
        while left := _unfinished(files, self._facts()):
            before = len(facts.ended(self._facts()))
            why = self._run_pytest(left)
            found = self._facts()
            for test in sorted(facts.started(found) - facts.ended(found)):
                append(self.events, "end", test=test, outcome="failed", error=why)
            if why == _TIME_IS_UP:
                append(self.events, "given_up", file=facts.current_file(found))
            elif len(facts.ended(self._facts())) == before:
                break

    def _facts(self) -> facts.Facts:
        return facts.read(self.events)

    def _run_pytest(self, files: Sequence[str]) -> str:
        """Says why a test that has not ended has not."""
        with tempfile.TemporaryDirectory() as scratch:
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            command += ["-p", "peer.hooks", f"--basetemp={scratch}/pytest"]
            command += ["-k", self.setting.keyword] if self.setting.keyword else []
            command += [f"--deselect=unit/{test}" for test in LEFT_OUT]
            command += [f"unit/{file}" for file in files]
            with self.events.with_suffix(".log").open("ab") as output:
                pytest = process.start(command, self.setting, self.events, output)
                try:
                    why = self._watch(pytest)
                finally:
                    by_itself = pytest.poll() is not None
                    patience = PATIENCE if by_itself else 0
                    killed = process.end_session(pytest.pid, patience=patience)
                    pytest.wait()
            if by_itself and killed:
                append(self.events, "left_behind", processes=killed)
        return why

    def _watch(self, pytest: subprocess.Popen[bytes]) -> str:
        """Until pytest ends or a time limit; says which."""
        start = time.time()
        while pytest.poll() is None:
            if self.stop.is_set():
                raise SuiteError("ended from outside")
            found, now = self._facts(), time.time()
            file = facts.current_file(found)
            running = facts.started(found) - facts.ended(found)
            in_file = now - max(self.begin, facts.begin_of(file, found))
            if running and in_file > self.setting.file_limit:
                return _TIME_IS_UP
            if now - max(start, self.events.stat().st_mtime) > self.setting.test_limit:
                return f"hung: no news within {self.setting.test_limit:g} s"
            time.sleep(process.POLL_SECONDS)
        return f"pytest ended in it with exit code {pytest.returncode}"


def _unfinished(files: Sequence[str], found: facts.Facts) -> list[str]:
    """Files that have not been collected yet, or have tests to run and time left."""
    known, missing = facts.collected(found), facts.collected(found) - facts.ended(found)
    settled = {facts.file_of(test) for test in known} - {facts.file_of(test) for test in missing}
    settled |= {fact["file"] for fact in found if fact["event"] in ("given_up", "unreadable")}
    return [file for file in files if file not in settled]
