"""benchmarks/peer_suite.py: differences, the committed result."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import peer_suite
import pytest
from peer.projects import DEEPSPEED, FSDP2, Project
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


def test_another_outcome_or_number_of_fronts_than_in_the_baseline_is_told() -> None:
    before = {"a": {"qsdp": ["passed", 2]}, "b": {"qsdp": ["passed", 1]}}
    now = {"a": {"qsdp": ["passed", 0]}, "b": {"qsdp": ["passed", 1]}, "c": {"qsdp": ["failed", 1]}}
    lines = peer_suite.changed(now, before)
    assert lines == [
        "qsdp: a: ['passed', 0], in the baseline ['passed', 2]",
        "qsdp: c: ['failed', 1], in the baseline None",
    ]
    assert peer_suite.changed(before, before) == []


# ---- what ranks note, and tests of CUDA ----

JUNIT = """<testsuites><testsuite>
<testcase name="trains"><properties><property name="test" value="f.py::trains" />
<property name="world" value="4" /><property name="front" value="2" /></properties></testcase>
<testcase name="refused"><properties><property name="refusal" value="a mesh of 2 ranks" />
<property name="front" value="0" /></properties></testcase>
<testcase name="refused in part"><properties><property name="refusal" value="a mesh of 2 ranks" />
<property name="world" value="4" /><property name="front" value="1" /></properties></testcase>
<testcase name="differs"><properties><property name="rank_error" value="AssertionError: 1 and 2" />
</properties><failure message="Process 1 exited with error code 10 and exception: ..." /></testcase>
</testsuite></testsuites>"""


def test_what_ranks_have_noted_names_fronts_refusals_and_errors(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(JUNIT)
    assert peer_suite.read(tmp_path / "tests.xml") == {
        "f.py::trains": Ended("passed", "", 4, 2),
        "refused": Ended("refused", "a mesh of 2 ranks"),
        "refused in part": Ended("passed", "a mesh of 2 ranks", 4, 1),
        "differs": Ended("failed", "AssertionError: 1 and 2"),
    }


def test_tests_of_fsdp2_name_the_cpu_instead_of_cuda() -> None:
    text = FSDP2.adapted(
        """x.cuda() + torch.randn(4, device="cuda"), f"cuda:{rank}", 'cuda:0', "cudagraph", """
        "TEST_CUDA, replicate(model, device_ids=[self.rank]), p[0].grad.device.index == 1"
    )
    assert text == (
        """x.cpu() + torch.randn(4, device="cpu"), f"cpu", 'cpu', "cudagraph", """
        "TEST_CUDA, replicate(model, device_ids=None), torch.distributed.get_rank() == 1"
    )


# ---- the committed results ----

COMMITTED = {
    "peer_suite_cpu": DEEPSPEED,
    "peer_suite_fsdp2_cpu": FSDP2,
}


def committed(name: str) -> dict[str, Any]:
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text("utf-8"))


@pytest.mark.parametrize("name", COMMITTED)
def test_every_difference_of_the_committed_results_is_explained_on_the_page(name: str) -> None:
    page = " ".join((ROOT / "docs" / "peer_suite.md").read_text("utf-8").split())
    result = committed(name)
    for row in result["differences"]:
        assert row["why"] is not None, row["test"]
        assert f"`{row['test'].rpartition('/')[2]}`" in page, row["test"]
        if row["outcome"] != "refused":
            assert row["why"] in page, row["why"]
    totals = peer_suite.totals(result)
    for scheme, total in totals.items():
        assert total["not_run"] == 0
        cells = " | ".join(str(total[count]) for count in peer_suite.COUNTS)
        assert f"| `{scheme}` | {cells} |" in page
    assert totals["full_precision"]["communicating"] > 0
    assert totals["without"]["with_plugin"] == 0


@pytest.mark.parametrize("project", [DEEPSPEED, FSDP2], ids=lambda project: project.package)
def test_every_explanation_is_needed(project: Project) -> None:
    results = [committed(name) for name, its_project in COMMITTED.items() if its_project is project]
    needed = {row["why"] for result in results for row in result["differences"]}
    for entry in project.explained:
        assert re.compile(entry["test"]) and re.compile(entry["error"])
        assert entry["why"] in needed, entry


@pytest.mark.parametrize("name", [name for name, project in COMMITTED.items() if project is FSDP2])
def test_the_baselines_of_fsdp2_have_the_fronts_of_every_test(name: str) -> None:
    """A new refusal would hide failures."""
    result = committed(name)
    for test, by_scheme in result["tests"].items():
        assert by_scheme.keys() == result["blocks"].keys(), test
        assert by_scheme[PLAIN][1] == 0, test
    fronts = [by_scheme["full_precision"][1] for by_scheme in result["tests"].values()]
    assert sum(count > 0 for count in fronts) >= len(fronts) / 2
