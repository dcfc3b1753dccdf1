"""Step times on paper: cost.predict by hand, the grid of scaling.py, SDP4Bit's Table 2."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import published  # noqa: E402
import scaling  # noqa: E402

from ds_quant.policy.cost import Cluster, Volume, predict  # noqa: E402

CLUSTER = Cluster(nodes=4, node_size=2, link=100.0, intra_link=1000.0, flops=6e4)


def test_step_time_adds_links_codec_and_latency() -> None:
    cluster = dataclasses.replace(CLUSTER, encode=500.0, latency=0.25)
    volume = Volume(inter=6.0, intra=4.0, encoded=3.0, collectives=8)
    time = predict(volume, cluster, numel=1000, tokens=100)
    # 3/4 of 6000 B at 100 B/s, half of 4000 B at 1000 B/s, 3000 parameters at 500/s, 8 collectives.
    assert time.communication == pytest.approx(45 + 2 + 6 + 2)
    assert time.compute == pytest.approx(6 * 1000 * 100 / 6e4)
    assert (time.no_overlap, time.full_overlap) == pytest.approx((65, 55))


def test_one_node_uses_the_link_inside_only() -> None:
    cluster = dataclasses.replace(CLUSTER, nodes=1)
    time = predict(Volume(inter=6.0), cluster, numel=1000, tokens=1)
    assert time.communication == pytest.approx(3.0)  # half of 6000 B at 1000 B/s


@pytest.mark.parametrize("field", ["nodes", "link", "flops", "encode"])
def test_impossible_cluster_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}=0: allowed: above 0"):
        dataclasses.replace(CLUSTER, **{field: 0})


def test_slow_link_gives_the_ratio_of_bytes_and_fast_one_none(tmp_path: Path) -> None:
    path = tmp_path / "scaling.json"
    argv = ["--models", "1.3B", "--schemes", "full_precision", "sdp4bit", "--stages", "3",
            "--ranks", "8", "16", "--node-sizes", "8", "--rates", "0.001", "1e6", "--latency", "0",
            "--json", str(path), "--plot", str(tmp_path / "scaling.png")]  # fmt: skip
    assert scaling.main(argv) == 0
    result = json.loads(path.read_text("utf-8"))
    rows = [row for row in result["rows"] if (row["scheme"], row["ranks"]) == ("sdp4bit", 16)]
    slow, fast = rows
    assert slow["speedup_no_overlap"] == pytest.approx(6.0 / slow["inter_bytes"], rel=0.01)
    assert fast["speedup_full_overlap"] == 1.0
    assert [row["ranks"] for row in result["rows"]].count(8) == 2  # one node has no rate to vary
    assert path.with_suffix(".md").read_text("utf-8").startswith("# Predicted for larger clusters")
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


def test_no_possible_topology_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert scaling.main(["--ranks", "2", "--node-sizes", "4"]) == 1
    assert "multiple of a node size" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--rates", "--ranks", "--tflops"])
@pytest.mark.parametrize("value", ["0", "-1", "x"])
def test_wrong_numbers_are_refused(flag: str, value: str) -> None:
    with pytest.raises(SystemExit):
        scaling.parse_args([flag, value])


def test_published_rows_have_the_step_times_and_link_rates_derived_from_them() -> None:
    """0.77 s (1.3B, A100) and 2.06 s (18B, H800); 442 Gb/s before the share of one node in 16."""
    by_row = {(entry.cluster, entry.model): entry for entry in published.ENTRIES}
    assert by_row["A100", "1.3B"].base_seconds == pytest.approx(0.77, abs=0.005)
    large = by_row["H800", "18B"]
    assert large.base_seconds == pytest.approx(2.06, abs=0.005)
    assert large.implied_rate() == pytest.approx(442 * 15 / 16, rel=0.25)


def test_every_published_row_has_a_verdict_and_its_own_rate_reproduces_it() -> None:
    rows = published.compare()
    assert len(rows) == 10 and all("reproduced" in row["verdict"] for row in rows)
    for entry in published.ENTRIES:
        assert entry.predicted(entry.implied_rate()) == pytest.approx(entry.speedup)
