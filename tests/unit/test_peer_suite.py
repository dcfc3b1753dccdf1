"""benchmarks/peer_suite.py: its parts, a small tree that hangs on purpose, the committed result."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import peer_suite  # noqa: E402
from peer import plugin  # noqa: E402
from peer_suite import EXPLAINED, PLAIN, Ended  # noqa: E402

BLOCK = {"scheme": "qsdp", "min_numel": 0}
REFUSAL = "quantized_comm cannot be used with something"


# ---- the block ----


def test_configs_that_enable_zero_get_the_block(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(plugin.NOTES, str(tmp_path / "notes"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for stage in (1, 2, 3):
        given = {"zero_optimization": {"stage": stage}}
        assert plugin.with_block(given, BLOCK) == {**given, "quantized_comm": BLOCK}
    assert plugin.noted("world") == [2, 2, 2] and plugin.noted("rank_error") == []
    own = {"zero_optimization": {"stage": 3}, "quantized_comm": {"scheme": "zeropp"}}
    for config in ({}, {"zero_optimization": {}}, {"zero_optimization": {"stage": 0}}, own):
        assert plugin.with_block(config, BLOCK) is config


# ---- differences ----


def test_differences_are_tests_that_pass_only_without_the_plugin(monkeypatch, tmp_path) -> None:
    known = [{"test": "e", "error": "losses", "schemes": ["qsdp"], "why": "8 bits"}]
    (tmp_path / "explained.json").write_text(json.dumps(known))
    monkeypatch.setattr(peer_suite, "EXPLAINED", tmp_path / "explained.json")
    ok, bad = Ended("passed", world=2), Ended("failed", "losses differ")
    plain = {n: ok for n in ("same", "explained", "surprise", "refused", "hung")} | {"broken": bad}
    active = {
        "same": ok, "explained": bad, "surprise": Ended("failed", "crash", 1),
        "refused": Ended("refused", REFUSAL, 2), "broken": bad,
    }  # fmt: skip
    result = peer_suite.content({"f.py": {PLAIN: plain, "qsdp": active}}, ["qsdp"])
    assert {row["test"]: row["why"] for row in result["differences"]} == {
        "explained": "8 bits", "surprise": None, "refused": "refused by the plugin", "hung": None,
    }  # fmt: skip
    assert result["broken"] == [{"test": "broken", "error": "losses differ"}]
    assert peer_suite.totals(result)["qsdp"] == {
        "collected": 6, "passed": 1, "failed": 3, "refused": 1, "skipped": 0, "not_run": 1,
        "with_plugin": 3, "communicating": 2,
    }  # fmt: skip


# ---- running ----

TREE = {
    "tests/conftest.py": """
import pytest
def pytest_runtest_call(item):
    if item.cls is not None:
        item.runtest = lambda: item.cls()(item._request)
""",
    "tests/pytest.ini": "[pytest]\n",
    "tests/unit/__init__.py": "",
    "tests/unit/zero/__init__.py": "",
    "tests/unit/common.py": """
import os, subprocess, sys, time
import pytest
from peer import plugin

class Pool:
    def terminate(self): self.process.kill()

class DistributedExec:
    exec_timeout = int(os.environ["DS_UNITTEST_TIMEOUT"])
    def __call__(self, request): self._launch_procs(2, "")
    def _launch_procs(self, num_procs, init_method):
        pool = Pool()
        pool.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(599)"])
        plugin.note("world", num_procs)
        try:
            self.run()
        finally:
            self._close_pool(pool, num_procs)
    def _close_pool(self, pool, num_procs, force=False):
        if pool.process.poll() is None and self.hangs:
            time.sleep(599)
        pool.terminate()
""",
    "tests/unit/zero/test_small.py": f"""
import pytest
from peer import plugin
from unit.common import DistributedExec

class TestHangs(DistributedExec):
    __test__, hangs = True, True
    def run(self):
        plugin.note("rank_error", "ValueError: one rank")
        pytest.exit("Test hanged, exiting", returncode=1)
    def test(self): pass

class TestRefused(DistributedExec):
    __test__, hangs = True, False
    def run(self): raise ValueError({REFUSAL!r} + chr(10) + "more")
    def test(self): pass

@pytest.fixture
def late():
    yield
    raise OSError("in its teardown")

def test_passes(): pass
def test_late(late): pass
def test_fails(): assert 1 == 2
@pytest.mark.skip(reason="not here")
def test_is_skipped(): pass
""",
    "tests/unit/zero/test_other.py": "def test_other(): pass",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return tmp_path / "tree"


def arguments(tree: Path, *flags: str) -> Any:
    given = ["--tree", str(tree), "--test-timeout", "10", "--ranks", "2", *flags]
    args = peer_suite.parse_args(given)
    args.work = tree / "work"
    return args


def all_ended_since(before: set[int], seconds: float = 20) -> bool:
    """Whether only ``before`` sleep; the kernel takes a moment to end what was killed."""
    deadline = time.monotonic() + seconds
    while not sleepers() <= before:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def sleepers() -> set[int]:
    found = set()
    for process in psutil.process_iter():
        try:
            found |= {process.pid} if "time.sleep(599)" in " ".join(process.cmdline()) else set()
        except psutil.Error:
            continue
    return found


def test_every_outcome_is_told_apart_and_a_test_that_hangs_is_ended(tree: Path) -> None:
    before = sleepers()
    args = arguments(tree, "--timeout", "100")
    found = peer_suite.run_file("zero/test_small.py", PLAIN, args)
    assert all_ended_since(before)
    assert {
        name.removeprefix("unit/zero/test_small.py::"): test for name, test in found.items()
    } == {
        "TestHangs::test": Ended(
            "failed",
            "Failed: hung: no end within 10 s; before that, on a rank: ValueError: one rank",
            2,
        ),
        "TestRefused::test": Ended("refused", REFUSAL, 2),
        "test_passes": Ended("passed"),
        "test_late": Ended("failed", 'failed on teardown with "OSError: in its teardown"'),
        "test_fails": Ended("failed", "assert 1 == 2"),
        "test_is_skipped": Ended("skipped", "not here"),
    }
    (tree / "tests" / "unit" / "zero" / "test_small.py").unlink()
    assert peer_suite.run_file("zero/test_small.py", PLAIN, args) == found, "kept in --work"
    other = peer_suite.run_file("zero/test_other.py", PLAIN, args)
    assert other == {"unit/zero/test_other.py::test_other": Ended("passed")}


# ---- the committed result ----


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    path = ROOT / "benchmarks" / "results" / "peer_suite_cpu.json"
    return json.loads(path.read_text("utf-8"))


def test_every_difference_of_the_committed_result_is_explained(committed: dict[str, Any]) -> None:
    assert [row["test"] for row in committed["differences"] if row["why"] is None] == []
    totals = peer_suite.totals(committed)
    assert all(total["not_run"] == 0 for total in totals.values())
    assert totals["full_precision"]["communicating"] > 0
    assert totals["without"]["with_plugin"] == 0


def test_every_explanation_is_needed_and_on_the_page(committed: dict[str, Any]) -> None:
    page = " ".join((ROOT / "docs" / "peer_suite.md").read_text("utf-8").split())
    for entry in json.loads(EXPLAINED.read_text("utf-8")):
        assert re.compile(entry["test"]) and re.compile(entry["error"])
        assert any(row["why"] == entry["why"] for row in committed["differences"]), entry
    for row in committed["differences"]:
        assert f"`{row['test'].rpartition('/')[2]}`" in page, row["test"]
        assert row["why"] in page or row["outcome"] == "refused", row["why"]
    for scheme, total in peer_suite.totals(committed).items():
        cells = " | ".join(str(total[name]) for name in peer_suite.COUNTS)
        assert f"| `{scheme}` | {cells} |" in page
