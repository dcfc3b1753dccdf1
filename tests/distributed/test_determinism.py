"""Equal seeds give equal bits, whatever the order, the buckets and uninitialised memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.harness import run
from tests.distributed.models import (
    PREFETCH,
    QSDP,
    Run,
    digests,
    settings,
    train,
)
from tests.thin import thinned

pytestmark = pytest.mark.distributed

STAGES = (1, 2, 3)
STEPS = 4


def filled(stage: int, block: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses of a run as usual, then of one whose torch.empty is full of NaN."""
    config = settings(stage, block, dtype="bf16", accumulation=2)
    usual = train(config, STEPS).losses
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    return usual, train(config, STEPS).losses


@pytest.mark.parametrize(("stage", "block"), [(2, QSDP), (3, QSDP)], ids=str)
def test_uninitialised_memory_is_never_read(stage: int, block: dict[str, Any]) -> None:
    for usual, with_nan in run(filled, 3, stage, block):
        assert usual == with_nan


ALIVE = {"stage3_max_live_parameters": 10**9}
ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "default": {},
    "prefetch one layer": PREFETCH,
    "prefetch everything": {"stage3_prefetch_bucket_size": 200_000, **ALIVE},
    "weights kept for backward": {"stage3_max_reuse_distance": 10**9, **ALIVE},
    "small gradient buckets": {"reduce_bucket_size": 20_000},
    "overlap": {"overlap_comm": True},
    "no overlap": {"overlap_comm": False},
    "one gather per tensor": {"stage3_allgather_sequential": True},
}


def arranged() -> dict[str, Run]:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields.items()
    keys = {field.alias or name for name, field in fields}  # DeepSpeed 0.17 lacks some
    return {
        name: train(settings(3, QSDP, dtype="bf16", zero=zero), STEPS)
        for name, zero in ARRANGEMENTS.items()
        if zero.keys() <= keys
    }


def test_zero3_bits_do_not_depend_on_what_travels_together() -> None:
    for found in run(arranged, 3):
        gathers = {n: r.report["collectives"]["weights"] for n, r in found.items()}
        reductions = {n: r.report["collectives"]["gradients"] for n, r in found.items()}
        assert gathers["prefetch everything"] < gathers["prefetch one layer"] < gathers["default"]
        assert gathers["weights kept for backward"] < gathers["default"]
        assert reductions["small gradient buckets"] > reductions["default"]
        for name, arrangement in found.items():
            assert arrangement.losses == found["default"].losses, name
            assert digests(arrangement.weights) == digests(found["default"].weights), name


def sliced(stage: int) -> tuple[list[float], list[float], list[float]]:
    """Losses on two levels: as usual, with everything that changes no bit, in five slices."""
    block = {**QSDP, "node_size": 2}
    same = {"backend": "torch", "payload_checksum": True, "slices": 1}
    runs = (block, {"overlap_comm": False}), (block | same, {"overlap_comm": True}), (
        block | {"slices": 5}, {},
    )  # fmt: skip
    usual, equal, other = (train(settings(stage, b, zero=zero), STEPS).losses for b, zero in runs)
    return usual, equal, other


@pytest.mark.parametrize("stage", thinned(STAGES, lambda stage: stage == 2))
def test_slices_change_bits_and_overlap_backend_and_checksums_do_not(stage: int) -> None:
    """As docs/running.md says."""
    for usual, equal, other in run(sliced, 4, stage):
        assert usual == equal != other


# ---- copies of a parameter in several groups ----


def copies(stage: int) -> dict[str, str]:
    """Master weights of a model that tensor-parallel neighbours hold whole, each reducing it in a
    data-parallel group of its own. Neighbours see the same batches.
    """
    from tests.distributed.models import Regression, batch, masters
    from tests.distributed.scenarios import Grid, initialize, seeded

    grid = Grid(2)
    engine = initialize(seeded(Regression), settings(stage, QSDP), mpu=grid)
    for step in range(STEPS):
        engine.backward(engine(*batch(0, step, 0, grid.get_data_parallel_rank())))
        engine.step()
    return digests(masters(engine))


def test_tensor_parallel_ranks_keep_copies_of_a_parameter_equal() -> None:
    """Gradients of copies are equal, and take equal random bits in their groups."""
    weights = run(copies, 4, 2)
    assert weights[0] == weights[1] and weights[2] == weights[3] == weights[0]
