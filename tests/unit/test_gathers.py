"""How often ZeRO-3 gathers weights: the rule against counts of real engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_quant.policy.model import FetchSettings

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
N = 64 * 64
ALL = 10**9
# (reuse distance, prefetch) in layers -> gathers counted with room for all layers, of a model of 8
# equal layers on DeepSpeed 0.19.8, steps 2 to 5, which are alike.
COUNTED = {
    (0, 0): 2, (0, 1): 1.75, (0, 3): 1, (0, ALL): 1, (1, 0): 1.875, (1, 1): 1.75, (1, 3): 1,
    (1, ALL): 1, (4, 0): 1.75, (4, 1): 1.75, (4, 3): 1, (6, 0): 1.625, (6, 1): 1.625, (6, 3): 1,
    (ALL, 0): 1, (ALL, 1): 1, (ALL, 3): 1, (ALL, ALL): 1,
}  # fmt: skip


@pytest.mark.parametrize(("reuse", "prefetch"), COUNTED)
def test_the_rule_is_close_to_what_was_counted(reuse: int, prefetch: int) -> None:
    """Of so few layers one more or less is an eighth."""
    settings = FetchSettings(
        max_reuse_distance=reuse * N, prefetch_bucket_size=prefetch * N, max_live_parameters=ALL * N
    )
    expected = COUNTED[reuse, prefetch]
    assert expected <= settings.gathers(8 * N, 8) <= expected + 2 / 8


@pytest.mark.parametrize("name", ["speed_2x2_cpu", "speed_hpz_2x2_cpu", "speed_2x1_4x1_cpu"])
def test_the_rule_is_close_to_what_the_network_lab_counted(name: str) -> None:
    """Full precision into a node: 2 bytes per gather and reduction, less what the node has. Blocks
    are gathered whole.
    """
    result = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    ahead = result["arguments"].get("prefetch_bucket_size") or 0
    settings = FetchSettings(max_reuse_distance=0, prefetch_bucket_size=ahead)
    points = [point for point in result["points"] if point["stage"] == 3]
    assert points
    for point in points:
        share = 1 - 1 / int(point["topology"].split("x")[0])
        (counted,) = {r["counted_bytes"] for r in point["rows"] if r["scheme"] == "full_precision"}
        gathers = settings.gathers(point["parameters"], result["arguments"]["layers"])
        assert gathers == pytest.approx(counted / share / 2 - 1, rel=0.1)


def test_by_default_a_small_model_is_gathered_once_and_a_large_one_nearly_twice() -> None:
    assert FetchSettings().gathers(10**8, 10) == 1
    assert FetchSettings().gathers(7 * 10**9, 198) == pytest.approx(2 - 1 / 7)
    assert FetchSettings().gathers(0, 0) == 1
