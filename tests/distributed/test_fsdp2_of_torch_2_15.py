"""What FSDP2 has from torch 2.15 on: each trains as under FSDP2 alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests import needs
from tests.distributed.fsdp2_runs import WIDTH, Net, Run
from tests.distributed.fsdp2_trials import (
    REPLICAS,
    REPLICATED,
    SCHEMES,
    Trial,
    accumulated,
    sharded,
    three_steps,
    without_sync,
)
from tests.distributed.harness import on_ranks
from tests.thin import thinned

pytestmark = pytest.mark.skipif(
    not needs.has_torch("2.15"), reason=f"needs torch 2.15, has {torch.__version__}"
)

BF16 = torch.bfloat16
LOOPS = {"three steps": three_steps, "accumulated": accumulated, "without sync": without_sync}


def plain_sgd(model: Any) -> torch.optim.Optimizer:
    """Return SGD for gradients of several dtypes."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def with_grad_dtype(dtype: torch.dtype | None, **policy: Any) -> Any:
    """Weights in bf16, those of two dimensions with gradients of another dtype.

    A reduction has these gradients first: the module's parameters in another order.
    """
    model = Net().to(BF16)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.grad_dtype = dtype
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, **policy))


class Normed(Net):
    """Net between two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.after = nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(super().forward(self.before(x)))


def with_norms_in_fp32() -> Any:
    model = Normed()
    norms = {id(p) for norm in (model.before, model.after) for p in norm.parameters()}
    policy = MixedPrecisionPolicy(
        param_dtype=BF16,
        param_dtype_override_fn=lambda p: torch.float32 if id(p) in norms else None,
    )
    return fully_shard(model, mp_policy=policy)


def in_bf16(**policy: Any) -> Any:
    return sharded(mp_policy=MixedPrecisionPolicy(param_dtype=BF16, **policy))


MODELS: dict[str, Callable[[], Any]] = {
    "gradients in fp32": partial(with_grad_dtype, torch.float32),
    "gradients of any dtype": partial(with_grad_dtype, None, reduce_dtype=torch.float32),
    "bf16, reduced in fp32 by default": in_bf16,
    "bf16, reduced in bf16": partial(in_bf16, reduce_dtype=BF16),
    "norms in fp32": with_norms_in_fp32,
}


@pytest.mark.parametrize("scheme", thinned(SCHEMES, lambda scheme: scheme == "hybrid"))
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("model", MODELS)
@on_ranks(2)
def test_gradients_have_dtypes_of_their_own(model: str, loop: str, scheme: str) -> None:
    trial = Trial(loop=LOOPS[loop], model=MODELS[model], optimizer=plain_sgd)
    trial.compare(scheme)


# ---- the end of a backward ----


def finalized(run: Run, *, async_op: bool = False, last: bool = True) -> None:
    """The loop says when gradients are reduced. last: what it declares, which has no effect."""
    run.model.set_manual_backward_finalization(True)
    for seed in range(3):
        for micro_step in range(2):
            run.model.set_requires_gradient_sync(micro_step == 1)
            run.backward(10 * seed + micro_step, last=last, factor=1 / 2)
        handle = run.model.finalize_backward(async_op=async_op)
        if async_op:
            handle.wait()
        run.update()


def finalized_late(run: Run) -> None:
    """No backward reduces; the end of the step does."""
    run.model.set_manual_backward_finalization(True)
    for seed in range(3):
        run.model.set_requires_gradient_sync(False)
        run.backward(10 * seed, factor=1 / 2)
        run.backward(10 * seed + 1, factor=1 / 2)
        run.model.set_requires_gradient_sync(True)
        run.model.finalize_backward()
        run.update()


FINALIZED = {
    "at once": finalized,
    "waited for": partial(finalized, async_op=True),
    "declared not to be the last": partial(finalized, last=False),
    "late": finalized_late,
}


@pytest.mark.parametrize("scheme", thinned(SCHEMES, lambda scheme: scheme == "hybrid"))
@pytest.mark.parametrize("mesh", ["", REPLICAS, REPLICATED])
@pytest.mark.parametrize("loop", FINALIZED)
@on_ranks(4)
def test_a_loop_says_when_a_backward_ends(loop: str, mesh: str, scheme: str) -> None:
    Trial(loop=FINALIZED[loop]).compare(scheme, mesh)


def kept_storage(run: Run) -> None:
    run.model.set_keep_unsharded_storage(True)
    accumulated(run)


@pytest.mark.parametrize("scheme", thinned(SCHEMES, lambda scheme: scheme == "hybrid"))
@on_ranks(2)
def test_gathered_weights_keep_their_memory(scheme: str) -> None:
    Trial(loop=kept_storage).compare(scheme)
