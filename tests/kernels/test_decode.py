"""decode_sum.cu and recode.cu on the host shim against the torch reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_quant.codec.codec import GroupCodec
from ds_quant.kernels import launch, reference
from ds_quant.kernels.geometry import Stores
from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.reference import BlockRotation
from tests.kernels.inputs import (
    CODECS,
    DTYPES,
    cases,
    guarded,
    id_of,
    rotated,
    rotated_back,
    table,
)

ADDRESS = Address(key=3, step=9)
EXAMPLES = settings(max_examples=4, deadline=None, derandomize=True, database=None)

# One codec per way of unpacking: bits x (scale | scale and offset | table).
DECODERS = tuple(codec for codec in CODECS if codec.rounding == "nearest")


def message(codec, x: torch.Tensor) -> torch.Tensor:
    """Wire rows of x, ending where readable memory ends."""
    nbytes = codec.wire_bytes(x.shape[1])
    wire = guarded(x.shape[0] * nbytes, torch.uint8).view(x.shape[0], nbytes)
    reference.encode(x, wire, codec, address=ADDRESS, levels=table(codec))
    return wire


def output(rows: int, numel: int, dtype: torch.dtype, skew: int) -> torch.Tensor:
    """(rows, numel) at an odd address if there is a skew, filled with small numbers."""
    padding = skew or -numel % 16
    out = guarded(rows * (numel + padding), dtype).view(rows, -1)[:, padding:]
    return out.copy_(torch.arange(rows * numel).view(rows, numel) % 7)


def assert_same(codec, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal bits, except that a NaN may have any sign and payload."""
    wanted = wanted.to(found.dtype)
    both_nan = found.isnan() & wanted.isnan()
    as_int = {2: torch.int16, 4: torch.int32}[found.element_size()]
    same = found.contiguous().view(as_int) == wanted.contiguous().view(as_int)
    places = (~(same | both_nan)).nonzero().tolist()
    assert not places, f"{codec.name}: {places[:8]} of {tuple(wanted.shape)} differ"


@pytest.mark.parametrize("codec", DECODERS, ids=id_of)
def test_decoded_rows_equal_the_reference(shim, codec) -> None:
    dtype = DTYPES[codec.bits % 3]

    @EXAMPLES
    @given(case=cases(codec.group_size), add=st.just(codec.bits % 2 == 0))
    def check(case, add: bool) -> None:
        wire = message(codec, case.values(codec.group_size, torch.float32))
        values = torch.empty(case.rows, case.numel)
        reference.decode(wire, values, codec, levels=table(codec))
        out = output(case.rows, case.numel, dtype, case.skew)
        wanted = values + out.float() if add else values
        launch.decode(wire, out, codec, levels=table(codec), run=shim, add=add)
        assert_same(codec, out, wanted)

    check()


WAYS = [Stores(run, staged) for run in (1, 2, 4, 8) for staged in (False, True)]


@pytest.mark.parametrize("stores", WAYS, ids=str)
def test_every_way_of_storing_writes_the_same_values(shim, stores: Stores) -> None:
    """Rows of any length and address, added to what is there; and whole blocks of sums."""
    codec = GroupCodec(bits=4, group_size=64)

    @EXAMPLES
    @given(case=cases(codec.group_size, max_groups=40))
    def check(case) -> None:
        wire = message(codec, case.values(codec.group_size, torch.float32))
        values = torch.empty(case.rows, case.numel)
        reference.decode(wire, values, codec, levels=None)
        out = output(case.rows, case.numel, torch.bfloat16, case.skew)
        wanted = values + out.float()
        launch.decode(wire, out, codec, levels=None, run=shim, add=True, stores=stores)
        assert_same(codec, out, wanted)

    check()
    codec, numel, launches = GroupCodec(bits=8, group_size=2048, range="absmax"), 1 << 14, []
    wire = message(codec, torch.randn(3, numel))
    out, wanted = output(1, numel, torch.float32, 0)[0], torch.empty(numel)
    reference.decode_sum(wire, wanted, codec, scale=0.5, own=None, levels=None)
    options = {"scale": 0.5, "levels": None, "stores": stores}
    launch.decode_sum(wire, out, codec, run=launches.append, **options)
    shim(launches[0])
    assert_same(codec, out, wanted)
    macros = dict(launches[0].macros)
    assert on_whole_blocks(launches)
    assert (macros["DSQ_RUN"], macros["DSQ_STAGED"]) == (stores.run, stores.staged)


def test_rotated_sums_can_be_staged_and_other_runs_are_refused(shim) -> None:
    codec, numel = GroupCodec(bits=4, group_size=128, range="absmax"), 5000
    x = rotated(torch.randn(3, numel), 64, 77)
    wire, out = message(codec, x), output(1, numel, torch.bfloat16, 0)[0]
    wanted = rotated_back(sum_of(codec, wire, x.shape[1], None, 1.0), 64, 77, 0.5)[:numel]
    options = {"scale": 0.5, "levels": None, "run": shim}
    rotation = BlockRotation(64, 77)
    launch.decode_sum(wire, out, codec, rotation=rotation, stores=Stores(4, True), **options)
    assert_same(codec, out, wanted)
    with pytest.raises(ValueError, match=r"stores.run = 8: allowed .* are \[4\]"):
        launch.decode_sum(wire, out, codec, rotation=rotation, stores=Stores(8), **options)
    narrow = GroupCodec(bits=4, group_size=32)
    with pytest.raises(ValueError, match=r"stores.run = 8: allowed .* are \[1, 2, 4\]"):
        launch.decode(message(narrow, x), x, narrow, levels=None, run=shim, stores=Stores(8))


def source_rows(codec, case, sources: int) -> torch.Tensor:
    torch.manual_seed(case.seed)
    return case.values(codec.group_size, torch.float32)[:1] + torch.randn(sources, case.numel)


def sum_of(codec, wire: torch.Tensor, numel: int, own: tuple | None, scale: float) -> torch.Tensor:
    """The reference's sum with one row replaced, rows added one by one."""
    rows = torch.empty(wire.shape[0], numel)
    reference.decode(wire, rows, codec, levels=table(codec))
    if own is not None:
        rows[own[0]] = own[1]
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total * scale


def without(wire: torch.Tensor, row: int) -> torch.Tensor:
    """What travels of rows when one of them is given as values."""
    return torch.cat([wire[:row], wire[row + 1 :]])


SUMS = (
    (GroupCodec(bits=4, group_size=128, range="absmax"), 8, False),
    (GroupCodec(bits=4, group_size=2048, range="absmax"), 9, True),
    (GroupCodec(bits=8, group_size=96), 3, True),
    (GroupCodec(bits=8, group_size=32, range="absmax"), 2, False),
    (GroupCodec(bits=7, group_size=64), 17, False),
    (GroupCodec(bits=3, group_size=288, levels="learned"), 4, True),
    (GroupCodec(bits=3, group_size=64), 3, False),
)


@pytest.mark.parametrize("codec, sources, has_own", SUMS, ids=id_of)
def test_sums_of_rows_equal_the_reference(shim, codec, sources: int, has_own: bool) -> None:
    scale = 1.0 if sources == 2 else 1 / sources
    dtype = torch.bfloat16 if sources == 8 else torch.float32

    @EXAMPLES
    @given(case=cases(codec.group_size), row=st.integers(0, sources - 1))
    def check(case, row: int) -> None:
        x = source_rows(codec, case, sources)
        own = (row, x[row].to(torch.bfloat16)) if has_own else None
        wire = message(codec, x)
        wanted = sum_of(codec, wire, case.numel, own, scale)
        if has_own:
            wire = without(wire, row)
        else:
            check_sum = torch.empty(case.numel)
            reference.decode_sum(wire, check_sum, codec, scale=scale, own=None, levels=table(codec))
            assert_same(codec, check_sum, wanted)
        out = output(1, case.numel, dtype, case.skew)[0]
        options = {"scale": scale, "levels": table(codec), "own": own}
        launch.decode_sum(wire, out, codec, run=shim, **options)
        assert_same(codec, out, wanted)

    check()


@pytest.mark.parametrize("block, flips", [(32, None), (64, 0xF00D), (128, (5 << 96) | 77)], ids=str)
def test_sums_are_rotated_back(shim, block: int, flips: int | None) -> None:
    codec = GroupCodec(bits=4, group_size=128, range="absmax")

    @EXAMPLES
    @given(case=cases(codec.group_size))
    def check(case) -> None:
        x = rotated(source_rows(codec, case, 4), block, flips)
        wire = message(codec, x)
        own = (2, x[2])
        total = sum_of(codec, wire, x.shape[1], own, 1.0)
        wanted = rotated_back(total, block, flips, 0.25)[: case.numel]
        out = output(1, case.numel, torch.float32, case.skew)[0]
        options = {
            "scale": 0.25,
            "levels": None,
            "own": own,
            "rotation": BlockRotation(block, flips),
        }
        launch.decode_sum(without(wire, 2), out, codec, run=shim, **options)
        assert_same(codec, out, wanted)

    check()


def test_no_sources_sum_to_zero_or_own_values(shim) -> None:
    codec = GroupCodec(bits=4, group_size=32)
    out, own = torch.ones(5), torch.randn(5)
    wire = torch.empty(0, codec.wire_bytes(5), dtype=torch.uint8)
    launch.decode_sum(wire, out, codec, scale=2.0, levels=None, run=lambda _: None)
    assert torch.equal(out, torch.zeros(5))
    launch.decode_sum(wire, out, codec, scale=2.0, levels=None, own=(0, own), run=shim)
    assert torch.equal(out, 2 * own)
    reference.decode_sum(wire, out, codec, scale=3.0, levels=None, own=(0, own))
    assert torch.equal(out, 3 * own)


RECODES = (
    ({"bits": 8, "group_size": 128, "range": "absmax"}, 4, "absmax", "nearest", 128, 8, False),
    ({"bits": 8, "group_size": 2048, "range": "absmax"}, 4, "absmax", "stochastic", 2048, 2, True),
    ({"bits": 4, "group_size": 96}, 8, "minmax", "random_shift", 4096, 3, False),
    ({"bits": 5, "group_size": 1024}, 3, "minmax", "stochastic", 288, 9, True),
    ({"bits": 4, "group_size": 64, "levels": "learned"}, 6, "minmax", "nearest", 32, 2, False),
)


@pytest.mark.parametrize("source, bits, span, rounding, group_size, sources, has_own", RECODES)
def test_recoded_bytes_equal_decode_sum_encode(
    shim, source, bits: int, span: str, rounding: str, group_size: int, sources: int, has_own: bool
) -> None:
    source_codec = GroupCodec(**source)
    levels = "learned" if bits == 6 else "uniform"
    codec = GroupCodec(
        bits=bits, range=span, rounding=rounding, group_size=group_size, levels=levels
    )

    @EXAMPLES
    @given(case=cases(max(group_size, source_codec.group_size)), row=st.integers(0, sources - 1))
    def check(case, row: int) -> None:
        x = source_rows(source_codec, case, sources * case.rows)
        wire = message(source_codec, x).view(case.rows, sources, -1)
        own = (row, x[row]) if has_own else None
        totals = [sum_of(source_codec, rows, case.numel, own, 1.0) for rows in wire]
        nbytes = codec.wire_bytes(case.numel)
        wanted = torch.empty(case.rows, nbytes, dtype=torch.uint8)
        address = case.address
        reference.encode(torch.stack(totals), wanted, codec, address=address, levels=table(codec))
        out = guarded(case.rows * nbytes, torch.uint8).view(case.rows, nbytes).fill_(0x55)
        if has_own:
            wire = torch.stack([without(rows, row) for rows in wire])
        tables = {"source_levels": table(source_codec), "levels": table(codec)}
        options = {"numel": case.numel, "address": address, "own": own, "run": shim, **tables}
        launch.recode(wire, out, source_codec, codec, **options)
        places = (out != wanted).nonzero().tolist()
        assert not places, f"{codec.name}: (row, byte) {places[:8]} of {tuple(wanted.shape)}"

    check()


def on_whole_blocks(launches: list) -> bool:
    return all(dict(work.macros)["DSQ_WHOLE"] == 1 for work in launches)


@pytest.mark.parametrize("codec", DECODERS[::7], ids=id_of)
def test_whole_blocks_take_their_own_variant(shim, codec) -> None:
    """Aligned rows of whole blocks: the kernel has no checks of addresses and ends."""
    numel, sources, launches = 1 << 15, 8, []

    def run(work) -> None:
        launches.append(work)
        shim(work)

    wire = message(codec, torch.randn(sources, numel))
    rows = torch.empty(sources, numel)
    reference.decode(wire, rows, codec, levels=table(codec))
    out = output(2, numel, torch.bfloat16, 0)
    launch.decode(wire[:2], out, codec, levels=table(codec), run=run)
    assert_same(codec, out, rows[:2])
    total = output(1, numel, torch.float32, 0)[0]
    launch.decode_sum(wire, total, codec, scale=0.125, levels=table(codec), run=run)
    wanted = torch.empty(numel)
    reference.decode_sum(wire, wanted, codec, scale=0.125, own=None, levels=table(codec))
    assert_same(codec, total, wanted)

    coarse = GroupCodec(bits=4, group_size=128, range="absmax", rounding="stochastic")
    expected = torch.empty(1, coarse.wire_bytes(numel), dtype=torch.uint8)
    exact = sum_of(codec, wire, numel, None, 1.0)[None]
    reference.encode(exact, expected, coarse, address=ADDRESS, levels=None)
    found = torch.empty_like(expected)
    options = {"numel": numel, "address": ADDRESS, "source_levels": table(codec)}
    launch.recode(wire[None], found, codec, coarse, run=run, **options)
    assert torch.equal(found, expected)
    assert on_whole_blocks(launches)
