"""Gradients of several micro-steps that cross between nodes once per optimizer step."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from tests import needs
from tests.distributed.harness import run
from tests.distributed.models import (
    Regression,
    batch,
    build,
    forward,
    masters,
    settings,
    train_step,
)
from tests.distributed.test_wire_bytes import NUMEL, WIDTH, Matrices

pytestmark = pytest.mark.distributed

NODES, NODE_SIZE = 2, 2
WORLD = NODES * NODE_SIZE
STAGES = (2, 3)
BUCKETS = (20_000, 10**6)  # elements; several buckets, and one


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
    """Ranks of a node in rank order, then micro-steps, then nodes, all fp32."""
    by_rank = [local_gradients(accumulation, rank) for rank in range(WORLD)]
    total = None
    for node in range(NODES):
        held = None
        for micro in range(accumulation):
            partial = None
            for rank in range(node * NODE_SIZE, (node + 1) * NODE_SIZE):
                value = by_rank[rank][micro][name]
                partial = value if partial is None else partial + value
            held = partial if held is None else held + partial
        total = held if total is None else total + held
    return (total * (1 / WORLD)).numpy()


def _gradients_rank(cases: list[tuple[int, int, int]]) -> dict[tuple, dict[str, np.ndarray]]:
    found = {}
    for stage, accumulation, bucket in cases:
        engine = build(config(stage, accumulation, bucket=bucket))
        for micro in range(accumulation):
            engine.backward(forward(engine, 0, micro))
            if micro < accumulation - 1:
                engine.step()
        found[stage, accumulation, bucket] = full_gradients(engine)
        engine.step()
        assert engine.ds_quant_engine.held.nbytes == 0
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_the_optimizer_gets_the_plain_sum_bit_for_bit(stage: int) -> None:
    """With nothing quantized: over ranks of a node, then micro-steps, then nodes."""
    cases = [(stage, k, bucket) for k in (1, 3) for bucket in BUCKETS]
    for results in run(_gradients_rank, WORLD, cases, timeout=200):
        for (_, accumulation, _), gradients in results.items():
            for name, got in gradients.items():
                expected = plain_mean(name, accumulation)
                np.testing.assert_array_equal(got, expected, err_msg=f"{name} {accumulation}")


def _hybrid_rank(stage: int, steps: int) -> dict[tuple[str, int], tuple[list, dict]]:
    """Losses and masters of both schemes in bf16, by scheme and micro-steps."""
    found = {}
    for scheme, accumulation in product(("hybrid", "full_precision"), (1, 4)):
        engine = build(config(stage, accumulation, scheme=scheme, dtype="bf16"))
        losses = [train_step(engine, step) for step in range(steps)]
        found[scheme, accumulation] = losses, masters(engine)
        assert (engine.ds_quant_engine.node is not None) == (stage == 3 and scheme == "hybrid")
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_hybrid_trains_as_full_precision_bit_for_bit(stage: int) -> None:
    for results in run(_hybrid_rank, WORLD, stage, 12, timeout=200):
        for accumulation in (1, 4):
            (losses, weights), (expected, exact) = (
                results[scheme, accumulation] for scheme in ("hybrid", "full_precision")
            )
            assert losses == expected and losses[-1] < losses[0]
            for name, master in exact.items():
                np.testing.assert_array_equal(weights[name], master, err_msg=name)


def _signs_rank() -> list[dict[str, np.ndarray]]:
    found = []
    for stage in STAGES:
        made = config(stage, 3, scheme="eden4")
        made["quantized_comm"]["min_numel"] = 0
        engine = build(made)
        for micro in range(3):
            engine.backward(forward(engine, 0, micro))
            if micro < 2:
                engine.step()
        found.append(full_gradients(engine))
        engine.destroy()
    return found


def test_held_sums_of_values_whose_signs_flip_are_near_the_plain_ones() -> None:
    """Four bits are off by a tenth; flipped otherwise in every micro-step, a sum is noise."""
    for by_stage in run(_signs_rank, WORLD):
        for gradients in by_stage:
            for name in ("first.weight", "second.weight", "last.weight"):
                expected = plain_mean(name, 3)
                error = np.linalg.norm(gradients[name] - expected) / np.linalg.norm(expected)
                assert 0 < error < 0.2, (name, error)


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


# ---- when they cross; how many bytes, see test_wire_bytes.py ----


def _boundary_rank(stage: int, told: bool) -> list[tuple[int, int, int]]:
    """Of steps of 1, 3 and 2 micro-steps: gradient bytes between nodes before and inside ``step``,
    and inside a node inside ``step``, where the user says that a backward is the last one (told) or
    says so afterwards.
    """
    import ds_quant

    def received(engine: Any, link: str = "inter") -> int:
        return ds_quant.report(engine)["received_bytes"]["gradients"][link]

    more = {} if told else {"managed_gradient_accumulation": False}
    block = {"scheme": "full_precision", "node_size": NODE_SIZE, "metrics": {"interval": 0}}
    zero = {"reduce_bucket_size": WIDTH * WIDTH, "overlap_comm": False}
    made = settings(stage, block, dtype="bf16", accumulation=1, zero=zero, **more)
    engine, steps = build(made, Matrices), []
    for count in (1, 3, 2):
        begin = received(engine)
        for micro in range(count):
            if told:
                engine.set_gradient_accumulation_boundary(micro == count - 1)
            engine.backward(engine(torch.randn(1, WIDTH)))
        middle, near = received(engine), received(engine, "intra")
        engine.step()
        inside = received(engine) - middle
        steps.append((middle - begin, inside, received(engine, "intra") - near))
    engine.destroy()
    return steps


ONCE = NUMEL * 2 * (NODES - 1) // WORLD  # bytes, in bf16


@pytest.mark.parametrize("stage", STAGES)
def test_the_boundary_is_the_users(stage: int) -> None:
    """As accelerate says it: gradients cross during the last backward."""
    for steps in run(_boundary_rank, WORLD, stage, True):
        assert [bytes_[:2] for bytes_ in steps] == [(ONCE, 0)] * 3


@needs.engine_method("managed_gradient_accumulation")
@pytest.mark.parametrize("stage", STAGES)
def test_unmanaged_gradients_cross_inside_step(stage: int) -> None:
    """There the second hop is taken alone; ZeRO-2 may deliver inside the node."""
    for steps in run(_boundary_rank, WORLD, stage, False):
        assert [bytes_[:2] for bytes_ in steps] == [(0, ONCE)] * 3
        assert stage == 2 or all(near == 0 for *_, near in steps)


# ---- losses ----


def gentle_descent(params: Any) -> torch.optim.Optimizer:
    """Adam would divide by gradients near zero, whose rounding is all they are."""
    return torch.optim.SGD(params, lr=0.1)


def _losses_rank(stage: int, accumulation: int, steps: int) -> dict[str, list[float]]:
    # Before 0.18.3 DeepSpeed's ZeRO-2 forgets micro-steps, unless they cross once.
    often = stage if accumulation == 1 or needs.has_deepspeed("0.18.3") else 3
    cases = {
        "step": config(stage, accumulation),
        "micro_step": config(often, accumulation, "micro_step"),
    }
    if stage == 3 and accumulation < 16:
        cases["shard"] = config(stage, accumulation)
        cases["shard"]["quantized_comm"]["node_shard"] = True
    found = {}
    for name, made in cases.items():
        engine = build(made, optimizer=gentle_descent)
        found[name] = [loss for step in range(steps) for loss in train_step(engine, step)]
        engine.destroy()
    return found


LONG = [
    pytest.param(k, 50, marks=[pytest.mark.slow, pytest.mark.timeout(900)]) for k in (1, 3, 4, 16)
]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("accumulation", "steps"), [(3, 10), *LONG])
def test_losses_are_those_of_crossing_in_every_micro_step(
    accumulation: int, steps: int, stage: int
) -> None:
    """To fp32 rounding; bit for bit without accumulation, and where exact weights cross once."""
    for found in run(_losses_rank, WORLD, stage, accumulation, steps, timeout=880):
        once, often = found["step"], found["micro_step"]
        assert once[-1] < 0.8 * once[0]
        if accumulation == 1:
            assert once == often
        np.testing.assert_allclose(once, often, rtol=1e-5)
        assert found.get("shard", once) == once


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


# ---- one rank per node ----


def _alone_rank() -> tuple[str, str, bool]:
    import ds_quant

    lines = []
    for accumulation in (1, 2):
        made = config(3, accumulation, scheme="qsdp", dtype="bf16")
        made["quantized_comm"]["node_size"] = 1
        engine = build(made)
        lines.append(ds_quant.report(engine)["line"])
        alone = engine.ds_quant_engine.held is None
        engine.destroy()
    return lines[0], lines[1], alone


def test_a_rank_alone_in_its_node_crosses_in_every_micro_step_and_says_so() -> None:
    for once, twice, alone in run(_alone_rank, 2):
        assert alone
        assert "are sent between nodes" not in once
        assert "gradients are sent between nodes in every micro-step" in twice
        assert "stage 1" in twice
