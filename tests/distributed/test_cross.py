"""Gradients of several micro-steps that cross between nodes once per optimizer step."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import torch

import ds_quant
from tests.distributed.harness import on_ranks
from tests.distributed.models import Regression, batch, engine_of, forward

WORLD, MICRO_STEPS = 4, 3


def plain_means() -> dict[str, torch.Tensor]:
    """Gradients over ranks, summed over micro-steps, of a model on initial weights that knows
    nothing of DeepSpeed.
    """
    torch.manual_seed(0)
    model = Regression()
    for rank, micro in product(range(WORLD), range(MICRO_STEPS)):
        (model(*batch(0, 0, micro, rank)) / MICRO_STEPS / WORLD).backward()
    return {n: p.grad for n, p in model.named_parameters()}


@on_ranks(WORLD)
def test_the_line_says_if_deepspeed_forgets_micro_steps() -> None:
    """So it does in some versions, and not where gradients cross once per step. Compared is what
    the optimizer gets of three micro-steps.
    """
    from deepspeed.utils import safe_get_full_grad

    means = plain_means()
    cases = [(2, "step", False, 4)]
    cases += product((1, 2), ("step",), (False, True), (2,))
    cases += product((2,), ("micro_step",), (False, True), (2,))
    for case in cases:
        stage, cross, offloaded, node_size = case
        zero = {"reduce_bucket_size": 20_000}
        zero |= {"offload_optimizer": {"device": "cpu"}} if offloaded else {}
        block = {"scheme": "full_precision", "node_size": node_size, "gradients": {"cross": cross}}
        engine = engine_of(
            stage, block, dtype="fp32", accumulation=MICRO_STEPS, zero=zero,
            zero_force_ds_cpu_optimizer=False,
            # Adam would divide by gradients near zero, whose rounding is all they are.
            optimizer=partial(torch.optim.SGD, lr=0.1),
        )  # fmt: skip
        for micro in range(MICRO_STEPS):
            engine.backward(forward(engine, 0, micro))
            if micro < MICRO_STEPS - 1:
                engine.step()
        right = [
            np.allclose(safe_get_full_grad(p), means[name], rtol=1e-4, atol=1e-6)
            for name, p in engine.module.named_parameters()
        ]
        forgets = "forgets the gradients of all micro-steps" in ds_quant.report(engine)["line"]
        assert all(right) or not any(right), case
        assert forgets != all(right), case
        assert all(right) or (stage, cross) == (2, "micro_step"), case
        engine.destroy()
