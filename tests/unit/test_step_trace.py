"""``benchmarks/step_trace.py``: bars of a profiler trace, by hop and action."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'ds_quant[bench]'")

import step_trace  # noqa: E402


def event(name: str, start: float, duration: float, phase: str = "X") -> dict[str, object]:
    """A complete event of a Chrome trace; times in microseconds."""
    return {"ph": phase, "name": name, "ts": start, "dur": duration}


def test_ranges_become_bars_by_hop_and_action(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [
        event("ds_quant::wait gradients inter", 9_000, 500),
        event("ds_quant::encode weights intra", 5_000, 1_000),
        event("ds_quant::encode gradients intra", 7_000, 2_000),
        event("aten::mm", 4_000, 3_000),
        event("aten::add", 4_500, 3_000),
        event("aten::mm", 1_000, 3_000, phase="i"),
    ]
    by_lane = step_trace.lanes(step_trace.intervals(events))
    assert list(by_lane) == ["compute", "intra: encode", "inter: wait"]
    assert [(bar.start, bar.duration) for bar in by_lane["intra: encode"]] == [(1, 1), (3, 2)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}), "utf-8")
    step_trace.main([str(path), "--plot", str(tmp_path / "trace.png")])
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    assert "intra: encode              3.0 ms in 2 ranges" in capsys.readouterr().out


def test_a_trace_without_the_plugin_is_refused() -> None:
    with pytest.raises(SystemExit, match="no range of ds_quant"):
        step_trace.intervals([event("aten::mm", 0, 1)])
