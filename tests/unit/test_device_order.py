"""Waits for a CUDA device, on stand-ins for one: the clock, flushes, copies."""

from __future__ import annotations

import enum
import types

import deepspeed.accelerator
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_quant.policy import timing
from ds_quant.zero import accelerator, sharded_params
from ds_quant.zero.optimizer_hooks import ReplicaGroup, owner_buckets


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The events, in order."""
    found: list[object] = []

    def read() -> float:
        found.append("read")
        return 3.0

    monkeypatch.setattr(timing.time, "perf_counter", read)
    monkeypatch.setattr(torch.cuda, "synchronize", found.append)
    return found


def test_a_clock_on_cuda_is_read_when_the_device_has_done_its_work(done: list[object]) -> None:
    device = torch.device("cuda", 1)
    now = timing.device_clock(device)
    assert (now(), now()) == (3.0, 3.0)
    assert done == [device, "read"] * 2


def test_a_clock_on_the_cpu_waits_for_nothing(done: list[object]) -> None:
    assert timing.device_clock(torch.device("cpu"))() == 3.0
    assert done == ["read"]


@pytest.mark.parametrize("is_synchronized", [False, True])
def test_dropped_values_are_kept_for_the_stream_that_used_them(
    is_synchronized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a new tensor may get their memory while that stream still reads it."""
    stand_in = types.SimpleNamespace(
        is_synchronized_device=lambda: is_synchronized,
        on_accelerator=lambda tensor: True,
        current_stream=lambda: "current",
    )
    monkeypatch.setattr(deepspeed.accelerator, "get_accelerator", lambda: stand_in)
    recorded: list[str] = []
    status = enum.Enum("Status", "AVAILABLE NOT_AVAILABLE")
    data = types.SimpleNamespace(record_stream=recorded.append)
    parameter = types.SimpleNamespace(data=data, ds_status=status.AVAILABLE)
    sharded_params.drop_values(parameter)
    assert parameter.ds_status is status.NOT_AVAILABLE
    assert recorded == ([] if is_synchronized else ["current"])


@pytest.mark.parametrize("overlap", [False, True])
def test_a_flush_waits_where_the_reduction_overlaps(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []
    accelerator = types.SimpleNamespace(
        synchronize=lambda: did.append("waited"), resolves_data_dependency=lambda: False
    )
    monkeypatch.setattr(deepspeed.accelerator, "get_accelerator", lambda: accelerator)
    optimizer = types.SimpleNamespace(overlap_comm=overlap)
    optimizer.reduce_ipg_grads = lambda: did.append("reduced")
    flush, _ = owner_buckets(optimizer)
    flush()
    assert did == ["reduced", "waited"][: 1 + overlap]


class Copies(TorchDispatchMode):
    """Records of each copy if it is asynchronous."""

    def __init__(self) -> None:
        super().__init__()
        self.async_: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default:
            self.async_.append((*args, False)[2])
        elif func is torch.ops.aten._to_copy.default:
            self.async_.append(kwargs.get("non_blocking", False))
        return func(*args, **kwargs)


def test_offloaded_weights_are_copied_to_the_device_without_a_wait(monkeypatch) -> None:
    device = torch.device("meta")
    monkeypatch.setattr(accelerator, "device", lambda: device)
    flat = torch.empty(8, dtype=torch.bfloat16, device=device)
    shard = torch.zeros(3, dtype=torch.bfloat16)
    shard.ds_numel = 3
    parameter = types.SimpleNamespace(ds_tensor=shard, ds_numel=5)
    with Copies() as copies:
        wanted = ReplicaGroup(0, flat, [], None, torch.zeros(4)).updated(range(1, 3), torch.empty)
        (values,) = sharded_params.valid_shards([parameter], rank=1)
    assert (wanted.dtype, wanted.device, wanted.numel()) == (flat.dtype, device, 2)
    assert (values.device, values.numel()) == (device, 2)
    assert copies.async_ == [True, True]
