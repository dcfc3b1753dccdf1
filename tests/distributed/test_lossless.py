"""Exact weight differences train like full precision, bit for bit, and their bytes are counted.

Both schemes send gradients alike, so every loss and every master weight must be equal, not close.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import ds_quant
from tests.distributed.harness import run_all, run_each
from tests.distributed.models import build, digest, masters, settings, train_step
from tests.distributed.test_exactness import live
from tests.thin import thinned

STAGES = (1, 2, 3)


def config_of(stage: int, **keys: Any) -> dict[str, Any]:
    zero = {"allgather_bucket_size": 50_000} if stage < 3 else {}  # several windows
    block = {"scheme": "lossless", "node_size": 2, **keys}
    return settings(stage, block, dtype="bf16", zero=zero)


def _looked_at(stage: int) -> dict[str, Any]:
    """Weights that are shown, saved and compared between steps, messages that this takes, and bytes
    between nodes of the steps before and after.
    """
    import ds_quant

    engine = build(config_of(stage, checksum_steps=2))

    def bytes_of(step: int) -> int:
        before = ds_quant.report(engine)["received_bytes"]["weights"]["inter"]
        train_step(engine, step)
        return ds_quant.report(engine)["received_bytes"]["weights"]["inter"] - before

    counts = [bytes_of(step) for step in range(5)]
    exact = {n: digest(torch.from_numpy(a).bfloat16()) for n, a in masters(engine).items()}
    before = ds_quant.report(engine)
    with ds_quant.exact_weights(engine):
        inside = live(engine)
    engine.save_16bit_model(os.environ["TEST_SCRATCH"], "model.bin")
    engine.save_checkpoint(os.environ["TEST_SCRATCH"], tag="here")
    after = ds_quant.report(engine)
    return {
        "bytes": (counts[3:], [bytes_of(step) for step in (5, 6)]),
        "exact": exact,
        "live": inside,
        "messages": after["collectives"]["weights"] - before["collectives"]["weights"],
        "resyncs": after["resyncs"],
    }


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_always_exact_is_not_brought_back(stage: int) -> None:
    for found in run_all(_looked_at, 4, ((1,), (2,), (3,)))[stage,]:
        if stage < 3:
            assert found["live"] == found["exact"]
        assert found["messages"] == 0
        assert found["resyncs"] == 0
        before, after = map(sum, found["bytes"])
        assert after == pytest.approx(before, rel=0.15)


def _drifted(stage: int, then: str) -> None:
    engine = build(config_of(stage))
    train_step(engine, 0)
    if torch.distributed.get_rank() == 1:
        if stage == 3:
            engine.ds_quant_plugin.node.finish()
            engine.ds_quant_plugin.node.served[0].kept.rows[0, 0] += 1
        else:
            engine.module.first.weight.data.view(-1)[3] += 1
    train_step(engine, 1)  # with the next difference
    if then == "save":
        engine.save_checkpoint(os.environ["TEST_SCRATCH"])
    elif then == "read":
        with ds_quant.exact_weights(engine):
            pass
    else:
        train_step(engine, 2)


@pytest.mark.parametrize(
    ("stage", "then"),
    thinned(
        [*((stage, "step") for stage in STAGES), (2, "save"), (2, "read")],
        lambda *case: case in ((3, "step"), (2, "save")),
    ),
)
def test_a_holder_that_drifts_is_told_to_all_ranks_before_its_weights_count(
    stage: int, then: str
) -> None:
    environment = {"TEST_COLLECTIVE_TIMEOUT": "20"}
    for _, error in run_each(_drifted, 4, stage, then, environment=environment):
        assert "step 2: weights from rank" in error
        finder = 3 if stage == 3 else 1  # of a row of rank 1's own, who receives its difference
        assert f"cannot be decoded on rank {finder} (lossless message: wrong checksum" in error
        assert "different references" in error and "writes weights outside the optimizer" in error
