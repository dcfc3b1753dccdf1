"""benchmarks/overlap.py and the picture of a step: what needs no lab."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import overlap  # noqa: E402
import timeline  # noqa: E402

from ds_quant.comm.traffic import Meter  # noqa: E402
from ds_quant.comm.transport import Link  # noqa: E402


def blocks(seconds: dict[tuple[str, float], list[float]]) -> list[dict[str, Any]]:
    return [
        {"scheme": scheme, "rate": rate, "block": i, "seconds": s, "foreign_cores": s > 90}
        for (scheme, rate), taken in seconds.items()
        for i, s in enumerate(taken)
    ]


def test_exposed_is_what_a_step_takes_beyond_compute_paired_by_block() -> None:
    measured = blocks({
        ("s", 50.0): [1.5, 1.6, 99.0], ("s waiting", 50.0): [2.0, 3.0, 3.0],
        ("s", 0.0): [1.0, 1.0, 1.0], ("s waiting", 0.0): [1.0, 1.0, 99.0],
    })  # fmt: skip
    (row,) = overlap.summary(measured, max_foreign=0.25)
    assert (row["compute"], row["compute_waiting"], row["clean_blocks"]) == (1, 1, 2)
    assert row["exposed"] == pytest.approx(0.55) and row["exposed_waiting"] == 1.5
    assert row["ratio_min"] == pytest.approx(0.3) and row["ratio_max"] == pytest.approx(0.5)
    assert row["ratio"] == pytest.approx(0.4)


def test_both_engines_of_a_scheme_have_one_config() -> None:
    plan = overlap.plan_of(overlap.parse_args(["--schemes", "qsdp", "--rates", "10", "50"]))
    ours, waiting = plan["schemes"]
    assert ours["config"] == waiting["config"] and waiting["waiting"] and "waiting" not in ours
    assert waiting["label"] == "qsdp waiting" and plan["rates"] == [10, 50, 0]


def test_a_timeline_shows_work_messages_and_waits(tmp_path: Path) -> None:
    link = Link.__new__(Link)
    link._reach, link._traffic = "inter", SimpleNamespace(meter=Meter())
    done: list[str] = []
    work = SimpleNamespace(wait=lambda: done.append("waited"))
    drawn, payload = timeline.Timeline(), torch.zeros(8, dtype=torch.uint8)
    with drawn.messages():
        with drawn.span("forward"):
            exchange = link._posted(payload, payload, work)
        exchange.wait()
    drawn.write(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text("utf-8"))["traceEvents"]
    assert [(e["ph"], e["name"]) for e in events if e["ph"] != "M"] == [
        ("b", "inter 8 B"), ("X", "forward"), ("X", "inter 8 B"), ("e", "inter 8 B"),
    ]  # fmt: skip
    assert done == ["waited"]
