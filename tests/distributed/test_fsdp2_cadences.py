"""Optimizers that step while gradients of others wait: each model trains as under FSDP2 alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ds_quant import fsdp2
from tests.distributed.fsdp2_meshes import mesh_of
from tests.distributed.fsdp2_runs import Run, rows, sgd, sharded
from tests.distributed.fsdp2_trials import REPLICAS, REPLICATED, SCHEMES, Trial
from tests.distributed.harness import on_ranks
from tests.thin import thinned

LR = 0.1


def one_per_parameter(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD([parameter], lr=LR, momentum=0.9) for parameter in model.parameters()]


def stepped_in_the_last_backward(run: Run) -> None:
    """Every optimizer steps when its parameter's gradient of the last micro-step is there."""
    is_last = [False]

    def step(optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            if is_last[0]:
                optimizer.step()
                optimizer.zero_grad()

        return hook

    for optimizer in run.optimizer:
        (parameter,) = optimizer.param_groups[0]["params"]
        parameter.register_post_accumulate_grad_hook(step(optimizer))
    for seed in range(3):
        for micro_step in range(3):
            is_last[0] = micro_step == 2
            run.backward(10 * seed + micro_step, last=is_last[0], factor=1 / 3)


def two(model: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers of the second layer and of all others."""
    second = set(model.second.parameters())
    others = [parameter for parameter in model.parameters() if parameter not in second]
    return [torch.optim.SGD(each, lr=LR, momentum=0.9) for each in (list(second), others)]


def two_cadences(run: Run) -> None:
    """The second layer is reduced and steps in every micro-step, the others in every third one."""
    often, seldom = run.optimizer
    for seed in range(3):
        for micro_step in range(3):
            is_last = micro_step == 2
            run.model.set_requires_all_reduce(is_last)
            run.model.second.set_requires_all_reduce(True)
            run.backward(10 * seed + micro_step, factor=1 / 3)
            often.step()
            often.zero_grad()
        seldom.step()
        seldom.zero_grad()


TRIALS = {
    "stepped in the last backward": Trial(
        loop=stepped_in_the_last_backward, optimizer=one_per_parameter
    ),
    "two cadences": Trial(loop=two_cadences, optimizer=two),
}


@pytest.mark.parametrize(
    ("name", "mesh", "scheme"),
    thinned(
        [
            (name, mesh, scheme)
            for name in TRIALS
            for mesh in ("", REPLICAS, REPLICATED)
            for scheme in SCHEMES
            # FSDP2 alone reduces over all ranks of a mesh without replicas in every backward.
            if name != "two cadences" or mesh
        ],
        # Sums that wait are rotated under sdp4bit.
        lambda name, mesh, scheme: scheme == ("sdp4bit" if mesh == REPLICAS else "hybrid"),
    ),
)
@on_ranks(4)
def test_an_optimizer_steps_while_gradients_of_others_wait(
    name: str, mesh: str, scheme: str
) -> None:
    TRIALS[name].compare(scheme, mesh)


@pytest.mark.parametrize("mesh", ["", "replicas", "replicated"])
@on_ranks(4)
def test_a_divide_factor_that_changes_while_gradients_wait_is_refused(mesh: str) -> None:
    shape = {"": None, "replicas": (2, 2), "replicated": (4, 1)}[mesh]
    on = None if shape is None else mesh_of(shape, "replica", "shard")
    model = sharded(on)
    optimizer = sgd(model)
    block = {"scheme": "hybrid", "min_numel": 64} | ({} if mesh else {"node_size": 2})
    fsdp2.attach(model, block, optimizer=optimizer)
    beside = sharded(on)
    its_optimizer = sgd(beside)

    def divide_by(factor: float) -> None:
        for each in (model, beside):
            for module in each.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
                    module.set_gradient_divide_factor(factor)

    def backward(each: Any, seed: int, *, last: bool) -> None:
        each.set_is_last_backward(last)
        each(rows(seed)).square().mean().backward()

    divide_by(2.0)
    backward(model, 0, last=False)
    divide_by(8.0)
    backward(model, 1, last=True)
    message = (
        r"set_gradient_divide_factor was called between two backwards of an optimizer step: "
        r"gradients of 4 module\(s\), such as the root, wait .* scale their losses"
    )
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    optimizer.zero_grad()
    for each, of_each in ((model, optimizer), (beside, its_optimizer)):
        backward(each, 2, last=False)
        backward(each, 3, last=True)
        of_each.step()
        of_each.zero_grad()
    for found, expected in zip(model.parameters(), beside.parameters(), strict=True):
        torch.testing.assert_close(found.full_tensor(), expected.full_tensor())
