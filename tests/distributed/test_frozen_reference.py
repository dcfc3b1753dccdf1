"""A second, frozen engine at stage 0 beside a trained one, as preference trainers build it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.distributed.harness import run, run_each
from tests.distributed.models import QSDP, Regression, build, forward, settings, train_step


def reference_config(stage: int) -> dict[str, Any]:
    config = copy.deepcopy(settings(stage, QSDP, dtype="bf16"))
    config["zero_optimization"]["stage"] = 0
    return config


def beside_a_reference(stage: int, with_reference: bool) -> tuple[list[float], list[str], Any]:
    """Losses of the trained engine, what rank 0 logs for the reference, its report."""
    import deepspeed

    import ds_quant
    from ds_quant.zero import log

    engine = build(settings(stage, QSDP, dtype="bf16"))
    logged: list[str] = []
    log.log_rank0 = logged.append
    reference = None
    if with_reference:
        torch.manual_seed(1)
        frozen = Regression().requires_grad_(False)
        reference = deepspeed.initialize(model=frozen, config=reference_config(stage))[0]
        reference.eval()
    losses = []
    for step in range(3):
        if reference is not None:
            with torch.no_grad():
                forward(reference, step)
        losses += train_step(engine, step)
    report = None if reference is None else ds_quant.report(reference)
    return losses, logged, report


@pytest.mark.parametrize("stage", (2, 3))
def test_a_frozen_engine_at_stage_0_stays_inactive_and_says_so(stage: int) -> None:
    alone, beside = (run(beside_a_reference, 2, stage, there) for there in (False, True))
    for (expected, _, _), (losses, logged, report) in zip(alone, beside, strict=True):
        assert losses == expected and report is None
        (line,) = logged
        assert "inactive in an engine at stage 0 without an optimizer" in line


def trained_at_stage_0() -> None:
    build(reference_config(2))


def test_a_trained_engine_at_stage_0_is_still_refused() -> None:
    for _, error in run_each(trained_at_stage_0, 2):
        assert "zero_optimization.stage=0: allowed with quantized_comm: 1, 2 or 3" in error
