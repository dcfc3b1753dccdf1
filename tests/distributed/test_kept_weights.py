"""Weights that a node shard keeps, in cases that only it can get wrong."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.harness import run
from tests.distributed.models import build, evaluate, masters, settings, train_step

pytestmark = pytest.mark.distributed

# One rank per node: the node shard is all there is, and two ranks make two nodes.
ALONE = {"node_size": 1, "allow_full_replica": True}


def frozen_later(scheme: str) -> float:
    """Relative distance of the weight in use from its master, frozen after 2 of 8 steps."""
    engine = build(
        settings(3, {"scheme": scheme, **ALONE}, dtype="bf16"),
        optimizer=lambda params: torch.optim.AdamW(params, lr=2e-2, weight_decay=0.5),
    )
    used = []
    engine.module.second.register_forward_hook(
        lambda module, *_: used.append(module.weight.detach().float().clone())
    )
    for step in range(8):
        if step == 2:
            engine.module.second.weight.requires_grad_(False)
        train_step(engine, step)
    evaluate(engine)
    engine.module.second.weight.requires_grad_(True)  # DeepSpeed shows no other masters
    exact = torch.from_numpy(masters(engine)["second.weight"])
    return float((used[-1] - exact).norm() / exact.norm())


@pytest.mark.parametrize("scheme, allowed", [("sdp4bit", 0.02), ("zeropp", 0.02)])
def test_a_parameter_frozen_during_training_goes_on_following_its_master(
    scheme: str, allowed: float
) -> None:
    """Momentum and weight decay move it still, as they do in DeepSpeed alone."""
    for distance in run(frozen_later, 2, scheme):
        assert distance < allowed
