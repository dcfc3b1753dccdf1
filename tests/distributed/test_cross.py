"""Gradients of several micro-steps that cross between nodes once per optimizer step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.harness import run
from tests.distributed.models import (
    Regression,
    batch,
    build,
    forward,
    settings,
)

pytestmark = pytest.mark.distributed

NODES, NODE_SIZE = 2, 2
WORLD = NODES * NODE_SIZE
STAGES = (2, 3)
BUCKETS = (20_000, 10**6)  # elements; several buckets, and one


def config(stage: int, accumulation: int, cross: str = "step", **changes: Any) -> dict[str, Any]:
    """fp32 full precision, unless ``changes`` say otherwise: ``scheme``, ``dtype``, ``bucket``,
    ``zero`` and top-level keys.
    """
    scheme, bucket = changes.pop("scheme", "full_precision"), changes.pop("bucket", 20_000)
    block = {"scheme": scheme, "node_size": NODE_SIZE, "metrics": {"interval": 0}}
    block["gradients"] = {"cross": cross}
    zero = {"reduce_bucket_size": bucket, **changes.pop("zero", {})}
    return settings(stage, block, accumulation=accumulation, zero=zero, **changes)


def full_gradients(engine: Any) -> dict[str, np.ndarray]:
    """What the optimizer is about to use. A collective."""
    from deepspeed.utils import safe_get_full_grad

    return {n: safe_get_full_grad(p).numpy().copy() for n, p in engine.module.named_parameters()}


# ---- sums ----


def local_gradients(accumulation: int, rank: int) -> list[dict[str, torch.Tensor]]:
    """By micro-step, of a model on initial weights that knows nothing of DeepSpeed."""
    torch.manual_seed(0)
    model, found = Regression(), []
    for micro in range(accumulation):
        model.zero_grad()
        (model(*batch(0, 0, micro, rank)) / accumulation).backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters()})
    return found


def plain_mean(name: str, accumulation: int) -> np.ndarray:
    """Ranks of a node in rank order, then micro-steps, then nodes, all fp32."""
    by_rank = [local_gradients(accumulation, rank) for rank in range(WORLD)]
    total = None
    for node in range(NODES):
        held = None
        for micro in range(accumulation):
            partial = None
            for rank in range(node * NODE_SIZE, (node + 1) * NODE_SIZE):
                value = by_rank[rank][micro][name]
                partial = value if partial is None else partial + value
            held = partial if held is None else held + partial
        total = held if total is None else total + held
    return (total * (1 / WORLD)).numpy()


def _gradients_rank(cases: list[tuple[int, int, int]]) -> dict[tuple, dict[str, np.ndarray]]:
    found = {}
    for stage, accumulation, bucket in cases:
        engine = build(config(stage, accumulation, bucket=bucket))
        for micro in range(accumulation):
            engine.backward(forward(engine, 0, micro))
            if micro < accumulation - 1:
                engine.step()
        found[stage, accumulation, bucket] = full_gradients(engine)
        engine.step()
        assert engine.ds_quant_binding.held.nbytes == 0
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_the_optimizer_gets_the_plain_sum_bit_for_bit(stage: int) -> None:
    """With nothing quantized: over ranks of a node, then micro-steps, then nodes."""
    cases = [(stage, k, bucket) for k in (1, 3) for bucket in BUCKETS]
    for results in run(_gradients_rank, WORLD, cases, timeout=200):
        for (_, accumulation, _), gradients in results.items():
            for name, got in gradients.items():
                expected = plain_mean(name, accumulation)
                np.testing.assert_array_equal(got, expected, err_msg=f"{name} {accumulation}")
