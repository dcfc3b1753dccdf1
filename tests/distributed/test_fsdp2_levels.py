"""FSDP2: QSDP's learned levels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from ds_quant import fsdp2
from ds_quant.codec.levels import merge_levels, update_levels
from tests.distributed.harness import of_all_ranks, on_ranks

STEP = 2  # levels are learned after this optimizer step
WEIGHTS = {"bits": 4, "rounding": "nearest", "levels": "learned", "level_steps": [STEP]}
BLOCK: dict[str, Any] = {"scheme": "qsdp", "weights": WEIGHTS, "min_numel": 64}


def skewed() -> Any:
    """Return a wrapped layer most of whose weights are small."""
    torch.manual_seed(0)
    model = nn.Linear(96, 50, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.randn(50, 96) ** 3)
    return fully_shard(model)


def train(model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 96)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def forward_weights(model: Any) -> torch.Tensor:
    """Return the weights that forward computes with."""
    return model(torch.eye(96)).detach().t()


def error(model: Any) -> float:
    """Return the relative error of the weights that forward computes with."""
    exact = model.weight.full_tensor()
    return float((forward_weights(model) - exact).norm() / exact.norm())


@on_ranks(4)
def test_levels_are_learned_from_the_shards_of_all_ranks() -> None:
    model = skewed()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    front = fsdp2.attach(model, {**BLOCK, "node_size": 2}, optimizer=optimizer)
    train(model, optimizer, STEP)
    (param,) = front.run.params
    codec = front.run.scheme.weights
    tables = []
    numels = []
    for shard in model.weight.full_tensor().chunk(4):
        table = codec.table(None, torch.device("cpu"))
        rate = front.run.scheme.block.weights.level_rate
        values = shard.reshape(-1)
        tables.append(update_levels(table, values, group_size=codec.group_size, rate=rate))
        numels.append(float(values.numel()))
    expected = merge_levels(torch.stack(tables), torch.tensor(numels))
    assert torch.equal(param.levels, expected)
    assert all(torch.equal(levels, expected) for levels in of_all_ranks(param.levels))


@on_ranks(2)
def test_learned_levels_decode_skewed_weights_with_less_error() -> None:
    found = []
    for levels in ("uniform", "learned"):
        model = skewed()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        weights = {**WEIGHTS, "levels": levels}
        if levels == "uniform":
            del weights["level_steps"]
        fsdp2.attach(model, {**BLOCK, "weights": weights}, optimizer=optimizer)
        train(model, optimizer, STEP)
        found.append(error(model))
    uniform, learned = found
    assert learned < 0.9 * uniform


@on_ranks(2)
def test_a_resumed_run_goes_on_with_the_levels_it_has_learned() -> None:
    model = skewed()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    front = fsdp2.attach(model, BLOCK, optimizer=optimizer)
    keys = front.state_dict().keys()
    train(model, optimizer, STEP + 1)
    state = front.state_dict()
    assert state.keys() == keys and state["learned_at"] == STEP + 1
    other = skewed()
    resumed = torch.optim.SGD(other.parameters(), lr=1e-3)
    with torch.no_grad():
        for p, q in zip(other.parameters(), model.parameters(), strict=True):
            p.copy_(q)
    fsdp2.attach(other, BLOCK, optimizer=resumed).load_state_dict(state)
    assert torch.equal(forward_weights(other), forward_weights(model))
    train(model, optimizer, 1)
    train(other, resumed, 1)
    assert torch.equal(forward_weights(other), forward_weights(model))
