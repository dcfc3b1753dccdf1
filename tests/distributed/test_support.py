"""Features of the table of behaviours that ZeRO trains on four ranks, and engines side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ds_quant
from tests import needs
from tests.distributed.behaviours import EXPERTS, SEQUENCES, SLICED, trained, unclipped
from tests.distributed.cells import Trains
from tests.distributed.harness import of_all_ranks, on_ranks
from tests.distributed.models import (
    FULL,
    QSDP,
    Run,
    engine_of,
    forward,
    master_bits,
    masters,
    train_step,
)
from tests.distributed.rows import Step, Table, Way
from tests.distributed.scenarios import Copied, neighbourly
from tests.thin import thinned

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

# Scheme -> block on four ranks, and how far a loss may be off, in first losses: about twice what
# was measured. A wrong factor of the gradients moves the last loss by a multiple of it.
BLOCKS: dict[str, tuple[dict[str, Any], float]] = {
    "qsdp": ({"scheme": "qsdp", "node_size": 1}, 0.0012),
    "sdp4bit": ({"scheme": "sdp4bit", "node_size": 2, "checksum_steps": 3}, 0.006),
}
INSTALLED = tuple(int(part) for part in version("deepspeed").split(".")[:2])
TABLE = Table(__name__)
CASES: dict[tuple[str, int], Trains] = {}


def near(run: Run, other: Run, *, cell: Trains, allowed: float) -> None:
    report = other.report
    assert report["resyncs"] == 0 < report["collectives"]["weights"]
    exact_gradients = INSTALLED in cell.exact_gradients
    assert (report["collectives"]["gradients"] == 0) == exact_gradients
    assert ("live on a subset of ranks" in report["line"]) == cell.few_ranks
    assert run.losses[-1] < 0.95 * run.losses[0] and other.losses != run.losses
    allowed *= (4 if cell.rough else 1) * run.losses[0]
    np.testing.assert_allclose(other.losses, run.losses, rtol=0, atol=allowed)


for name, cell in trained():
    # make test trains every feature at its riskiest stage with the riskiest scheme. Compiling is
    # slow.
    for stage in cell.stages:
        is_riskiest = stage == cell.how.riskiest_stage
        for scheme, (block, allowed) in BLOCKS.items():
            is_named = scheme == ("sdp4bit" if is_riskiest else "qsdp")
            title = f"{name}, ZeRO-{stage}" if is_named else f"{scheme}: {name}, ZeRO-{stage}"
            CASES[title, stage] = cell
            TABLE.add(
                title, Way(block=None), Way(block=block),
                feature=replace(cell.how, stages=(stage,)), of_mean=True, alike=False, world=4,
                holds=partial(near, cell=cell, allowed=allowed), steps=6,
                quick=(stage,) if is_named and is_riskiest and "compile" not in name else (),
            )  # fmt: skip


# ---- divisors of gradients ----


def moving(train: Step) -> Step:
    """By how much a step moves each weight, instead of its loss."""

    def step_with(engine: DeepSpeedEngine, step: int, seed: int) -> list[float]:
        before = masters(engine)
        train(engine, step, seed)
        return [float(np.abs(after - before[n]).sum()) for n, after in masters(engine).items()]

    return step_with


def moved_alike(run: Run, other: Run, *, few_ranks: bool) -> None:
    """Up to the order of sums. Adam forgives any factor of gradients, and so does clipping; plain
    descent moves every weight by what DeepSpeed divides by.
    """
    assert ("live on a subset of ranks" in other.report["line"]) == few_ranks
    assert min(run.losses) > 0
    np.testing.assert_allclose(other.losses, run.losses, rtol=1e-4)


for name, stage, since, how in (
    ("experts", 2, "0.17", EXPERTS[2]),
    ("tensor parallel", 2, "0.17", SLICED),
    ("tensor parallel", 3, "0.18", SLICED),  # before it weights move by unwritten memory
    ("sequence parallel", 2, "0.17", {"top": SEQUENCES}),
    # Sequence parallel ranks share the weights: all of them reduce.
    ("sequence parallel", 3, "0.19", {"top": SEQUENCES}),
):
    TABLE.add(
        f"divisors of {name}, ZeRO-{stage}", Way(block=None), Way(block={**FULL, "node_size": 2}),
        holds=partial(moved_alike, few_ranks=(name, stage) != ("sequence parallel", 3)),
        feature=unclipped(
            stage, dtype="fp32", since=since,
            **{**how, "step": moving(how.get("step", train_step))},
        ),
        alike=False, world=4, steps=1,
    )  # fmt: skip


@pytest.mark.parametrize(("title", "stage"), TABLE.params())
def test_what_works_trains_as_without_the_plugin(title: str, stage: int) -> None:
    cell = CASES.get((title, stage))
    if cell is not None and stage in cell.fails.get(INSTALLED, ()):
        pytest.skip(f"DeepSpeed {INSTALLED} cannot do this without the plugin either")
    TABLE.check(title, stage)


@pytest.mark.parametrize("has_fp16", thinned([True, False], lambda has_fp16: not has_fp16))
@on_ranks(4)
def test_a_frozen_int8_base_trains_whether_the_processor_has_fp16_or_not(has_fp16: bool) -> None:
    """As DeepSpeed alone does on such a processor."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: has_fp16
    cell = dict(trained())["frozen int8 base"]
    plain = of_mean(cell.how.train(3, None, 6))
    for block, allowed in BLOCKS.values():
        near(plain, of_mean(cell.how.train(3, block, 6)), cell=cell, allowed=allowed)


def of_mean(run: Run) -> Run:
    """Return ``run`` with losses averaged over the ranks. A collective."""
    ranks = of_all_ranks(run.losses)
    return replace(run, losses=np.mean(ranks, axis=0).tolist())


# ---- several engines ----

PAIRS = [
    (2, {"scheme": "qsdp", "node_size": 1}), (2, {"scheme": "sdp4bit", "node_size": 2}),
    (3, {"scheme": "qsdp_w4g4", "node_size": 1}), (3, {"scheme": "sdp4bit", "node_size": 2}),
    (1, None), (2, None), (3, None),
]  # fmt: skip


@on_ranks(4, timeout=120)
def test_engines_trained_in_turn_equal_their_separate_runs() -> None:
    """Two schemes, two stages each, and three engines without the plugin."""

    def made(seed: int) -> Any:
        return engine_of(*PAIRS[seed], accumulation=2, seed=seed)

    alone = []
    for seed in range(len(PAIRS)):
        engine = made(seed)
        losses = [loss for step in range(3) for loss in train_step(engine, step, seed)]
        alone.append((losses, master_bits(engine)))
        engine.destroy()
    engines, in_turn = [made(seed) for seed in range(len(PAIRS))], [[] for _ in PAIRS]
    for step, micro, (seed, engine) in product(range(3), range(2), enumerate(engines)):
        loss = forward(engine, step, micro, seed=seed)
        engine.backward(loss)
        engine.step()
        in_turn[seed].append(float(loss.detach()))
    bits = [master_bits(engine) for engine in engines]
    assert list(zip(in_turn, bits, strict=True)) == alone
    assert len({tuple(losses) for losses in in_turn}) == len(PAIRS)


@on_ranks(4)
def test_tensor_parallel_ranks_keep_copies_of_a_parameter_equal() -> None:
    """Gradients of copies are equal, and take equal random bits in their groups."""
    engine = engine_of(2, QSDP, Copied, dtype="fp32")
    for step in range(4):
        neighbourly(engine, step, 0)
    weights = of_all_ranks(master_bits(engine))
    assert weights == [weights[0]] * 4


# ---- engines with different settings of backend: each uses its own kernels ----

LINES = {"auto": "; C++ kernels", "torch": "; torch kernels"}
USED = {"auto": {"C++"}, "torch": {"torch"}}


def counted() -> Counter[str]:
    """Calls of the C++ kernels and of the torch reference from here on."""
    from ds_quant.kernels import lossless, native, reference

    calls, find = Counter[str](), native.function

    def counting(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls[kind] += 1
            return function(*args, **options)

        return call

    native.function = lambda name: counting("C++", find(name))
    for name in ("encode", "decode", "decode_sum", "rotate", "unrotate_"):
        setattr(reference, name, counting("torch", getattr(reference, name)))
    for name in ("encode", "decode"):
        setattr(lossless, name, counting("torch", getattr(lossless, name)))
    return calls


@needs.native_kernels
@pytest.mark.parametrize(
    ("stage", "scheme", "backends"),
    [
        (2, "sdp4bit", ("torch", "auto")), (3, "sdp4bit", ("auto", "torch")),
        (2, "lossless_w_g4", ("auto", "torch")),
    ],
)  # fmt: skip
@on_ranks(4)
def test_each_engine_uses_its_own_kernels(
    stage: int, scheme: str, backends: tuple[str, ...]
) -> None:
    """Engines that take turns; they end with the same weights."""
    calls, engines = counted(), {}
    block = {"scheme": scheme, "node_size": 2, "allow_full_replica": True}
    for backend in backends:  # the value "auto" is not written out: it means others to accelerate
        key = {"backend": backend} if backend == "torch" else {}
        engines[backend] = engine_of(stage, block | key)
    for step, (backend, engine) in product(range(2), engines.items()):
        calls.clear()
        train_step(engine, step)
        assert LINES[backend] in ds_quant.report(engine)["line"] and set(calls) == USED[backend]
    one, other = (master_bits(engine) for engine in engines.values())
    assert one == other
