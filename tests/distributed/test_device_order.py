"""What an engine must ask of a CUDA device, seen without one: kernels are compiled before the first
step. The order of its operations: see test_streams.py.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_quant.comm.reduction_plan import presumed_pace
from ds_quant.comm.topology import Topology
from ds_quant.config.schema import QuantizedCommConfig
from tests.distributed.harness import on_ranks, scratch
from tests.distributed.models import QSDP, engine_of


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_kernels_are_rehearsed_once_on_cuda_where_something_is_sent(world: int, kind: str) -> None:
    from ds_quant.zero import attach

    seen: list[tuple[Any, torch.device]] = []
    attach.rehearse = lambda *args: seen.append(args)
    device = torch.device(kind)
    attach.hooks = SimpleNamespace(**vars(attach.hooks) | {"device": lambda: device})
    engine = engine_of(2, QSDP)
    rehearsed = kind == "cuda" and world > 1
    assert seen == ([(engine.ds_quant_plugin, device)] if rehearsed else [])


@on_ranks(1)
def test_slices_are_those_of_the_device_and_of_what_carries_its_tensors() -> None:
    from ds_quant.zero import plugin as module

    scheme = QuantizedCommConfig(scheme="sdp4bit").to_scheme()
    alone = SimpleNamespace(module=torch.nn.Linear(2, 2), zero_optimization_stage=lambda: 2)
    for kind, backend in (("cpu", "gloo"), ("cuda", "nccl"), ("cuda", "gloo")):
        module.hooks.device = lambda kind=kind: torch.device(kind)
        module.backend = lambda backend=backend: backend
        plugin = module.Plugin(alone, scheme, Topology(world=1, node_size=1))
        assert plugin.slicing.pace == presumed_pace(torch.device(kind), backend)


@on_ranks(4)
def test_the_first_rank_of_a_node_compiles_and_every_link_is_used() -> None:
    from ds_quant.comm.transport import Link
    from ds_quant.zero import warmup

    rank, seen, sent, posted = torch.distributed.get_rank(), [], [], Link._posted
    first = rank - rank % 2

    def compiling(plugin: Any, device: torch.device) -> None:
        seen.append("found" if (scratch() / f"by {first}").exists() else "compiles")
        if rank == first:
            time.sleep(0.5)
            (scratch() / f"by {rank}").touch()

    def noted(self: Link, payload: torch.Tensor, *args: Any) -> Any:
        sent.append((self.size, payload.numel()))
        return posted(self, payload, *args)

    plugin = engine_of(3, {"scheme": "sdp4bit", "node_size": 2}).ds_quant_plugin
    warmup.warm_up, Link._posted = compiling, noted
    before = dict(plugin.traffic.collectives)
    for _ in range(2):  # as by two engines of a process
        warmup.rehearse(plugin, torch.device("cpu"))
    assert plugin.traffic.collectives == before
    assert seen == ["found" if rank % 2 else "compiles", "found"]
    assert {size for size, _ in sent} == {2, 4}  # node, places, world
    assert sent == [(size, nbytes) for size, _ in sent[::2] for nbytes in (1, size)]
