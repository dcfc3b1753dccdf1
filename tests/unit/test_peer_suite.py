"""benchmarks/peer_suite.py: differences, the committed result."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import peer_suite
import pytest
from peer.projects import DEEPSPEED
from peer_suite import PLAIN, Ended

ROOT = Path(__file__).resolve().parents[2]
REFUSAL = "quantized_comm cannot be used with something"


# ---- differences ----


def test_differences_are_tests_that_pass_only_without_the_plugin(tmp_path) -> None:
    known = [{"test": "e", "error": "losses", "schemes": ["qsdp"], "why": "8 bits"}]
    (tmp_path / "explained.json").write_text(json.dumps(known))
    project = DEEPSPEED._replace(folder=tmp_path)
    ok, bad = Ended("passed", world=2), Ended("failed", "losses differ")
    plain = {n: ok for n in ("same", "explained", "surprise", "refused", "hung")} | {"broken": bad}
    active = {
        "same": ok, "explained": bad, "surprise": Ended("failed", "crash", 1),
        "refused": Ended("refused", REFUSAL, 2), "broken": bad,
    }  # fmt: skip
    result = peer_suite.content({"f.py": {PLAIN: plain, "qsdp": active}}, ["qsdp"], project)
    assert {row["test"]: row["why"] for row in result["differences"]} == {
        "explained": "8 bits", "surprise": None, "refused": "refused by the plugin", "hung": None,
    }  # fmt: skip
    assert result["broken"] == [{"test": "broken", "error": "losses differ"}]
    assert peer_suite.totals(result)["qsdp"] == {
        "collected": 6, "passed": 1, "failed": 3, "refused": 1, "skipped": 0, "not_run": 1,
        "with_plugin": 3, "communicating": 2,
    }  # fmt: skip


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
    for entry in DEEPSPEED.explained:
        assert re.compile(entry["test"]) and re.compile(entry["error"])
        assert any(row["why"] == entry["why"] for row in committed["differences"]), entry
    for row in committed["differences"]:
        assert f"`{row['test'].rpartition('/')[2]}`" in page, row["test"]
        if row["outcome"] != "refused":
            assert row["why"] in page, row["why"]
    for scheme, total in peer_suite.totals(committed).items():
        cells = " | ".join(str(total[name]) for name in peer_suite.COUNTS)
        assert f"| `{scheme}` | {cells} |" in page
