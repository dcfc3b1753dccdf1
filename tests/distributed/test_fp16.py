"""fp16 with dynamic loss scale, on any processor: torch computes it on all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.distributed.harness import run
from tests.distributed.models import build, forward, plain_descent, settings

# Scheme -> how far a loss may be off, in first losses: about twice what was measured.
SCHEMES = {
    "full_precision": 5e-5, "qsdp": 0.0006, "sdp4bit": 0.003, "lossless": 5e-5,
    "lossless_w_g3": 0.004, "eden3": 0.004, "zeropp": 0.006,
}  # fmt: skip
STEPS = 10


def trained(stage: int) -> dict[str | None, tuple[list[float], list[float], int]]:
    """By scheme: losses, loss scales after each step, steps that DeepSpeed skipped. The gradients
    of step 3 are infinite on rank 1.
    """
    found = {}
    for scheme in (None, *SCHEMES):
        block = {"scheme": scheme, "node_size": 2} if scheme else None
        config = settings(stage, block, dtype="fp16")
        config["fp16"] |= {"initial_scale_power": 10, "hysteresis": 1, "loss_scale_window": 4}
        engine, losses, scales = build(config, optimizer=plain_descent), [], []
        for step in range(STEPS):
            loss = forward(engine, step)
            losses.append(float(loss.detach()))
            overflow = step == 3 and torch.distributed.get_rank() == 1
            engine.backward(loss * 1e30 if overflow else loss)
            engine.step()
            scales.append(float(engine.optimizer.loss_scale))
        found[scheme] = losses, scales, engine.skipped_steps
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_schemes_train_in_fp16_as_without_the_plugin(stage: int) -> None:
    ranks = run(trained, 4, stage, environment={"TEST_FP16": "yes"}, timeout=120)
    losses, scales, skipped = (
        {scheme: [rank[scheme][i] for rank in ranks] for scheme in ranks[0]} for i in range(3)
    )
    assert skipped[None] == [1] * 4
    assert scales[None][0][2:4] == [1024, 512] and scales[None][0][-1] > 512, "not dynamic"
    expected = np.mean(losses[None], axis=0)
    assert expected[-1] < 0.95 * expected[0]
    for scheme, atol in SCHEMES.items():
        assert skipped[scheme] == skipped[None] and scales[scheme] == scales[None], scheme
        found = np.mean(losses[scheme], axis=0)
        np.testing.assert_allclose(found, expected, rtol=0, atol=atol * expected[0], err_msg=scheme)
