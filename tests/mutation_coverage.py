"""Note which lines every test runs: a plugin of pytest, for ``mutation_sample``.

    TEST_COVERAGE=FOLDER python -m pytest -p tests.mutation_coverage

What the ranks and the commands of a test run counts as run by the test. The folder gets files of
coverage.py, with the id of a test as context, and ``seconds.json``, how long each test took.
"""

from __future__ import annotations

import functools
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import coverage
import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "ds_quant"
VARIABLE = "TEST_COVERAGE"
CONTEXT = "TEST_COVERAGE_CONTEXT"  # of a command
SETTINGS = f"""[run]
source = {PACKAGE}
context = ${{{CONTEXT}-}}
parallel = True
data_file = ${{{VARIABLE}}}/lines
disable_warnings = no-data-collected, module-not-measured, already-imported, module-not-imported
"""


def measurement(context: str | None = None) -> coverage.Coverage:
    """Measure this process; ``context`` is the test it belongs to."""
    settings = str(Path(os.environ[VARIABLE], "settings"))
    return coverage.Coverage(config_file=settings, context=context)


def play_rank(test: str, sender: Connection, *arguments: Any) -> None:
    """Run a rank of ``harness`` and save what it ran before the parent may end it."""
    from tests.distributed import harness

    measured = measurement(test)

    class Sender:
        def send(self, outcome: Any) -> None:
            measured.stop()
            measured.save()
            sender.send(outcome)

        def close(self) -> None:
            sender.close()

    measured.start()
    harness._rank_main(Sender(), *arguments)


class Plugin:
    """Hooks of pytest around every test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seconds = folder, defaultdict[str, float](float)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "settings").write_text(SETTINGS)
        self.measured = measurement()
        self.measured.start()

    def pytest_collection_finish(self) -> None:
        """Start the server of the ranks unmeasured, and every later process measured."""
        from tests.distributed import harness

        self.harness = harness
        harness.preload(__name__)
        forkserver.ensure_running()
        os.environ["COVERAGE_PROCESS_START"] = str(self.folder / "settings")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.measured.switch_context(item.nodeid)
        os.environ[CONTEXT] = item.nodeid
        self.harness._rank_main = functools.partial(play_rank, item.nodeid)
        result = yield
        self.measured.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed:
            self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        self.measured.stop()
        self.measured.save()
        times = self.folder / "seconds.json"
        before = json.loads(times.read_text()) if times.exists() else {}
        times.write_text(json.dumps(before | self.seconds, indent=0))


def pytest_configure(config: pytest.Config) -> None:
    """Measure from here on, before a test imports the package."""
    config.pluginmanager.register(Plugin(Path(os.environ[VARIABLE])))
