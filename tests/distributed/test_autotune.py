"""Scheme "autotune" on real process groups: forced link speeds, and one run that measures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.harness import run
from tests.distributed.models import build, settings, train_step

pytestmark = pytest.mark.distributed
FAST_CODEC = 1e-12  # seconds per element: nothing


def force(inter: float, codec: float, node_size: int) -> None:
    """Links between nodes carry ``inter`` bytes per second, those inside 1e12, and codecs take
    ``codec`` seconds per element; on rank 0. The others measure something else, and must follow.
    """
    from ds_quant.policy import autotune
    from ds_quant.policy.autotune import Speed, Speeds

    rank = torch.distributed.get_rank()

    def rate(link: Any, device: Any) -> autotune.Rate:
        one_node = len({r // node_size for r in link.ranks}) == 1
        found = 1e12 if one_node else inter
        return autotune.Rate(bytes_per_second=found if rank == 0 else 1e12, latency=0.0)

    def speeds(scheme: Any, **_: Any) -> Speeds:
        cost = codec if scheme.gradients is not None else 0.0
        speed = Speed(encode=cost, decode=cost)
        return Speeds(weights=speed, weights_intra=speed, gradients=speed, gradients_intra=speed)

    autotune.measure_shortly = rate
    autotune.speeds_of = speeds


def tuned(stage: int, inter: float, codec: float, more: dict[str, Any]) -> tuple[str, str, float]:
    """Scheme, start-up line and loss of the last of three steps."""
    import ds_quant

    force(inter, codec, node_size=2)
    block = {"scheme": "autotune", "node_size": 2, "min_numel": 0, **more}
    engine = build(settings(stage, block))
    losses = [loss for step in range(3) for loss in train_step(engine, step)]
    report = ds_quant.report(engine)
    return report["scheme"], report["line"], losses[-1]


SLOW_LINK = 1e5, FAST_CODEC, "sdp4bit"
FAST_LINK = 1e8, 1e-6, "full_precision"  # and a codec that costs more than it saves


@pytest.mark.parametrize(
    ("stage", "inter", "codec", "expected"),
    [(1, *SLOW_LINK), (2, *FAST_LINK), (3, *SLOW_LINK), (3, *FAST_LINK)],
)
def test_all_ranks_take_what_rank_0_finds(
    stage: int, inter: float, codec: float, expected: str
) -> None:
    for scheme, line, loss in run(tuned, 4, stage, inter, codec, {}):
        assert scheme == expected and line.startswith(f"{expected} on ZeRO-{stage}")
        # Both ranks of a node receive at the measured rate at once.
        assert "chosen by autotune: " in line and f"{2 * inter * 8e-9:.3g} Gb/s into a node" in line
        assert ("nothing else gains 5 %" in line) == (expected == "full_precision")
        assert loss < 5


def test_the_other_keys_of_the_block_are_kept() -> None:
    more = {"warmup_steps": 2, "exclude": ["first.*"]}
    for scheme, line, _ in run(tuned, 4, 2, 1e5, FAST_CODEC, more):
        assert scheme == "sdp4bit" and "from step 2 on" in line and "1 excluded" in line


def alone(block: dict[str, Any]) -> tuple[str, str]:
    import ds_quant

    force(1e5, FAST_CODEC, node_size=1)
    engine = build(settings(3, {"scheme": "autotune", "node_size": 1, "min_numel": 0, **block}))
    report = ds_quant.report(engine)
    return report["scheme"], report["line"]


def test_a_full_replica_is_taken_only_where_it_is_allowed() -> None:
    """ZeRO-3 with one rank per node: sdp4bit would keep all weights on every rank."""
    assert [scheme for scheme, _ in run(alone, 2, {})] == ["qsdp"] * 2
    allowed = run(alone, 2, {"allow_full_replica": True})
    assert [scheme for scheme, _ in allowed] == ["sdp4bit"] * 2


def test_one_rank_has_nothing_to_choose() -> None:
    ((scheme, line),) = run(alone, 1, {})
    assert scheme == "full_precision" and "single rank" in line


def measured() -> tuple[str, str, int, bool]:
    """Scheme, line, bytes counted at start-up, and whether a step was taken."""
    import ds_quant

    engine = build(settings(2, {"scheme": "autotune", "node_size": 1}, dtype="bf16"))
    report = ds_quant.report(engine)
    counted = sum(sum(links.values()) for links in report["received_bytes"].values())
    train_step(engine, 0)
    return report["scheme"], report["line"], counted, ds_quant.report(engine)["steps"] == 1


def test_a_real_run_measures_decides_and_trains() -> None:
    ranks = run(measured, 2)
    assert len({scheme for scheme, *_ in ranks}) == 1
    for scheme, line, counted, stepped in ranks:
        assert scheme in ("full_precision", "qsdp", "sdp4bit")
        assert "chosen by autotune: " in line and "Gb/s into a node" in line
        assert counted == 0, "what the probe sends is not training"
        assert stepped
