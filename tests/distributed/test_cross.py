"""Gradients of several micro-steps that cross between nodes once per optimizer step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.distributed.harness import run
from tests.distributed.models import Regression, batch, build, forward, settings

WORLD = 4


def config(
    stage: int, accumulation: int, cross: str, *, offloaded: bool = False, node_size: int = 2
) -> dict[str, Any]:
    """In fp32 and full precision."""
    block = {"scheme": "full_precision", "node_size": node_size, "gradients": {"cross": cross}}
    zero: dict[str, Any] = {"reduce_bucket_size": 20_000}
    zero |= {"offload_optimizer": {"device": "cpu"}} if offloaded else {}
    more = {"zero": zero, "zero_force_ds_cpu_optimizer": False}
    return settings(stage, block, accumulation=accumulation, **more)


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


def _forgetting_rank() -> dict[str, tuple[dict[str, np.ndarray], str]]:
    """By case: what the optimizer gets of three micro-steps, and the start-up line."""
    from deepspeed.utils import safe_get_full_grad

    import ds_quant

    cases = {"2, one level": config(2, 3, "step", node_size=WORLD)}
    for stage, cross in ((1, "step"), (2, "micro_step"), (2, "step")):
        for offloaded in (False, True):
            name = f"{stage}, {cross}, {offloaded}"
            cases[name] = config(stage, 3, cross, offloaded=offloaded)
    found = {}
    for name, made in cases.items():
        engine = build(made, optimizer=gentle_descent)
        for micro in range(3):
            engine.backward(forward(engine, 0, micro))
            if micro < 2:
                engine.step()
        gradients = {n: safe_get_full_grad(p) for n, p in engine.module.named_parameters()}
        found[name] = (
            {n: g.numpy().copy() for n, g in gradients.items()}, ds_quant.report(engine)["line"]
        )  # fmt: skip
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
        made = config(stage, accumulation, "micro_step", offloaded=offloaded)
        engine = build(made, optimizer=gentle_descent)
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


def gentle_descent(params: Any) -> torch.optim.Optimizer:
    """Adam would divide by gradients near zero, whose rounding is all they are."""
    return torch.optim.SGD(params, lr=0.1)
