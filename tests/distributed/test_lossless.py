"""Exact weight differences train like full precision, bit for bit, and say what they cost."""

from __future__ import annotations

import pytest

from tests.distributed.harness import run
from tests.distributed.models import build, digests, masters, settings, train_step

pytestmark = pytest.mark.distributed


def _trained(scheme: str, stage: int, node_size: int, steps: int) -> tuple[list[float], dict, dict]:
    import ds_quant

    block = {"scheme": scheme, "node_size": node_size, "allow_full_replica": True}
    engine = build(settings(stage, block, dtype="bf16", accumulation=2))
    losses = [loss for step in range(steps) for loss in train_step(engine, step)]
    report = ds_quant.report(engine)
    found = losses, digests(masters(engine)), report
    engine.destroy()
    return found


def _both(stage, node_size, steps):
    return [_trained(s, stage, node_size, steps) for s in ("full_precision", "lossless")]


@pytest.mark.parametrize("topology", [(2, 2), (4, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_and_weights_are_those_of_full_precision(stage, topology) -> None:
    nodes, node_size = topology
    for plain, exact in run(_both, nodes * node_size, stage, node_size, 4):
        assert exact[:2] == plain[:2]
        print(plain[2]["received_bytes"], exact[2]["received_bytes"], exact[2]["line"])
