"""Gradients of parameters on part of the ranks are divided by what DeepSpeed divides them by.

Adam forgives any factor, and so does clipping, which DeepSpeed does by default. So one step of SGD
is compared, without clipping and in full precision: it moves every weight as it does without the
plugin, up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from tests import needs
from tests.distributed import scenarios
from tests.distributed.harness import run
from tests.distributed.models import Regression, batch, settings

FULL = {"scheme": "full_precision", "node_size": 2}
Weights = dict[str, np.ndarray]


class Job(NamedTuple):
    """A model, further arguments and settings of the engine, and whose data this rank has."""

    model: nn.Module
    data: int
    arguments: dict[str, Any]
    top: dict[str, Any]


def experts() -> Job:
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    model = scenarios.seeded(partial(scenarios.Mixture, 2))
    groups = split({"params": list(model.parameters()), "name": "parameters"})
    optimizer = torch.optim.SGD(groups, lr=0.5)
    return Job(model, torch.distributed.get_rank(), {"optimizer": optimizer}, {})


def tensor_parallel() -> Job:
    grid = scenarios.Grid(2)
    return Job(scenarios.Sliced(grid), grid.get_data_parallel_rank(), {"mpu": grid}, {})


def sequence_parallel() -> Job:
    top = {"data_parallel_size": 2, "sequence_parallel_size": 2}
    return Job(scenarios.seeded(Regression), torch.distributed.get_rank(), {}, top)


def weights(engine: Any) -> Weights:
    import deepspeed

    named = dict(engine.module.named_parameters())
    sharded = engine.zero_optimization_stage() == 3
    with deepspeed.zero.GatheredParameters(list(named.values())) if sharded else nullcontext():
        return {name: p.detach().numpy().copy() for name, p in named.items()}


def _moved_rank(job: Callable[[], Job], stage: int) -> tuple[list[Weights], str]:
    """What one step adds to the weights, without the plugin and with it, and its line."""
    import ds_quant

    moved = []
    for block in (None, FULL):
        model, data, arguments, top = job()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        config = settings(stage, block, gradient_clipping=0.0) | top
        engine = scenarios.initialize(model, config, **{"optimizer": optimizer, **arguments})
        before = weights(engine)
        engine.backward(engine(*batch(0, 0, 0, data)))
        engine.step()
        moved.append({name: after - before[name] for name, after in weights(engine).items()})
    return moved, ds_quant.report(engine)["line"]


@pytest.mark.parametrize(
    ("job", "stage"),
    [
        (experts, 2),
        (tensor_parallel, 2),
        (tensor_parallel, 3),
        (sequence_parallel, 2),
        (sequence_parallel, 3),
    ],
)
def test_a_step_of_sgd_moves_weights_as_without_the_plugin(
    job: Callable[[], Job], stage: int
) -> None:
    if (job, stage) == (sequence_parallel, 3):
        needs.deepspeed("0.19", "cannot train this, with or without the plugin")
    if (job, stage) == (tensor_parallel, 3):
        needs.deepspeed("0.18", "moves weights by unwritten memory without the plugin")
    for (plain, ours), line in run(_moved_rank, 4, job, stage):
        # Under ZeRO-3 sequence parallel ranks share the weights: all of them reduce.
        assert ("live on a subset of ranks" in line) == ((job, stage) != (sequence_parallel, 3))
        for name, expected in plain.items():
            largest = np.abs(expected).max()
            assert largest > 0, name
            np.testing.assert_allclose(ours[name], expected, rtol=0, atol=1e-4 * largest)
