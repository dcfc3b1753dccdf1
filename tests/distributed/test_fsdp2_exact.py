"""Schemes that quantize nothing train as FSDP2 alone over many steps on rough data."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from ds_quant import fsdp2
from tests.distributed.exact_model import ExactModel, sgd
from tests.distributed.harness import on_ranks
from tests.distributed.test_fsdp2 import weights_of
from tests.thin import thinned

CASES = [(2, 4, 3), (4, 4, 3), *product((2, 4), (1, 4), (60,))]
SMALL = (1, 2, 3, 5, 6)  # layers of the model that are small, of odd shapes


def trained(
    block: dict[str, Any] | None, micro_steps: int, steps: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights."""
    model: Any = ExactModel()
    model.layers = nn.ModuleList(model.layers[i] for i in SMALL)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = sgd(model.parameters())
    if block is not None:
        fsdp2.attach(model, block, optimizer=optimizer)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    losses = []
    for step in range(steps):
        for micro_step in range(micro_steps):
            model.set_is_last_backward(micro_step == micro_steps - 1)
            loss = model((step * micro_steps + micro_step) * world + rank) / micro_steps
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, weights_of(model)


@pytest.mark.parametrize(
    ("world", "micro_steps", "steps"), thinned(CASES, lambda *case: case == (2, 4, 3))
)
@on_ranks(timeout=600)
def test_nothing_quantized_trains_as_fsdp2_alone(world: int, micro_steps: int, steps: int) -> None:
    """Bit for bit on two ranks; on two nodes of two, sums have another order."""
    plain_losses, plain = trained(None, micro_steps, steps)
    for scheme in ("full_precision", "hybrid"):
        block = {"scheme": scheme, "node_size": world // 2, "allow_full_replica": True}
        losses, weights = trained(block, micro_steps, steps)
        if world == 2:
            assert losses == plain_losses
            for name, expected in plain.items():
                assert torch.equal(weights[name], expected), name
            continue
        # They fall from 220 and come near 0.
        assert losses == pytest.approx(plain_losses, rel=1e-6, abs=1e-6)
        for name, expected in plain.items():
            assert (weights[name] - expected).norm() <= 1e-6 * expected.norm(), name
