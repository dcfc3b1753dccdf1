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
    """Over ranks, summed over micro-steps."""
    found = [local_gradients(accumulation, rank) for rank in range(WORLD)]
    return sum(micro[name] for by_rank in found for micro in by_rank).numpy() / WORLD


OFFLOADED = {"offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 20_000}


def _forgetting_rank() -> dict[str, tuple[dict[str, np.ndarray], str]]:
    """By case: what the optimizer gets of three micro-steps, and the start-up line."""
    import ds_quant

    cases = {"2, one level": config(2, 3)}
    cases["2, one level"]["quantized_comm"]["node_size"] = WORLD
    for stage, cross in ((1, "step"), (2, "micro_step"), (2, "step")):
        more = {"zero": OFFLOADED, "zero_force_ds_cpu_optimizer": False}
        cases[f"{stage}, {cross}"] = config(stage, 3, cross)
        cases[f"{stage}, {cross}, offloaded"] = config(stage, 3, cross, **more)
    found = {}
    for name, made in cases.items():
        engine = build(made, optimizer=gentle_descent)
        for micro in range(3):
            engine.backward(forward(engine, 0, micro))
            if micro < 2:
                engine.step()
        found[name] = full_gradients(engine), ds_quant.report(engine)["line"]
        engine.destroy()
    return found


def test_the_line_says_if_deepspeed_forgets_micro_steps() -> None:
    """So it does in some versions, and not where gradients cross once per step."""
    for results in run(_forgetting_rank, WORLD):
        for name, (gradients, line) in results.items():
            right = [
                np.allclose(got, plain_mean(parameter, 3), rtol=1e-4, atol=1e-6)
                for parameter, got in gradients.items()
            ]
            assert all(right) or not any(right), name
            assert ("forgets the gradients of all micro-steps" in line) != all(right), name
            assert all(right) or not name.startswith(("1", "2, step")), name


# Version, stage, micro-steps, whether offloaded: whether it forgets gradients.
FORGETS = {
    ("0.17.6", 2, 2, False): True,
    ("0.17.6", 2, 1, False): False,
    ("0.17.6", 1, 2, False): False,
    ("0.18.2", 2, 2, False): True,
    ("0.18.3", 2, 2, False): False,
    ("0.19.3", 2, 1, False): False,
    ("0.19.3", 1, 1, False): False,
    ("0.19.4", 2, 1, False): False,
    ("0.18.9", 2, 3, True): True,
    ("0.18.9", 2, 2, True): False,
    ("0.19.0", 2, 3, True): False,
}


def _lines_rank() -> dict[tuple, str]:
    import deepspeed

    import ds_quant

    found = {}
    for (version, stage, accumulation, offloaded), _ in FORGETS.items():
        deepspeed.__version__ = version
        more = {"zero": OFFLOADED, "zero_force_ds_cpu_optimizer": False} if offloaded else {}
        engine = build(config(stage, accumulation, "micro_step", **more), optimizer=gentle_descent)
        found[version, stage, accumulation, offloaded] = ds_quant.report(engine)["line"]
        engine.destroy()
    return found


def test_the_line_names_the_version_that_forgets_and_the_setting() -> None:
    (lines, _) = run(_lines_rank, 2)
    for case, forgets in FORGETS.items():
        says = f"DeepSpeed {case[0]} forgets the gradients" in lines[case]
        assert says == forgets, case
        assert (f"gradient_accumulation_steps={case[2]} needs DeepSpeed" in lines[case]) == forgets
        version, stage, _, offloaded = case
        reused = stage == 2 and not offloaded and version in ("0.18.3", "0.19.3")
        assert ("(DeepSpeed issue 8224)" in lines[case]) == reused, case


# ---- losses ----


def gentle_descent(params: Any) -> torch.optim.Optimizer:
    """Adam would divide by gradients near zero, whose rounding is all they are."""
    return torch.optim.SGD(params, lr=0.1)


# ---- what is not finite ----


def _nonfinite_rank(stage: int) -> list[tuple[int, bool, str]]:
    """By bad micro-step: the gradients that the optimizer is about to use, and what it says."""
    found = []
    for bad in (None, 0, 2):
        made = config(stage, 3, scheme="sdp4bit", dtype="bf16")
        made["quantized_comm"]["fallback"] = {"on_nonfinite": "raise"}
        engine, error = build(made), ""
        for micro in range(3):
            x, y = batch(0, 0, micro, torch.distributed.get_rank())
            if micro == bad and torch.distributed.get_rank() == 1:
                x[0, 0] = torch.nan
            engine.backward(engine(x.bfloat16(), y))
            if micro == 2:
                finite = [np.isfinite(g).all() for g in full_gradients(engine).values()]
            try:
                engine.step()
            except FloatingPointError as raised:
                error = str(raised)
        found.append((sum(finite), len(finite), error))
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_a_nan_in_any_micro_step_reaches_the_optimizer(stage: int) -> None:
    for good, first, last in run(_nonfinite_rank, WORLD, stage, timeout=120):
        assert good[0] == good[1] and not good[2]
        for finite, _, error in (first, last):
            assert finite == 0
            assert "NaN or Inf" in error
