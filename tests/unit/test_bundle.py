"""Bundles of small tensors: their rows are the members' ceil-division shards, side by side."""

from __future__ import annotations

import pytest
import torch

from ds_quant.codec.codec import CastCodec, GroupCodec
from ds_quant.comm.message import MAX_NUMEL, Copies, Cuts, bundle_of, joined, sort_out
from ds_quant.kernels.wire import ceil_div, shard_range

NUMELS = (5, 1, 12, 0, 7)


def members() -> list[torch.Tensor]:
    values = torch.arange(1, 1 + sum(NUMELS), dtype=torch.float32)
    return list(values.split(NUMELS))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_row_of_a_rank_is_its_shard_of_every_member(ranks: int) -> None:
    bundle = bundle_of(NUMELS, ranks)
    packed = bundle.pack(members())
    assert packed.shape == (bundle.numel,) and bundle.numel % ranks == 0
    for rank in range(ranks):
        start, stop = shard_range(bundle.numel, ranks, rank)
        shards = bundle.unpack_shard(packed[start:stop], rank)
        for member, shard in zip(members(), shards, strict=True):
            first, last = shard_range(member.numel(), ranks, rank)
            assert torch.equal(shard, member[first:last])


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shards_end_to_end_unpack_to_the_members(ranks: int) -> None:
    """As a gather brings them: every rank's shards with whatever its padding holds."""
    bundle, rows = bundle_of(NUMELS, ranks), []
    for rank in range(ranks):
        for member in members():
            width = ceil_div(member.numel(), ranks)
            first, last = shard_range(member.numel(), ranks, rank)
            rows += [member[first:last], torch.full((width - (last - first),), float("nan"))]
    found = bundle.unpack(torch.cat(rows))
    assert all(torch.equal(a, b) for a, b in zip(found, members(), strict=True))
    assert len({t.untyped_storage().data_ptr() for t in found if t.numel()}) == 4


def test_only_small_tensors_in_full_precision_are_bundled_by_dtype() -> None:
    bf16, fp32 = (CastCodec(d) for d in (torch.bfloat16, torch.float32))
    quantized = GroupCodec()
    codecs = [bf16, quantized, fp32, bf16, bf16]
    alone, bundles = sort_out([3, 3, 3, MAX_NUMEL + 1, MAX_NUMEL], codecs, ranks=2)
    assert alone == [1, 3]
    assert [(b.numels, m) for b, m in bundles] == [((3, MAX_NUMEL), [0, 4]), ((3,), [2])]


def test_cuts_are_views_of_every_range() -> None:
    """With gaps, one range of no elements, and not in order."""
    flat = torch.arange(12.0)
    found = Cuts([(6, 7), (1, 3), (3, 5), (5, 5), (9, 11)]).views(flat)
    assert [v.tolist() for v in found] == [[6], [1, 2], [3, 4], [], [9, 10]]
    assert found[2].data_ptr() == flat[3:].data_ptr()
    assert Cuts([]).views(flat) == []


def test_scattered_ranges_are_joined_and_overwritten_where_they_lie() -> None:
    flat, ranges = torch.arange(10.0), [(6, 9), (1, 3)]
    (together,) = Cuts(ranges).joined(flat)
    assert together.tolist() == [6, 7, 8, 1, 2]
    Copies([(ranges, 1)]).copy(flat, torch.cat([torch.zeros(1), 10 * together]).double())
    assert flat.tolist() == [0, 10, 20, 3, 4, 5, 60, 70, 80, 9]
    assert Cuts([]).joined(flat) == []
    Copies([]).copy(flat, together)
    assert joined([together]) is together
