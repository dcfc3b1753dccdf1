"""What an engine must ask of a CUDA device, seen without one: kernels are compiled before the first
step. The order of its operations: see test_streams.py.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_quant.comm.reduction_plan import presumed_pace
from ds_quant.comm.topology import Topology
from ds_quant.config.schema import QuantizedCommConfig
from tests.distributed.harness import run
from tests.distributed.models import QSDP, build, settings


def _rehearsed_rank() -> dict[str, list[tuple[str, bool]]]:
    """By device of the parameters, which devices were rehearsed on, and whether for the engine."""
    from ds_quant.zero import attach

    found = {}
    device_of, seen = attach.hooks, []

    def noted(plugin: Any, device: torch.device) -> None:
        seen.append((device.type, plugin))

    attach.rehearse = noted
    for kind in ("cpu", "cuda"):
        device = torch.device(kind)
        attach.hooks = SimpleNamespace(**vars(device_of) | {"device": lambda d=device: d})
        seen.clear()
        engine = build(settings(2, QSDP))
        found[kind] = [(where, plugin is engine.ds_quant_plugin) for where, plugin in seen]
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_kernels_are_rehearsed_once_on_cuda_where_something_is_sent(world: int) -> None:
    for found in run(_rehearsed_rank, world):
        assert found == {"cpu": [], "cuda": [("cuda", True)] if world > 1 else []}


def _pace_on(device: str, backend: str) -> float:
    from ds_quant.zero import plugin as module

    module.hooks.device = lambda: torch.device(device)
    module.backend = lambda: backend
    scheme = QuantizedCommConfig(scheme="sdp4bit").to_scheme()
    three = lambda: 2  # noqa: E731
    alone = SimpleNamespace(module=torch.nn.Linear(2, 2), zero_optimization_stage=three)
    return module.Plugin(alone, scheme, Topology(world=1, node_size=1)).slicing.pace


def test_slices_are_those_of_the_device_and_of_what_carries_its_tensors() -> None:
    for where in (("cpu", "gloo"), ("cuda", "nccl"), ("cuda", "gloo")):
        (pace,) = run(_pace_on, 1, *where)
        assert pace == presumed_pace(torch.device(where[0]), where[1])


def _rehearsing_rank() -> tuple[list[str], list[tuple[int, int]]]:
    """Whether kernels were compiled or found, and (ranks, bytes) of what was sent on links."""
    from ds_quant.comm.transport import Link
    from ds_quant.zero import warmup

    rank, seen = torch.distributed.get_rank(), []
    folder = Path(os.environ["TEST_SCRATCH"])

    def compiling(plugin: Any, device: torch.device) -> None:
        first = rank - rank % 2
        seen.append("found" if (folder / f"by {first}").exists() else "compiles")
        if rank == first:
            time.sleep(0.5)
            (folder / f"by {rank}").touch()

    warmup.warm_up = compiling
    sent, posted = [], Link._posted

    def noted(self: Link, payload: torch.Tensor, *args: Any) -> Any:
        sent.append((self.size, payload.numel()))
        return posted(self, payload, *args)

    engine = build(settings(3, {"scheme": "sdp4bit", "node_size": 2}))
    plugin, Link._posted = engine.ds_quant_plugin, noted
    before = dict(plugin.traffic.collectives)
    for _ in range(2):  # as by two engines of a process
        warmup.rehearse(plugin, torch.device("cpu"))
    assert plugin.traffic.collectives == before
    return seen, sent


def test_the_first_rank_of_a_node_compiles_and_every_link_is_used() -> None:
    for rank, (seen, sent) in enumerate(run(_rehearsing_rank, 4)):
        assert seen == ["found" if rank % 2 else "compiles", "found"]
        assert {size for size, _ in sent} == {2, 4}  # node, places, world
        assert sent == [(size, nbytes) for size, _ in sent[::2] for nbytes in (1, size)]
