"""A steady step allocates nothing large, and the memory that the plugin adds is what it reports.

Allocations are seen by a dispatch mode and charged to the innermost line that is not torch's. The
values of fetched parameters are left out: DeepSpeed frees them, and the plugin makes them anew
where DeepSpeed would. The pool's own growth is read off its size.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ds_quant
from ds_quant import buffers
from tests.distributed.harness import run
from tests.distributed.models import build, settings

pytestmark = pytest.mark.distributed

PACKAGE = Path(ds_quant.__file__).parent
TORCH = Path(torch.__file__).parent
VALUES_OF_FETCHED = {"_decode_shards", "_in_shard_order", "unpack"}
WARM, STEADY = 3, 2


class Stack(nn.Module):
    """Square layers with biases; the batch is one row, so that parameters are all that is large."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).float().square().mean()


class Allocations(TorchDispatchMode):
    """Places in the package that make tensors of at least ``least`` bytes: (place, bytes)."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self._least = least
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {_place(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _place(tensor) not in known:
                nbytes, line = tensor.untyped_storage().nbytes(), _innermost()
                if nbytes >= self._least and line is not None:
                    self.seen.append((line, nbytes))
        return result


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _innermost() -> str | None:
    """Function of the package that called torch, None if something else did."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if PACKAGE in path.parents:
            return f"{path.name}:{frame.f_lineno} {frame.f_code.co_name}"
        if TORCH not in path.parents:
            return None
        frame = frame.f_back
    return None


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(1, engine.module.width, dtype=torch.bfloat16)))
    engine.step()


def allocations(
    stage: int, scheme: str, node_size: int, shape: tuple[int, int], least: int
) -> tuple[list[tuple[str, int]], list[int]]:
    """What steady steps allocate, and the bytes of the pool before and after them."""
    buffers.MIN_BYTES = least  # of this process
    block = {"scheme": scheme, "node_size": node_size, "allow_full_replica": True}
    zero = {"reduce_bucket_size": 10**9}
    engine = build(settings(stage, block, dtype="bf16", zero=zero), lambda: Stack(*shape))
    for _ in range(WARM):
        step(engine)
    pool = [ds_quant.report(engine)["buffer_bytes"]]
    with Allocations(least) as seen:
        for _ in range(STEADY):
            step(engine)
    pool.append(ds_quant.report(engine)["buffer_bytes"])
    return seen.seen, pool


SMALL = (512, 3), 1 << 15  # 0.8 M parameters, 32 kB
LARGE = (4096, 6), 1 << 20  # 100.7 M parameters, 1 MB


def check(world: int, *case: Any, timeout: float = 90) -> None:
    for seen, (before, after) in run(allocations, world, *case, timeout=timeout):
        assert [s for s in seen if s[0].split()[-1] not in VALUES_OF_FETCHED] == []
        assert before == after > 0


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("scheme", ["full_precision", "qsdp", "sdp4bit"])
@pytest.mark.parametrize(("world", "node_size"), [(2, 2), (4, 2)])
def test_a_steady_step_allocates_no_large_buffer(
    stage: int, scheme: str, world: int, node_size: int
) -> None:
    check(world, stage, scheme, node_size, *SMALL)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "scheme"), [(2, "sdp4bit"), (3, "qsdp")])
def test_a_steady_step_of_100m_parameters_allocates_less_than_1_mb_at_a_time(
    stage: int, scheme: str
) -> None:
    check(2, stage, scheme, 2, *LARGE, timeout=280)


def _resident(what: str) -> int:
    """Bytes of this process: VmRSS, or VmHWM, its peak."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(what))


def peak_memory(
    stage: int, block: dict[str, Any] | None, shape: tuple[int, int]
) -> tuple[int, int]:
    """Peak bytes of this process in steady steps, and what the plugin reports to hold."""
    zero = {"reduce_bucket_size": 10**9}
    engine = build(settings(stage, block, dtype="bf16", zero=zero), lambda: Stack(*shape))
    for _ in range(WARM):
        step(engine)
    Path("/proc/self/clear_refs").write_text("5", "utf-8")  # the peak is the present again
    for _ in range(STEADY):
        step(engine)
    report = ds_quant.report(engine) or {"kept_bytes": 0, "buffer_bytes": 0}
    return _resident("VmHWM"), report["kept_bytes"] + report["buffer_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_extra_peak_memory_of_100m_parameters_is_what_the_report_says(stage: int) -> None:
    block = {"scheme": "qsdp"}
    plain, ours = (run(peak_memory, 2, stage, b, LARGE[0], timeout=280) for b in (None, block))
    for (before, _), (after, reported) in zip(plain, ours, strict=True):
        extra = after - before
        print(
            f"ZeRO-{stage}: {before / 1e6:.0f} MB, {extra / 1e6:+.0f} MB, {reported / 1e6:.0f} MB"
        )
        assert extra == pytest.approx(reported, rel=0.05)
