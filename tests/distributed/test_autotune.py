"""Scheme "autotune" on real process groups: simulated links, and one run that measures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.harness import run
from tests.distributed.models import build, settings, train_step

Rate = tuple[float, float]  # bytes per second into a rank and seconds per message


def simulate(
    between: Rate, node_size: int, *, inside: Rate = (1e12, 1e-6), host: float = 0.0
) -> None:
    """Let the clock of this process show what simulated links take, between nodes and inside them,
    and ``host`` seconds for every call of the kernels. Later ranks are slower, and all must take
    the same.
    """
    from ds_quant.comm.transport import Link
    from ds_quant.kernels.dispatch import Operations
    from ds_quant.policy import autotune

    now, own = 0.0, torch.distributed.get_rank()

    def charged(message: Any) -> Any:
        def timed(self: Link, payload: torch.Tensor, **options: Any) -> Any:
            nonlocal now
            one_node = len({r // node_size for r in self.ranks}) == 1
            rate, wait = inside if one_node else between
            copies = self.size - 1 if message is gather else 1
            now += (wait + payload.nbytes * copies / rate) * (1 + own)
            return message(self, payload, **options)

        return timed

    def calling(self: Operations, *args: Any, **options: Any) -> None:
        nonlocal now
        now += host
        call(self, *args, **options)

    gather, call, Operations.run = Link.all_gather, Operations.run, calling
    Link.all_gather = charged(gather)
    Link.all_to_all = charged(Link.all_to_all)
    autotune.device_clock = lambda device: lambda: now


def tuned(
    stage: int, inter: float, latency: float, more: dict[str, Any], host: float = 0.0
) -> tuple[str, str, float]:
    """Scheme, start-up line and loss of the last of three steps."""
    import ds_quant

    simulate((inter, latency), 2, host=host)
    block = {"scheme": "autotune", "node_size": 2, "min_numel": 0, **more}
    engine = build(settings(stage, block))
    losses = [loss for step in range(3) for loss in train_step(engine, step)]
    report = ds_quant.report(engine)
    return report["scheme"], report["line"], losses[-1]


@pytest.mark.parametrize(
    ("stage", "inter", "latency", "expected"),
    [
        (1, 1e5, 1e-6, "eden4"),
        (3, 1e5, 1e-6, "eden4"),
        (2, 1e12, 1.0, "full_precision"),  # as many messages, and all that they take is latency
        (2, 1e5, 1e-6, "eden4"),
    ],
)
def test_all_ranks_take_the_fastest_on_their_links(
    stage: int, inter: float, latency: float, expected: str
) -> None:
    ranks = run(tuned, 4, stage, inter, latency, {})
    assert len({line for _, line, _ in ranks}) == 1
    for scheme, line, loss in ranks:
        assert scheme == expected and line.startswith(f"{expected} on ZeRO-{stage}")
        assert "chosen by autotune: " in line
        assert ("nothing else gains 5 %" in line) == (expected == "full_precision")
        assert loss < 5


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("inter", "expected"), [(4e11, "full_precision"), (1e5, "eden4")], ids=["fast", "slow"]
)
def test_what_the_host_takes_for_a_message_counts(stage: int, inter: float, expected: str) -> None:
    """Between nodes at 400 GB/s it is all that a message takes."""
    for scheme, *_ in run(tuned, 4, stage, inter, 1e-6, {}, 60e-6):
        assert scheme == expected


def test_the_other_keys_of_the_block_are_kept() -> None:
    more = {"warmup_steps": 2, "exclude": ["first.*"]}
    for scheme, line, _ in run(tuned, 4, 2, 1e5, 1e-6, more):
        assert scheme == "eden4" and "from step 2 on" in line and "1 excluded" in line


def alone(block: dict[str, Any]) -> tuple[str, str]:
    import ds_quant

    simulate((1e5, 1e-6), 1)
    engine = build(settings(3, {"scheme": "autotune", "node_size": 1, "min_numel": 0, **block}))
    report = ds_quant.report(engine)
    return report["scheme"], report["line"]


def test_a_full_replica_is_taken_only_where_it_is_allowed() -> None:
    """ZeRO-3 with one rank per node: eden4 would keep all weights on every rank."""
    assert [scheme for scheme, _ in run(alone, 2, {})] == ["qsdp"] * 2
    allowed = run(alone, 2, {"allow_full_replica": True})
    assert [scheme for scheme, _ in allowed] == ["eden4"] * 2


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
        assert scheme in ("full_precision", "eden4")
        assert "chosen by autotune: " in line and "messages of a step take full_precision" in line
        assert counted == 0, "what the probe sends is not training"
        assert stepped
