"""Try chosen tests on one mutant, in a process forked from one that has torch and DeepSpeed.

Importing both takes longer than most tests do, so it happens once; the package and the tests are
imported in the forked process, after the mutant has been written.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, util
from pathlib import Path

import pytest

SECONDS_MORE = 60  # on top of
TIMES_LONGER = 3  # than without a mutant: a trial that takes longer has no end
FAILED = "failed_test"
RUNNING = "running_test"
OUTPUT = "output.txt"
BROKEN = 70  # exit status of a trial whose tests did not run
IMPORTED = (
    "pytest",
    "pydantic",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.module_inject.auto_ep_layer",
    "functorch.compile",
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A mutant to try. file: below the checkout; code: its text with the mutant.

    tests: ids, in the order to run them; seconds: what they take without a mutant.
    """

    number: int
    file: str
    code: str
    tests: Sequence[str]
    seconds: float

    @property
    def limit(self) -> float:
        return SECONDS_MORE + TIMES_LONGER * self.seconds


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a trial. by: the test that failed, or how the process ended. failed: whether
    a test did; a process may also end itself or have no end.
    """

    killed: bool
    by: str
    seconds: float
    failed: bool


def import_once() -> None:
    """Import what every trial needs, without the package: torch would import it for DeepSpeed."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    for name in IMPORTED:
        importlib.import_module(name)
    del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
    assert "ds_quant" not in sys.modules, "the package must come from the mutant's copy"


def verdicts(trials: Sequence[Trial], folders: Sequence[Path]) -> Iterator[tuple[Trial, Verdict]]:
    """Try every mutant in one of ``folders``, copies of the checkout, as many at once as there are.

    Yield trials as they end. Where no test has failed and the process has not ended well, it is
    tried once more: it may have been an accident of a loaded machine.
    """
    waiting, free, again = list(trials), list(folders), set[int]()
    running: dict[int, tuple[Trial, Path, bytes, float]] = {}
    while waiting or running:
        while waiting and free:
            trial, folder = waiting.pop(0), free.pop()
            original = _write(folder, trial)
            running[_fork(trial, folder)] = trial, folder, original, time.monotonic()
        for process, (trial, folder, original, start) in list(running.items()):
            seconds = time.monotonic() - start
            ended, status = os.waitpid(process, os.WNOHANG)
            if not ended and seconds < trial.limit:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)  # with what it started
            if not ended:
                os.waitpid(process, 0)
            _restore(folder, trial, original)
            del running[process]
            free.append(folder)
            verdict = _verdict(folder, status if ended else None, seconds)
            if verdict.killed and not verdict.failed and trial.number not in again:
                again.add(trial.number)
                waiting.insert(0, trial)
                continue
            yield trial, verdict
        time.sleep(0.05)


def _write(folder: Path, trial: Trial) -> bytes:
    """Write the mutant into a copy; return the file as it was."""
    path = folder / trial.file
    original = path.read_bytes()
    path.write_text(trial.code, "utf-8")
    for name in (FAILED, RUNNING):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / ".hypothesis", ignore_errors=True)
    return original


def _restore(folder: Path, trial: Trial, original: bytes) -> None:
    """Take a mutant back. An old time of change makes Python compile the next mutant anew."""
    (folder / trial.file).write_bytes(original)
    os.utime(folder / trial.file, (0, 0))


def _verdict(folder: Path, status: int | None, seconds: float) -> Verdict:
    """Read how a trial went; status: of waitpid, None if it did not end."""
    failed, running = folder / FAILED, folder / RUNNING
    test = running.read_text("utf-8") if running.exists() else "no test"
    if status is None:
        return Verdict(killed=True, by=f"no end in {test}", seconds=seconds, failed=False)
    code = os.waitstatus_to_exitcode(status)
    if code == BROKEN:
        raise RuntimeError(f"a trial could not start: see {folder / OUTPUT}")
    if code == pytest.ExitCode.OK:
        return Verdict(killed=False, by="", seconds=seconds, failed=False)
    if failed.exists():
        return Verdict(killed=True, by=failed.read_text("utf-8"), seconds=seconds, failed=True)
    by = f"the process ended with {code} in {test}"
    return Verdict(killed=True, by=by, seconds=seconds, failed=False)


def _fork(trial: Trial, folder: Path) -> int:
    """Start a trial; return its process id."""
    process = os.fork()
    if process:
        return process
    try:
        os.setsid()
        os._exit(_play(trial, folder))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(BROKEN)


# ---- in the forked process ----


class Chosen:
    """A plugin of pytest: run the chosen tests, in their order; write down the first that fails and
    the one that runs.
    """

    def __init__(self, tests: Sequence[str], folder: Path) -> None:
        self.places = {test: place for place, test in enumerate(tests)}
        self.failed, self.running = folder / FAILED, folder / RUNNING

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self.places]
        items[:] = sorted(chosen, key=lambda item: self.places[item.nodeid])

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if any(item.nodeid.startswith("tests/distributed/") for item in session.items):
            forkserver.ensure_running()  # before a test runs autograd

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running.write_text(nodeid, "utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and not self.failed.exists():
            self.failed.write_text(report.nodeid, "utf-8")


def _play(trial: Trial, folder: Path) -> int:
    """Run the tests of a trial; return pytest's exit status."""
    output = os.open(folder / OUTPUT, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    here = str(Path(__file__).resolve().parents[1])
    # A virtual environment may lie in the checkout: only the checkout itself is left out.
    sys.path[:] = [str(folder), *(path for path in sys.path if path != here)]
    sys.argv = ["pytest"]
    main = sys.modules["__main__"]
    main.__spec__ = None  # ranks would import this command
    vars(main).pop("__file__", None)
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    spawn = util.spawnv_passfds
    util.spawnv_passfds = lambda path, args, fds: _fork_server(args, fds) or spawn(path, args, fds)
    files = sorted({test.split("::")[0] for test in trial.tests})
    options = ["-x", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is imported already
    return int(pytest.main([*options, *files], plugins=[Chosen(trial.tests, folder)]))


def _fork_server(args: Sequence[str], passed: Sequence[int]) -> int | None:
    """Fork the server of ranks from this process, which has imported what it needs, instead of a
    new interpreter; return its process id, or None for another program.
    """
    program = args[-1]
    if not program.startswith("from multiprocessing.forkserver import main"):
        return None
    process = os.fork()
    if process:
        return process
    try:
        kept = sorted({0, 1, 2, *passed})
        for first, last in zip(kept, [*kept[1:], 65536], strict=True):
            os.closerange(first + 1, last)
        exec(program, {})
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)
