"""How often ZeRO-3 gathers weights: against counts of a real engine, and DeepSpeed's rules."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from torch import nn

from ds_quant.policy.gathers import FetchSettings, Module, Unit, mean_gathers, most_live

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
N = 64 * 64
ALL = 10**9
# (reuse distance, prefetch) in layers -> gathers counted with room for 0, 4 and all layers, of a
# model of 8 equal layers on DeepSpeed 0.19.8, steps 2 to 5, which are alike.
COUNTED = {
    (0, 0): (2, 2, 2), (0, 1): (2, 1.75, 1.75), (0, 3): (2, 1.625, 1), (0, ALL): (2, 1.625, 1),
    (1, 0): (1.875, 1.875, 1.875), (1, 1): (1.875, 1.75, 1.75), (1, 3): (1.875, 1.625, 1),
    (1, ALL): (1.875, 1.625, 1),
    (4, 0): (1.75, 1.75, 1.75), (4, 1): (1.75, 1.75, 1.75), (4, 3): (1.75, 1.625, 1),
    (6, 0): (1.625, 1.625, 1.625), (6, 1): (1.625, 1.625, 1.625), (6, 3): (1.625, 1.625, 1),
    (ALL, 0): (1, 1, 1), (ALL, 1): (1, 1, 1), (ALL, 3): (1, 1, 1), (ALL, ALL): (1, 1, 1),
}  # fmt: skip


def layers(count: int, numel: int = N) -> Module:
    """A module that holds an nn.Sequential of layers, as the one that was counted."""
    return Module((), (stack(*((index, numel) for index in range(count))),))


def stack(*units: tuple) -> Module:
    """One layer per parameter."""
    return Module((), tuple(Module((Unit(*unit),)) for unit in units))


@pytest.mark.parametrize(("reuse", "prefetch"), COUNTED)
def test_gathers_are_those_that_were_counted(reuse: int, prefetch: int) -> None:
    for room, expected in zip((0, 4, ALL), COUNTED[reuse, prefetch], strict=True):
        settings = FetchSettings(
            max_reuse_distance=reuse * N,
            prefetch_bucket_size=prefetch * N,
            max_live_parameters=room * N,
        )
        assert mean_gathers(layers(8), settings) == expected, room


@pytest.mark.parametrize("name", ["speed_2x2_cpu", "speed_hpz_2x2_cpu", "speed_2x1_4x1_cpu"])
def test_the_bytes_that_the_network_lab_counted_are_those_of_these_gathers(name: str) -> None:
    """Full precision into a node: 2 bytes per gather and reduction, less what the node has."""
    gpt = pytest.importorskip("gpt")
    result = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text("utf-8"))
    given = result["arguments"]
    sizes = {key: given[key] for key in ("layers", "width", "heads", "seq_len")}
    settings = FetchSettings(
        max_reuse_distance=0, prefetch_bucket_size=given.get("prefetch_bucket_size") or 0
    )
    gathers = mean_gathers(outline(gpt.GPT(gpt.GPTConfig(**sizes)), gpt.Block), settings)
    points = [point for point in result["points"] if point["stage"] == 3]
    assert points
    for point in points:
        volume = 2 * (gathers + 1) * (1 - 1 / int(point["topology"].split("x")[0]))
        (counted,) = {r["counted_bytes"] for r in point["rows"] if r["scheme"] == "full_precision"}
        assert counted == pytest.approx(volume, rel=1e-6)


def outline(module: nn.Module, leaf: type) -> Module:
    """``leaf`` modules are gathered whole, as the benchmark asks for."""
    whole = isinstance(module, leaf)
    units = tuple(Unit(id(p), p.numel()) for p in module.parameters(recurse=whole))
    return Module(units, () if whole else tuple(outline(c, leaf) for c in module.children()))


def test_by_default_a_small_model_is_gathered_once_and_a_large_one_nearly_twice() -> None:
    assert mean_gathers(layers(10, 10**7), FetchSettings()) == 1
    assert 1.8 < mean_gathers(layers(700, 10**7), FetchSettings()) < 2


def test_what_stays_for_backward_takes_memory() -> None:
    few = FetchSettings(max_reuse_distance=0, prefetch_bucket_size=0)
    assert most_live(layers(8), few) == N
    assert most_live(layers(8), FetchSettings()) == 8 * N
    assert most_live(stack(("a", 60), ("norm", 40, True)), few) == 100


def test_persistent_parameters_are_gathered_once_per_optimizer_step() -> None:
    modules = stack(("a", 60), ("norm", 40, True))
    settings = FetchSettings(max_reuse_distance=0, prefetch_bucket_size=0)
    assert mean_gathers(modules, settings) == pytest.approx((2 * 60 + 40) / 100)
    assert mean_gathers(modules, settings, micro_steps=4) == pytest.approx((2 * 60 + 10) / 100)


def test_tied_weights_are_gathered_for_every_use_that_lies_far_away() -> None:
    modules = stack(("tied", 50), ("body", 100), ("tied", 50))
    settings = FetchSettings(max_reuse_distance=1, prefetch_bucket_size=0)
    # Forward: tied, body, and tied, which stays for backward; then body again and tied again.
    assert mean_gathers(modules, settings) == pytest.approx((3 * 50 + 2 * 100) / 150)
    assert mean_gathers(Module(), settings) == 0
