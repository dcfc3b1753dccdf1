"""What an engine must ask of a CUDA device, seen without one: gathers wait for the optimizer step,
and kernels are compiled before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.distributed.harness import run
from tests.distributed.models import QSDP, build, settings, train_step

pytestmark = pytest.mark.distributed


def _ordered_rank() -> list[list[str]]:
    """What three steps of ZeRO-3 do, in order."""
    from ds_quant.comm.transport import Link
    from ds_quant.zero import hooks

    did: list[str] = []

    class Noting(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            result = super().step(*args, **kwargs)
            did.append("write")
            return result

    class Barrier:
        def record(self) -> None:
            did.append("record")

        def wait(self) -> None:
            did.append("wait")

    def optimizer(params: Iterable[Any]) -> torch.optim.Optimizer:
        return Noting(params, lr=0.1)

    gather = Link.all_gather

    def noted(self: Link, payload: torch.Tensor, *, role: str) -> Any:
        did.append("gather")
        return gather(self, payload, role=role)

    hooks.StepBarrier, Link.all_gather = Barrier, noted
    engine = build(settings(3, QSDP), optimizer=optimizer)
    steps = []
    for step in range(3):
        did.clear()
        train_step(engine, step)
        steps.append(list(did))
    return steps


def test_every_gather_waits_for_what_the_last_step_wrote() -> None:
    for steps in run(_ordered_rank, 2):
        for did in steps:
            last_write = len(did) - did[::-1].index("write")
            assert did[last_write:] == ["record"], "after the optimizer, and before the next fetch"
            assert "wait" in did[: did.index("gather")]


def _rehearsed_rank() -> dict[str, list[tuple[str, bool]]]:
    """By device of the parameters, which devices were rehearsed on, and whether for the engine."""
    from ds_quant.zero import attach

    found = {}
    device_of, seen = attach.hooks, []

    def noted(binding: Any, device: torch.device) -> None:
        seen.append((device.type, binding))

    attach.warm_up = noted
    for kind in ("cpu", "cuda"):
        device = torch.device(kind)
        attach.hooks = SimpleNamespace(**vars(device_of) | {"device": lambda d=device: d})
        seen.clear()
        engine = build(settings(2, QSDP))
        found[kind] = [(where, binding is engine.ds_quant_engine) for where, binding in seen]
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_kernels_are_rehearsed_once_on_cuda_where_something_is_sent(world: int) -> None:
    for found in run(_rehearsed_rank, world):
        assert found == {"cpu": [], "cuda": [("cuda", True)] if world > 1 else []}
