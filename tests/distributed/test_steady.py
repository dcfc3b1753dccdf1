"""A steady step allocates nothing large, and the memory that the plugin adds is what it reports.

Allocations are seen by a dispatch mode and charged to the innermost line that is not torch's. The
values of fetched parameters are left out: DeepSpeed frees them, and the plugin makes them anew
where DeepSpeed would. The pool's own growth is read off its size.
"""

from __future__ import annotations

import resource
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ds_quant
from ds_quant.comm import transport
from tests.distributed.harness import on_ranks, run
from tests.distributed.models import engine_of
from tests.thin import thinned

PACKAGE = Path(ds_quant.__file__).parent
TORCH = Path(torch.__file__).parent
VALUES_OF_FETCHED = {"new_values", "unpack"}
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
        if PACKAGE in path.parents and frame.f_code.co_name != "<listcomp>":  # none from 3.12 on
            return f"{path.name}:{frame.f_lineno} {frame.f_code.co_name}"
        if not {PACKAGE, TORCH} & set(path.parents):
            return None
        frame = frame.f_back
    return None


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(1, engine.module.width, dtype=torch.bfloat16)))
    engine.step()


LEAST = 1 << 15  # bytes
LARGE = 4096, 6  # 100.7 M parameters


@pytest.mark.parametrize(
    ("world", "stage", "scheme"),
    thinned(
        [
            *product([4], [1, 2, 3], ["full_precision", "qsdp", "sdp4bit"]),
            (2, 1, "sdp4bit"), (2, 2, "qsdp"), (2, 3, "sdp4bit"),
        ],
        lambda world, stage, scheme: world == 4 and scheme != "full_precision",
    ),
)  # fmt: skip
@on_ranks()
def test_a_steady_step_allocates_no_large_buffer(world: int, stage: int, scheme: str) -> None:
    """On two nodes of two ranks, and on one node. 0.8 M parameters."""
    transport.MIN_BYTES = LEAST  # of this process
    block = {"scheme": scheme, "node_size": 2, "allow_full_replica": True}
    engine = engine_of(stage, block, lambda: Stack(512, 3), zero={"reduce_bucket_size": 10**9})
    for _ in range(WARM):
        step(engine)
    pool = ds_quant.report(engine)["buffer_bytes"]
    with Allocations(LEAST) as seen:
        for _ in range(STEADY):
            step(engine)
    assert [s for s in seen.seen if s[0].split()[-1] not in VALUES_OF_FETCHED] == []
    assert ds_quant.report(engine)["buffer_bytes"] == pool > 0


def highest_use(stage: int, block: dict[str, Any] | None) -> tuple[int, int]:
    """Most bytes that a rank's process has held at once, and the buffers that are reported."""
    zero = {"reduce_bucket_size": 10**9}
    engine = engine_of(stage, block, lambda: Stack(*LARGE), zero=zero)
    for _ in range(WARM + 1):
        step(engine)
    report = ds_quant.report(engine) or {"buffer_bytes": 0}
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, report["buffer_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "scheme"), [(2, "sdp4bit"), (3, "sdp4bit"), (3, "qsdp")])
def test_a_process_of_100m_parameters_takes_as_much_more_as_is_reported(
    stage: int, scheme: str
) -> None:
    plain, ours = (
        run(highest_use, 2, stage, block, timeout=280) for block in (None, {"scheme": scheme})
    )
    for (before, _), (after, reported) in zip(plain, ours, strict=True):
        assert after - before == pytest.approx(reported, rel=0.05)
