"""Layout: sections that cover a row without overlap, and DeepSpeed's shards."""

from __future__ import annotations

import pytest

from ds_quant.kernels import wire

NUMELS = (1, 7, 8, 9, 31, 32, 33, 97, 1024, 1025, 4096, 100_003)


def test_ceil_div_and_round_up_on_small_numbers():
    for a in range(50):
        for b in range(1, 12):
            assert wire.ceil_div(a, b) == -(-a // b) == (a + b - 1) // b
            assert wire.round_up(a, b) == min(n for n in range(a, a + b) if n % b == 0)


def test_planes_are_powers_of_two_that_add_up_to_the_width():
    for bits in range(2, 9):
        widths = wire.planes(bits)
        assert sum(widths) == bits
        assert all(width in (1, 2, 4, 8) for width in widths)
        assert list(widths) == sorted(widths, reverse=True)


@pytest.mark.parametrize("bits", (1, 9, 0))
def test_planes_reject_other_widths(bits):
    with pytest.raises(ValueError, match=f"bits = {bits}.*2 to 8"):
        wire.planes(bits)


@pytest.mark.parametrize("has_offset", (False, True))
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("numel", NUMELS)
def test_sections_are_aligned_in_order_and_as_small_as_alignment_allows(numel, bits, has_offset):
    group_size = 64
    row = wire.wire_layout(numel, bits=bits, group_size=group_size, has_offset=has_offset)
    groups = (numel + group_size - 1) // group_size
    assert (row.numel, row.num_groups) == (numel, groups)
    sizes = [(numel + 7) // 8 * width for width in wire.planes(bits)] + [4 * groups]
    starts = [*row.plane_offsets, row.scale_offset]
    if has_offset:
        sizes.append(4 * groups)
        starts.append(row.offset_offset)
    assert has_offset or row.offset_offset is None
    assert starts[0] == 0
    for start, size, following in zip(starts, sizes, [*starts[1:], row.nbytes], strict=True):
        assert start % 16 == 0
        assert 0 <= following - (start + size) < 16
    assert row.nbytes % 16 == 0


def test_empty_row_takes_no_bytes():
    row = wire.wire_layout(0, bits=8, group_size=1024, has_offset=True)
    assert (row.nbytes, row.num_groups) == (0, 0)


def test_qsdp_width_is_8_and_a_sixteenth_bits_per_value():
    """QSDP: 8 bits, groups of 1024, fp32 scale and offset: b + 64 / 1024 bits per value."""
    numel = 1 << 20
    row = wire.wire_layout(numel, bits=8, group_size=1024, has_offset=True)
    assert row.nbytes * 8 == numel * 8.0625


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
