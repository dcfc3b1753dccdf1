"""benchmarks/peer_suite.py: its parts, a small tree that hangs on purpose, the committed result."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import peer_page  # noqa: E402
import peer_suite  # noqa: E402
import results_schema  # noqa: E402
from peer import block, facts, outcomes, process  # noqa: E402
from peer.files import FILES  # noqa: E402
from peer.outcomes import Explanation  # noqa: E402
from peer.process import Setting, SuiteError  # noqa: E402
from peer.results import EXPLAINED  # noqa: E402
from peer.runner import Runner  # noqa: E402

BLOCK = {"scheme": "qsdp", "min_numel": 0}
REFUSAL = "quantized_comm cannot be used with something"


# ---- the block ----


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_configs_that_enable_zero_get_the_block(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(block.EVENTS, str(tmp_path / "events"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = {"zero_optimization": {"stage": stage}}
    assert block.with_block(given, BLOCK) == {**given, "quantized_comm": BLOCK}
    assert "quantized_comm" not in given
    assert facts.read(tmp_path / "events") == [{"event": "block", "stage": stage, "world": 2}]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"zero_optimization": {}},
        {"zero_optimization": {"stage": 0}},
        {"zero_optimization": {"stage": 3}, "quantized_comm": {"scheme": "zeropp"}},
    ],
)
def test_other_configs_stay_as_they_are(config: dict[str, Any]) -> None:
    assert block.with_block(config, BLOCK) is config


# ---- outcomes ----


def facts_of(name: str, *events: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"event": "start", "test": name}, *events]


def end(name: str, outcome: str, error: str = "") -> dict[str, Any]:
    return {"event": "end", "test": name, "outcome": outcome, "error": error}


def test_every_outcome_is_told_apart() -> None:
    names = ["fine", "late", "wrong", "refused", "hung", "absent", "skipped"]
    used = {"event": "block", "stage": 3, "world": 2}
    alone = {"event": "block", "stage": 2, "world": 1}
    found = outcomes.tests(
        [
            {"event": "collected", "tests": names},
            *facts_of("fine", used, end("fine", "passed")),
            *facts_of("late", end("late", "passed"), end("late", "failed", "in its teardown")),
            *facts_of("wrong", alone, end("wrong", "failed", "1 != 2")),
            *facts_of("refused", used, end("refused", "failed", f"ConfigError: {REFUSAL}")),
            *facts_of(
                "hung",
                {"event": "rank_error", "error": "ValueError: one rank"},
                end("hung", "failed", "hung: no news within 9 s"),
            ),
            *facts_of("skipped", end("skipped", "skipped", "Skipped: no fp16")),
        ]
    )
    assert {name: test.outcome for name, test in found.items()} == {
        "fine": "passed", "late": "failed", "wrong": "failed", "refused": "refused",
        "hung": "failed", "absent": "not_run", "skipped": "skipped",
    }  # fmt: skip
    assert found["refused"].error == REFUSAL
    assert found["hung"].error.endswith("on a rank: ValueError: one rank")
    counts = outcomes.counts(found.values())
    assert (counts["failed"], counts["with_plugin"], counts["communicating"]) == (3, 3, 2)
    assert results_schema.PeerCounts(**counts).collected == 7


def test_differences_are_tests_that_pass_only_without_the_plugin() -> None:
    def run(**ends: tuple[str, str]) -> dict[str, outcomes.Test]:
        events = [{"event": "collected", "tests": list(ends)}]
        for name, (outcome, error) in ends.items():
            events += facts_of(name, end(name, outcome, error))
        return outcomes.tests(events)

    ok, bad = ("passed", ""), ("failed", "losses differ")
    plain = run(same=ok, explained=ok, surprise=ok, refused=ok, broken=bad)
    active = run(
        same=ok,
        explained=bad,
        surprise=("failed", "crash"),
        refused=("failed", REFUSAL),
        broken=bad,
    )
    known = [Explanation(test="e", error="losses", schemes=["qsdp"], why="8 bits")]
    rows = outcomes.differences(plain, active, "qsdp", known)
    assert {row["test"]: row["why"] for row in rows} == {
        "explained": "8 bits",
        "surprise": None,
        "refused": "refused by the plugin",
    }
    assert outcomes.broken(plain) == [{"test": "broken", "error": "losses differ"}]


# ---- running ----

TREE = {
    "tests/conftest.py": "",
    "tests/pytest.ini": "[pytest]\n",
    "tests/unit/__init__.py": "",
    "tests/unit/common.py": "",
    "tests/unit/test_small.py": """
import subprocess, sys, time
import pytest

def test_passes(): pass
def test_hangs():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    time.sleep(600)
def test_fails(): assert 1 == 2
@pytest.mark.skip(reason="not here")
def test_is_skipped(): pass
""",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return tmp_path / "tree"


def test_hanging_test_is_ended_with_its_processes_and_the_rest_is_run(
    tree: Path, tmp_path: Path
) -> None:
    setting = Setting(tree=tree, block=None, ranks=2, file_limit=120, test_limit=10, keyword=None)
    events = tmp_path / "events.jsonl"
    block.append(events, "how")
    sleepers = {p.pid for p in psutil.process_iter() if "time.sleep(600)" in _command(p)}
    Runner(setting=setting, events=events, stop=threading.Event()).run(["test_small.py"])
    left = {p.pid for p in psutil.process_iter() if "time.sleep(600)" in _command(p)}
    assert left <= sleepers
    found = outcomes.tests(facts.read(events))
    assert {name.rpartition("::")[2]: test.outcome for name, test in found.items()} == {
        "test_passes": "passed",
        "test_hangs": "failed",
        "test_fails": "failed",
        "test_is_skipped": "skipped",
    }
    errors = [test.error for test in found.values() if test.outcome == "failed"]
    assert errors == ["hung: no news within 10 s", "assert 1 == 2"]


def _command(candidate: psutil.Process) -> str:
    try:
        return " ".join(candidate.cmdline())
    except psutil.Error:
        return ""


def test_time_limit_of_a_file_ends_it(tree: Path, tmp_path: Path) -> None:
    setting = Setting(tree=tree, block=None, ranks=2, file_limit=4, test_limit=60, keyword="hangs")
    events = tmp_path / "events.jsonl"
    block.append(events, "how")
    begin = time.monotonic()
    Runner(setting=setting, events=events, stop=threading.Event()).run(["test_small.py"])
    assert time.monotonic() - begin < 30
    found = facts.read(events)
    assert [fact["file"] for fact in found if fact["event"] == "given_up"] == ["test_small.py"]
    assert "test_passes" not in json.dumps([fact for fact in found if fact["event"] == "end"])


def test_suite_that_is_ended_from_outside_ends_its_processes(tree: Path, tmp_path: Path) -> None:
    setting = Setting(tree=tree, block=None, ranks=2, file_limit=60, test_limit=60, keyword=None)
    events, stop = tmp_path / "events.jsonl", threading.Event()
    block.append(events, "how")
    stop.set()
    with pytest.raises(SuiteError, match="ended from outside"):
        Runner(setting=setting, events=events, stop=stop).run(["test_small.py"])
    assert facts.ended(facts.read(events)) == set()


def test_what_a_failed_start_printed_is_kept(tree: Path) -> None:
    code = "import sys; sys.exit('the operators are missing')"
    setting = Setting(tree=tree, block=None, ranks=2, file_limit=9, test_limit=9, keyword=None)
    events, log = tree / "events", tree / "log"
    assert process._in_session([sys.executable, "-c", code], setting, events, log, 60) == 1
    assert "the operators are missing" in log.read_text("utf-8")


def test_folder_without_tests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match=r"(?s)no tests/conftest.py in .*git clone .* --branch v"):
        peer_suite.find_tree(tmp_path)


def test_unknown_selection_is_refused_with_the_known_files(tree: Path) -> None:
    with pytest.raises(SuiteError, match="(?s)no test file left.*test_zero.py"):
        peer_suite.choose(tree, ["nothing"])


def test_runs_without_plugin_cannot_be_asked_for_as_a_scheme() -> None:
    with pytest.raises(SystemExit):
        peer_suite.parse_args(["--schemes", "without"])


def test_files_are_named_once() -> None:
    assert len(FILES) == len(set(FILES))


# ---- the committed result ----


@pytest.fixture(scope="module")
def committed() -> results_schema.PeerSuite:
    return results_schema.load(peer_page.RESULT)


def test_every_difference_of_the_committed_result_is_explained(
    committed: results_schema.PeerSuite,
) -> None:
    assert [row.test for row in committed.differences if row.why is None] == []
    assert all(total["not_run"] == 0 for total in committed.totals().values())
    totals = committed.totals()
    assert totals["full_precision"]["communicating"] > 0
    assert totals["without"]["with_plugin"] == 0


def test_every_explanation_is_needed(committed: results_schema.PeerSuite) -> None:
    for entry in json.loads(EXPLAINED.read_text("utf-8")):
        assert re.compile(entry["test"]) and re.compile(entry["error"])
        assert any(row.why == entry["why"] for row in committed.differences), entry


def test_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert peer_page.main(["--check"]) == 0, capsys.readouterr().err
