"""Buffers that DeepSpeed frees are not kept alive by the plugin."""

from __future__ import annotations

from typing import Any

import pytest
from torch.multiprocessing.reductions import StorageWeakRef

from tests.distributed.harness import run
from tests.distributed.models import QSDP, build, settings, train_step


def buffers_alive_after_a_step(stage: int, zero: dict[str, Any]) -> list[bool]:
    """Of the buckets (``reduce_bucket_size`` elements each) that DeepSpeed releases in a step."""
    engine = build(settings(stage, QSDP, dtype="bf16", zero=zero))
    optimizer = engine.optimizer
    release = optimizer._release_ipg_buffers
    seen: list[StorageWeakRef] = []

    def watched() -> None:
        for bucket in optimizer.ipg_buckets.values():
            seen.extend(StorageWeakRef(buffer.untyped_storage()) for buffer in bucket.buffer)
        release()

    optimizer._release_ipg_buffers = watched
    train_step(engine, 0)
    return [not reference.expired() for reference in seen]


@pytest.mark.parametrize("zero", [{}, {"overlap_comm": True}], ids=["plain", "overlap"])
@pytest.mark.parametrize("stage", [1, 2])
def test_gradient_buckets_are_freed_at_the_end_of_a_backward(
    stage: int, zero: dict[str, Any]
) -> None:
    """By default a bucket is 1 GB of bf16, which must not be there next to the optimizer step."""
    for alive in run(buffers_alive_after_a_step, 2, stage, zero):
        assert alive and not any(alive)


def alive_after_its_release() -> bool:
    """Whether a parameter's values are, while the handle of its gather is."""
    params = list(build(settings(3, QSDP, dtype="bf16")).module.parameters())
    handle = params[0].all_gather_coalesced(params)
    handle.wait()
    values = StorageWeakRef(params[0].data.untyped_storage())
    params[0].partition()
    alive = not values.expired()
    handle.wait()  # still idempotent
    return alive


def test_a_released_parameter_is_freed_although_others_of_its_gather_are_in_use() -> None:
    assert run(alive_after_its_release, 2) == [False, False]
