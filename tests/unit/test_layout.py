"""Layout: DeepSpeed's shards, and windows of a partition."""

from __future__ import annotations

import types

import pytest
import torch

from ds_quant.kernels import wire
from ds_quant.zero.replica import _window_ranges


@pytest.mark.parametrize("bits", (1, 9, 0))
def test_planes_reject_other_widths(bits):
    with pytest.raises(ValueError, match=f"bits = {bits}.*2 to 8"):
        wire.planes(bits)


def test_negative_numel_is_refused():
    with pytest.raises(ValueError, match="numel = -1"):
        wire.wire_layout(-1, bits=8, group_size=64, has_offset=True)


@pytest.mark.parametrize("world", (1, 2, 3, 4, 7, 8, 64))
@pytest.mark.parametrize("numel", (0, 1, 5, 7, 8, 64, 1000, 1001))
def test_shards_partition_the_parameter_as_deepspeed_does(numel, world):
    ranges = [wire.shard_range(numel, world, rank) for rank in range(world)]
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(numel))
    # DeepSpeed's partition_size: the aligned numel over the ranks; only the tail is short.
    aligned = numel + (world - numel % world if numel % world else 0)
    for rank, (start, stop) in enumerate(ranges):
        assert start == min(rank * (aligned // world), numel)
        assert stop - start <= aligned // world


@pytest.mark.parametrize("rank", (-1, 4))
def test_shard_of_a_rank_outside_the_world_is_refused(rank):
    with pytest.raises(ValueError, match=r"rank = -?\d: must lie in 0..3"):
        wire.shard_range(10, 4, rank)


@pytest.mark.parametrize("ranks", [24, 40, 48, 64, 96, 128, 192, 256, 512])
def test_windows_of_a_partition_begin_at_whole_vectors(ranks: int) -> None:
    """Tried: DeepSpeed's bucket, and one that is too small to be aligned."""
    partition = 18_000_001
    group = types.SimpleNamespace(flat=torch.empty(partition * ranks, device="meta"))
    for bucket in (5 * 10**8, 1000 * ranks):
        windows = list(_window_ranges(group, ranks, bucket // ranks))
        assert all(len(window) <= bucket // ranks for window in windows)
        assert all(window.start % (4096 if bucket > 10**6 else 1000) == 0 for window in windows)
        assert [window.start for window in windows[1:]] == [w.stop for w in windows[:-1]]
        assert windows[0].start == 0 and windows[-1].stop == partition
