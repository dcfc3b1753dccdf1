"""Scheme "autotune" on real process groups: simulated links, and one run that measures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ds_quant
from ds_quant import ddp, fsdp2
from tests.distributed.harness import of_all_ranks, on_ranks
from tests.distributed.models import engine_of, train_steps
from tests.distributed.test_fsdp2_between_steps import rows, sgd, sharded
from tests.thin import thinned

Rate = tuple[float, float]  # bytes per second into a rank and seconds per message


def simulate(
    between: Rate, node_size: int, *, inside: Rate = (1e12, 1e-6), host: float = 0.0
) -> None:
    """Let the clock of this process show what simulated links take, between nodes and inside them,
    and ``host`` seconds for every call of the kernels. Later ranks are slower, and all must take
    the same.
    """
    from ds_quant.comm.transport import Communicator
    from ds_quant.kernels.dispatch import Operations
    from ds_quant.policy import timing

    now, own = 0.0, torch.distributed.get_rank()

    def charged(message: Any) -> Any:
        def timed(self: Communicator, payload: torch.Tensor, **options: Any) -> Any:
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

    gather, call, Operations.run = Communicator.all_gather, Operations.run, calling
    Communicator.all_gather = charged(gather)
    Communicator.all_to_all = charged(Communicator.all_to_all)
    timing.device_clock = lambda device: lambda: now


SLOW = (1e5, 1e-6)  # between nodes


def autotuned(stage: int, node_size: int, **more: Any) -> Any:
    block = {"scheme": "autotune", "node_size": node_size, "min_numel": 0, **more}
    return engine_of(stage, block, dtype="fp32")


@pytest.mark.parametrize(
    ("stage", "between", "host", "expected"),
    thinned(
        [
            (1, SLOW, 0.0, "eden4"),
            (2, SLOW, 0.0, "eden4"),
            # As many messages: all they take is latency.
            (2, (1e12, 1.0), 0.0, "full_precision"),
            # Between nodes at 400 GB/s what the host takes is all that a message takes.
            (2, (4e11, 1e-6), 60e-6, "full_precision"),
            (3, (4e11, 1e-6), 60e-6, "full_precision"),
            (3, SLOW, 0.0, "eden4"),
            (3, SLOW, 60e-6, "eden4"),
        ],
        # Every stage, both answers, and the latency of the link and of the host.
        lambda stage, between, host, expected: (
            (stage, expected) in ((1, "eden4"), (3, "full_precision")) or between[0] == 1e12
        ),
    ),
)
@on_ranks(4)
def test_all_ranks_take_the_fastest_on_their_links(
    stage: int, between: Rate, host: float, expected: str
) -> None:
    simulate(between, 2, host=host)
    engine = autotuned(stage, 2)
    line = ds_quant.report(engine)["line"]
    assert line.startswith(f"{expected} on ZeRO-{stage}") and "chosen by autotune: " in line
    assert ("nothing else gains 5 %" in line) == (expected == "full_precision")
    assert train_steps(engine, 3)[-1] < 5
    assert of_all_ranks(line) == [line] * 4


@on_ranks(4)
def test_the_other_keys_of_the_block_are_kept() -> None:
    simulate(SLOW, 2)
    line = ds_quant.report(autotuned(2, 2, warmup_steps=2, exclude=["first.*"]))["line"]
    assert line.startswith("eden4") and "from step 2 on" in line and "1 excluded" in line


@pytest.mark.parametrize(
    ("world", "block", "expected"),
    [
        # ZeRO-3 with one rank per node: eden4 would keep all weights on every rank.
        (2, {}, "qsdp"),
        (2, {"allow_full_replica": True}, "eden4"),
        (1, {}, "full_precision"),  # nothing to choose
    ],
)
@on_ranks()
def test_a_full_replica_is_taken_only_where_it_is_allowed(
    world: int, block: dict[str, Any], expected: str
) -> None:
    simulate(SLOW, 1)
    report = ds_quant.report(autotuned(3, 1, **block))
    assert report["scheme"] == expected and ("single rank" in report["line"]) == (world == 1)


@on_ranks(4)
def test_a_model_under_fsdp2_takes_the_fastest_on_its_links() -> None:
    simulate(SLOW, 2)
    model = sharded()
    optimizer = sgd(model)
    block = {"scheme": "autotune", "node_size": 2, "min_numel": 0}
    front = fsdp2.attach(model, block, optimizer=optimizer)
    assert front.line.startswith("eden4 on FSDP2") and "chosen by autotune: " in front.line
    assert of_all_ranks(front.line) == [front.line] * 4
    received = ds_quant.report(model)["received_bytes"]
    assert not any(nbytes for links in received.values() for nbytes in links.values())
    model(rows(0)).sum().backward()
    optimizer.step()


@on_ranks()
def test_a_real_run_measures_decides_and_trains() -> None:
    engine = engine_of(2, {"scheme": "autotune", "node_size": 1})
    report = ds_quant.report(engine)
    assert report["scheme"] in ("full_precision", "eden4")
    assert of_all_ranks(report["scheme"]) == [report["scheme"]] * 2
    assert "chosen by autotune: " in report["line"]
    assert "messages of a step take full_precision" in report["line"]
    for links in report["received_bytes"].values():
        assert not any(links.values()), "what the probe sends is not training"
    train_steps(engine, 1)
    assert ds_quant.report(engine)["steps"] == 1


# ---- the first block of README, wherever a reader has it ----

README = (Path(__file__).resolve().parents[2] / "README.md").read_text("utf-8")
(FIRST_BLOCK,) = re.findall(r"^\+ +\"quantized_comm\": (.*),$", README, re.MULTILINE)


@pytest.mark.parametrize(
    ("world", "node_size"),
    thinned([(1, 1), (1, 2), (2, 1), (2, 2)], lambda world, node_size: world == 2),
)
@on_ranks()
def test_the_first_block_of_readme_starts_everywhere(world: int, node_size: int) -> None:
    """On one rank, on two of one node, and on two nodes of one rank."""
    block = {**json.loads(FIRST_BLOCK), "node_size": min(world, node_size)}
    for stage in (1, 2, 3):
        engine = engine_of(stage, block)
        train_steps(engine, 1)
        assert ds_quant.report(engine)["steps"] == 1
        engine.destroy()
    model = sharded()
    optimizer = sgd(model)
    fsdp2.attach(model, block, optimizer=optimizer)
    model(rows(0)).sum().backward()
    optimizer.step()
    assert ds_quant.report(model)["steps"] == 1
    replicated = DistributedDataParallel(nn.Linear(64, 64))
    ddp.attach(replicated, block)
    replicated(torch.ones(1, 64)).sum().backward()
    assert ds_quant.report(replicated)["steps"] == 1
