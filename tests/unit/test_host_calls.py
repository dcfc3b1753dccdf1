"""Lossless differences under ZeRO-1 and 2: what they cost the host, and whose message is wrong. The
other ranks send what this one sends.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_quant.comm.traffic import Traffic
from ds_quant.kernels import native
from ds_quant.zero.lossless import Window, replica_posts
from ds_quant.zero.optimizer_hooks import ReplicaGroup
from ds_quant.zero.replica import _windows
from tests import needs
from tests.unit.links import Echo, calls_of

FEW, MANY, RANK = 4, 64, 2


def replica(ranks: int) -> tuple[Any, list[Window]]:
    """A replica whose partitions are equal, and two windows of them."""
    draw = torch.Generator().manual_seed(0)
    held = torch.randn(5000, generator=draw).bfloat16()
    master = held.float() + 1e-3 * torch.randn(5000, generator=draw)
    group = ReplicaGroup(0, held.repeat(ranks), [], None, master)
    fabric = Echo(ranks, RANK)
    within = (range(3000), range(3000, 5000))
    return group, [Window(group, fabric, part) for part in within]


@needs.native_kernels
def test_lossless_differences_of_all_ranks_take_one_call_per_message(monkeypatch) -> None:
    decoded: list[int] = []
    original = native.function

    def function(name: str) -> Callable[..., None]:
        def run(where: int, count: int, threads: int) -> None:
            if name == "dsq_lossless_decode":
                decoded.append(count)
            original(name)(where, count, threads)

        return run

    monkeypatch.setattr(native, "function", function)
    spent = []
    for ranks in (FEW, MANY):
        group, windows = replica(ranks)
        before = group.flat.clone()

        def step(group: Any = group, windows: Any = windows, before: Any = before) -> None:
            group.flat.copy_(before)
            for post in replica_posts(windows, Traffic()):
                post().wait()

        spent.append(calls_of(step))
        assert torch.equal(group.flat, group.master.bfloat16().repeat(ranks))
        assert decoded == [ranks] * 4, "two messages in two steps"
        decoded.clear()
    assert spent[0] == spent[1]


@pytest.mark.parametrize("ranks", [24, 40, 48, 64, 96, 128, 192, 256, 512])
def test_windows_of_a_partition_begin_at_whole_vectors(ranks: int) -> None:
    """Of DeepSpeed's bucket, and of one that is too small for any."""
    partition = 18_000_001
    group = types.SimpleNamespace(flat=torch.empty(partition * ranks, device="meta"))
    for bucket in (5 * 10**8, 1000 * ranks):
        windows = list(_windows(group, ranks, bucket // ranks))
        assert all(len(window) <= bucket // ranks for window in windows)
        assert all(window.start % (4096 if bucket > 10**6 else 1000) == 0 for window in windows)
        assert [window.start for window in windows[1:]] == [w.stop for w in windows[:-1]]
        assert windows[0].start == 0 and windows[-1].stop == partition


@pytest.mark.parametrize("damaged", [0, 1, 3])
def test_an_error_names_the_rank_whose_weights_were_changed(damaged: int) -> None:
    group, windows = replica(FEW)
    group.flat.view(FEW, -1)[damaged, 3100] += 1
    first, second = replica_posts(windows, Traffic())
    for post in (first, second):
        post().wait()
    found = windows[0].fabric.findings.first()
    assert (found.role, found.sender) == ("weights", damaged)
    assert found.problem.startswith("cannot be decoded on rank {} (lossless message: wrong che")
