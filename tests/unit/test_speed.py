"""benchmarks/speed.py: paired statistics, equal engines, and a point without a lab."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import speed  # noqa: E402


def block(scheme: str, index: int, seconds: float, nbytes: float, foreign: float = 0.0) -> dict:
    return {
        "rate": 100.0, "block": index, "scheme": scheme, "seconds": seconds,
        "interface_bytes": nbytes, "counted_bytes": nbytes, "foreign_cores": foreign, "loss": 2.0,
    }  # fmt: skip


def test_speed_ups_pair_neighbouring_blocks_and_leave_out_disturbed_ones() -> None:
    result = {
        "plan": {"rates": [100.0]},
        "parameters": 100,
        "blocks": [
            block("full_precision", 0, 4.0, 600), block("sdp4bit", 0, 1.0, 100),
            block("full_precision", 1, 6.0, 600), block("sdp4bit", 1, 2.0, 100),
            block("full_precision", 2, 6.0, 600), block("sdp4bit", 2, 6.0, 100, foreign=0.9),
        ],
    }  # fmt: skip
    exact, ours = speed.summary(result, max_foreign=0.25)
    assert (exact["speedup"], exact["bytes_bound"], exact["interface_bytes"]) == (1, 1, 6)
    assert (ours["speedup_min"], ours["speedup"], ours["speedup_max"]) == (3, 3.5, 4)
    assert (ours["seconds"], ours["bytes_bound"], ours["clean_blocks"]) == (1.5, 6, 2)


def test_engines_differ_in_their_block_only() -> None:
    args = speed.parse_args([])
    plain = speed.config_of("deepspeed_plain", 3, 2, args)
    ours = speed.config_of("sdp4bit", 3, 2, args)
    assert ours.pop("quantized_comm")["node_size"] == 2
    assert ours == plain
    keyed = speed.config_of("qsdp:weights.bits=4", 3, 2, args)["quantized_comm"]
    assert keyed["scheme"] == "qsdp" and keyed["weights"] == {"bits": 4}
    hpz = speed.config_of("deepspeed_hpz", 3, 2, args)
    assert hpz["zero_optimization"].pop("zero_hpz_partition_size") == 2
    assert hpz == plain
    assert plain["zero_optimization"]["stage3_max_reuse_distance"] == 0, "released after forward"


TINY = ["--layers", "1", "--width", "64", "--heads", "2", "--seq-len", "16", "--batch", "1"]


@pytest.mark.slow
def test_without_a_lab_one_point_over_loopback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speed, "obstacle", lambda: "needs root")
    flags = ["--stages", "3", "--topologies", "2x1", "--blocks", "1", "--warmup", "1"]
    argv = [*flags, *TINY, "--out", str(tmp_path)]
    argv += ["--schemes", "full_precision", "qsdp", "deepspeed_plain"]
    assert speed.main(argv) == 0
    assert "warning: no network lab: needs root" in " ".join(capsys.readouterr().out.split())
    (point,) = json.loads((tmp_path / "speed.json").read_text("utf-8"))["points"]
    assert [row["scheme"] for row in point["rows"]] == ["full_precision", "qsdp"]
    exact, ours = point["rows"]
    assert exact["rate"] == 0 and ours["interface_bytes"] == ours["counted_bytes"]
    assert 1.7 < ours["bytes_bound"] < 2
    assert "| not shaped | " in (tmp_path / "speed.md").read_text("utf-8")
