"""The table of support: what it says works is trained, what it says is refused is refused."""

from __future__ import annotations

import traceback
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.harness import run, run_each
from tests.distributed.models import (
    QSDP,
    batch,
    build,
    digests,
    forward,
    masters,
    settings,
    train_step,
)
from tests.distributed.scenarios import Grid, initialize, seeded
from tests.distributed.support import ELSEWHERE, REFUSED, TRAINED

# Scheme -> block on four ranks, and how far a loss may be off, in first losses: about twice what
# was measured. A wrong factor of the gradients moves the last loss by a multiple of it.
BLOCKS: dict[str, tuple[dict[str, Any], float]] = {
    "qsdp": ({"scheme": "qsdp", "node_size": 1}, 0.0012),
    "sdp4bit": ({"scheme": "sdp4bit", "node_size": 2, "checksum_steps": 3}, 0.006),
}
FOLDER = Path(__file__).resolve().parent
INSTALLED = tuple(int(part) for part in version("deepspeed").split(".")[:2])


def scheme_of(place: int, stage: int) -> str:
    """In turns, so that a row with several stages meets both."""
    return tuple(BLOCKS)[(place + stage) % 2]


def outcomes(place: int, stage: int) -> dict[str | None, Any]:
    """By scheme: (losses, report), or the traceback."""
    row, found = TRAINED[place], {}
    for scheme in (None, scheme_of(place, stage)):
        block = BLOCKS[scheme][0] if scheme else None
        try:
            found[scheme] = row.train(stage, block)
        except Exception:
            found[scheme] = traceback.format_exc()
    return found


def quick(place: int, stage: int) -> bool:
    """Whether make test trains a row at this stage: one stage each, in turns; compiling is slow."""
    row = TRAINED[place]
    return row.stages[place % len(row.stages)] == stage and "compile" not in row.feature


@pytest.mark.parametrize(
    ("place", "stage"),
    [
        pytest.param(i, s, id=f"{r.feature}, {s}", marks=() if quick(i, s) else pytest.mark.slow)
        for i, r in enumerate(TRAINED)
        for s in r.stages
    ],
)
def test_what_works_trains_as_without_the_plugin(place: int, stage: int) -> None:
    row, scheme = TRAINED[place], scheme_of(place, stage)
    if stage in row.fails.get(INSTALLED, ()):
        pytest.skip(f"DeepSpeed {INSTALLED} cannot do this without the plugin either")
    losses: dict[str | None, list[list[float]]] = {None: [], scheme: []}
    for found, error in run_each(outcomes, 4, place, stage, timeout=200):
        assert error is None, error
        for name in losses:
            assert not isinstance(found[name], str), found[name]
            losses[name].append(found[name][0])
        report = found[scheme][1]
        assert report["resyncs"] == 0
        assert report["collectives"]["weights"] > 0
        exact_gradients = INSTALLED in row.exact_gradients
        assert (report["collectives"]["gradients"] == 0) == exact_gradients
        assert ("live on a subset of ranks" in report["line"]) == row.few_ranks
    expected, quantized = (np.mean(losses[name], axis=0) for name in (None, scheme))
    assert expected[-1] < 0.95 * expected[0]
    allowed = BLOCKS[scheme][1] * expected[0]
    allowed *= 4 if row.rough else 1
    np.testing.assert_allclose(quantized, expected, rtol=0, atol=allowed)
    assert losses[scheme] != losses[None]


@pytest.mark.parametrize("fp16", ["yes", "no"])
def test_a_frozen_int8_base_trains_whether_the_processor_has_fp16_or_not(fp16: str) -> None:
    (place,) = (i for i, row in enumerate(TRAINED) if row.feature == "frozen int8 base")
    for found in run(outcomes, 4, place, 3, environment={"TEST_FP16": fp16}):
        assert not any(isinstance(outcome, str) for outcome in found.values()), found


def test_the_page_lists_what_is_tested_and_nothing_else() -> None:
    lines = (FOLDER.parents[1] / "docs" / "support.md").read_text("utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    works = {(name, stages, test) for name, stages, *_, test in rows if test.startswith("`test_")}
    refused = {(name, stages) for name, stages, *_ in rows} - {row[:2] for row in works}
    trained = [(row, "test_support.py") for row in TRAINED]
    assert works == {
        (row.feature.strip(), ", ".join(map(str, row.stages)), f"`{test}`")
        for row, test in [*trained, *((row, row.test) for row in ELSEWHERE)]
    }
    assert refused - {("works", "ZeRO"), ("refused", "ZeRO"), ("---", "---")} == {
        (row.feature, ", ".join(map(str, row.stages))) for row in REFUSED
    }
    for row in TRAINED:  # an older DeepSpeed that cannot is named
        for (major, minor), stages in row.fails.items():
            start = f"| {row.feature.strip()} | {', '.join(map(str, row.stages))} |"
            (line,) = [line for line in lines if line.startswith(start)]
            failing = ", ".join(map(str, stages))
            assert f"DeepSpeed {major}.{minor} cannot under ZeRO-{failing}" in line


def test_every_test_that_the_page_names_exists() -> None:
    assert [row.test for row in ELSEWHERE if not (FOLDER / row.test).exists()] == []


# ---- several engines ----

PAIRS = [
    (2, {"scheme": "qsdp", "node_size": 1}), (2, {"scheme": "sdp4bit", "node_size": 2}),
    (3, {"scheme": "qsdp_w4g4", "node_size": 1}), (3, {"scheme": "sdp4bit", "node_size": 2}),
    (1, None), (2, None), (3, None),
]  # fmt: skip
Bits = list[tuple[list[float], dict[str, str]]]


def one_at_a_time() -> Bits:
    found = []
    for seed, (stage, block) in enumerate(PAIRS):
        engine = build(settings(stage, block, dtype="bf16", accumulation=2), seed=seed)
        losses = [loss for step in range(3) for loss in train_step(engine, step, seed)]
        found.append((losses, digests(masters(engine))))
        engine.destroy()
    return found


def in_turn() -> Bits:
    engines = [
        build(settings(stage, block, dtype="bf16", accumulation=2), seed=seed)
        for seed, (stage, block) in enumerate(PAIRS)
    ]
    losses: list[list[float]] = [[] for _ in engines]
    for step, micro, (seed, engine) in product(range(3), range(2), enumerate(engines)):
        loss = forward(engine, step, micro, seed=seed)
        engine.backward(loss)
        engine.step()
        losses[seed].append(float(loss.detach()))
    return [(found, digests(masters(e))) for found, e in zip(losses, engines, strict=True)]


def test_engines_trained_in_turn_equal_their_separate_runs() -> None:
    """Two schemes, two stages each, and three engines without the plugin."""
    alone, together = run(one_at_a_time, 4, timeout=120), run(in_turn, 4, timeout=120)
    assert together == alone
    assert len({tuple(losses) for losses, _ in alone[0]}) == len(PAIRS)


def copies(stage: int) -> dict[str, str]:
    """Master weights of a model that tensor-parallel neighbours hold whole, each reducing it in a
    data-parallel group of its own. Neighbours see the same batches.
    """
    grid = Grid(2)
    engine = initialize(seeded(), settings(stage, QSDP), mpu=grid)
    for step in range(4):
        engine.backward(engine(*batch(0, step, 0, grid.get_data_parallel_rank())))
        engine.step()
    return digests(masters(engine))


def test_tensor_parallel_ranks_keep_copies_of_a_parameter_equal() -> None:
    """Gradients of copies are equal, and take equal random bits in their groups."""
    weights = run(copies, 4, 2)
    assert weights[0] == weights[1] and weights[2] == weights[3] == weights[0]
