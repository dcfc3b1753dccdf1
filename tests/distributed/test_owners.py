"""OwnerSums of ds_quant.comm.reduce and owner_message of comm.gather on real gloo ranks.

One start of the ranks per world size plays all layouts; the expected sums are computed here. Which
exchange a layout takes is asserted, so that both are known to be covered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from ds_quant.codec.bound import decode, encode
from ds_quant.codec.codec import CastCodec, Codec, GroupCodec
from ds_quant.comm.message import Message, Part
from ds_quant.comm.owners import Piece, Shape, inbound, plan
from ds_quant.comm.reduce import GradientSums
from ds_quant.comm.reduction_plan import Form, LinkHop, Segment
from ds_quant.comm.transport import Fabric, Link, Pending
from ds_quant.kernels.wire import shard_range
from ds_quant.policy.route import delivery_codec
from tests.distributed.harness import run
from tests.distributed.messages import Item, bits, make_link, own_sums, received_bytes

CPU = torch.device("cpu")
pytestmark = pytest.mark.distributed

WORLDS = (1, 2, 3, 4)
INT8 = GroupCodec(bits=8, group_size=32, range="minmax", rounding="stochastic")
INT8_ABSMAX = GroupCodec(bits=8, group_size=64, range="absmax", rounding="stochastic")
INT4 = GroupCodec(bits=4, group_size=32, range="absmax", rounding="nearest")
INT3 = GroupCodec(bits=3, group_size=64, range="minmax", rounding="nearest")
FP32, BF16 = CastCodec(torch.float32), CastCodec(torch.bfloat16)
QUANTIZERS = {"int8": INT8, "int8 absmax": INT8_ABSMAX, "int4": INT4, "int3": INT3}
CODECS = {**QUANTIZERS, "fp32": FP32, "bf16": BF16}

Layout = tuple[Shape, ...]


def shape_of(owner: int, numel: int, codec: Codec) -> Shape:
    """As routes deliver sums."""
    return Shape(owner, numel, codec, delivery_codec(codec))


def even(codec: Codec, world: int) -> Layout:
    """As when a bucket is larger than the model: every rank owns as much."""
    return tuple(shape_of(rank, 1021, codec) for rank in range(world))


def split(codec: Codec, world: int) -> Layout:
    """One parameter over all owners, in DeepSpeed's shards, the last one short."""
    ranges = [shard_range(2500, world, rank) for rank in range(world)]
    return tuple(shape_of(rank, stop - start, codec) for rank, (start, stop) in enumerate(ranges))


def one_owner(codec: Codec, world: int) -> Layout:
    return (shape_of(world - 1, 4099, codec),)


def two_owners(codec: Codec, world: int) -> Layout:
    """A bucket that crosses a partition border, with an empty and tiny parts in between."""
    first, second = 0, min(1, world - 1)
    numels = ((first, 1500), (first, 0), (first, 3), (second, 1), (second, 2048))
    return tuple(shape_of(owner, numel, codec) for owner, numel in numels)


def nothing(codec: Codec, world: int) -> Layout:
    return (shape_of(0, 0, codec), shape_of(world - 1, 0, codec))


LAYOUTS: dict[str, Callable[[Codec, int], Layout]] = {
    "even": even, "split": split, "one owner": one_owner, "two owners": two_owners,
    "nothing": nothing,
}  # fmt: skip
CASES = [(layout, codec) for layout in LAYOUTS for codec in CODECS]


def is_balanced(shapes: Layout, world: int) -> bool:
    return any(p.reducer != shapes[p.part].owner for p in plan(shapes, world))


def items(shapes: Layout) -> list[Item]:
    return [Item(s.numel, s.codec, seed=seed) for seed, s in enumerate(shapes)]


def runs_of(pieces: Sequence[Piece], part: int) -> list[tuple[int, int]]:
    return [(p.start, p.stop) for p in pieces if p.part == part]


def contributions(shapes: Layout, world: int, rank: int) -> list[torch.Tensor]:
    """What ``rank`` contributes to each part: values whose sum every exchange must keep."""
    pieces, values = plan(shapes, world), []
    for index, item in enumerate(items(shapes)):
        runs = runs_of(pieces, index)
        if isinstance(item.codec, CastCodec):
            values.append(item.off_grid(rank=rank, spread=2).to(item.codec.dtype).float())
        elif is_balanced(shapes, world):
            values.append(item.on_both_grids(runs, rank=rank, world=world))
        else:
            values.append(item.on_grid(runs, rank=rank))
    return values


def gather_from_owners(
    shapes: Layout, values: Sequence[torch.Tensor], link: Link
) -> Pending[list[torch.Tensor]]:
    parts = [Part(s.owner, s.codec, s.numel, i, (i, 0), (i, 0)) for i, s in enumerate(shapes)]
    fabric = Fabric(link)
    message = Message(parts, rank=link.rank, ranks=link.size)
    codings = [item.coding(link.rank) for item in items(shapes)]
    return message.gather(fabric, values, codings, lambda: list(values))


def reduce_flat(
    shapes: Layout, values: Sequence[torch.Tensor], link: Link, *, scale: float
) -> list[torch.Tensor | None]:
    """The sums of this rank's shares, None for those of others."""
    given = [Segment(i, 0, s.numel, i, 0, s.owner) for i, s in enumerate(shapes)]
    forms, route = [Form((s.codec,), delivery=s.delivery) for s in shapes], (LinkHop(link=link),)
    sums = GradientSums(given, forms, route, link, scale=scale, balanced=True)
    codings, total = [(item.coding(link.rank),) for item in items(shapes)], sums.room(CPU)
    sums.begin(values, codings, [None] * len(shapes), into=total).wait()
    return own_sums(given, sums, total)


# ---- gradients ----


def _reduce_rank() -> dict[tuple[str, str], tuple]:
    """By case: fp32 sums (None where not owned), bytes received, collectives."""
    results = {}
    for layout, codec in CASES:
        link, traffic = make_link()
        shapes = LAYOUTS[layout](CODECS[codec], link.size)
        values = contributions(shapes, link.size, link.rank)
        before = [bits(v) for v in values]
        sums = reduce_flat(shapes, values, link, scale=1.0)
        untouched = all((bits(v) == b).all() for v, b in zip(values, before, strict=True))
        owned = [None if s is None else s.numpy() for s in sums]
        results[layout, codec] = (
            owned,
            received_bytes(traffic),
            dict(traffic.collectives),
            untouched,
        )
    return results


@functools.cache
def reduced(world: int) -> list[dict[tuple[str, str], tuple]]:
    return run(_reduce_rank, world)


def plain_sum(shapes: Layout, world: int, part: int) -> np.ndarray:
    """fp32, in rank order. Sums delivered in bf16 are rounded to it, as in DeepSpeed's bucket."""
    rows = [contributions(shapes, world, rank)[part] for rank in range(world)]
    total = functools.reduce(torch.add, rows)
    if shapes[part].codec == BF16:
        for piece in plan(shapes, world):
            if piece.part == part and piece.reducer != shapes[part].owner:
                cut = total[piece.start : piece.stop]
                cut.copy_(cut.bfloat16())
    return total.numpy()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("layout", "codec"), CASES)
def test_every_owner_gets_the_plain_sum_of_its_parts(world: int, layout: str, codec: str) -> None:
    shapes = LAYOUTS[layout](CODECS[codec], world)
    for rank, result in enumerate(reduced(world)):
        owned, _, _, untouched = result[layout, codec]
        assert untouched, "inputs were modified"
        for part, (shape, values) in enumerate(zip(shapes, owned, strict=True)):
            if shape.owner != rank:
                assert values is None
            else:
                assert values.dtype == np.float32
                np.testing.assert_array_equal(values, plain_sum(shapes, world, part))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("layout", ["even", "split"])
def test_a_bucket_that_all_ranks_own_takes_the_direct_exchange(
    world: int, layout: str, codec: str
) -> None:
    assert not is_balanced(LAYOUTS[layout](CODECS[codec], world), world)


@pytest.mark.parametrize(
    ("layout", "world"), [("one owner", 3), ("one owner", 4), ("two owners", 4)]
)
@pytest.mark.parametrize("codec", ["int8", "int8 absmax", "bf16", "fp32"])
def test_a_bucket_of_few_owners_takes_the_balanced_exchange(
    world: int, layout: str, codec: str
) -> None:
    assert is_balanced(LAYOUTS[layout](CODECS[codec], world), world)


@pytest.mark.parametrize("codec", CODECS)
def test_with_two_ranks_there_is_nobody_to_share_the_work_with(codec: str) -> None:
    assert not is_balanced(one_owner(CODECS[codec], 2), 2)


def inbound_by_rank(shapes: Layout, world: int) -> list[int]:
    """Bytes that each rank receives, from the messages of a plan one by one."""
    received = [0] * world
    for piece in plan(shapes, world):
        shape, numel = shapes[piece.part], piece.stop - piece.start
        for source in range(world):
            if source != piece.reducer:
                received[piece.reducer] += shape.codec.wire_bytes(numel)
        if shape.owner != piece.reducer:
            received[shape.owner] += shape.delivery.wire_bytes(numel)
    return received


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("layout", "codec"), CASES)
def test_counted_bytes_are_the_planned_ones(world: int, layout: str, codec: str) -> None:
    shapes = LAYOUTS[layout](CODECS[codec], world)
    counted = [result[layout, codec][1] for result in reduced(world)]
    assert counted == inbound_by_rank(shapes, world)
    assert max(counted) == inbound(shapes, plan(shapes, world), world).rank


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_direct_is_one_collective_and_balanced_two(world: int, layout: str) -> None:
    for result in reduced(world):
        collectives = result[layout, "int8"][2]
        balanced = is_balanced(LAYOUTS[layout](INT8, world), world)
        expected = 0 if layout == "nothing" else 2 if balanced else 1
        assert collectives == {"weights": 0, "gradients": expected}


NOISY = GroupCodec(bits=4, group_size=1024, range="minmax", rounding="stochastic")
NOISY_NUMEL = 2**16


def _noise_rank() -> np.ndarray | None:
    """Error of the mean of identical gradients that all belong to rank 0."""
    link, _ = make_link()
    shapes = (shape_of(0, NOISY_NUMEL, NOISY),)
    gradient = items(shapes)[0].off_grid()
    (mean,) = reduce_flat(shapes, [gradient], link, scale=1 / link.size)
    return None if mean is None else (mean - gradient).numpy()


@functools.cache
def noise_variance(world: int) -> float:
    return float(np.mean(np.square(run(_noise_rank, world)[0].astype(np.float64))))


@pytest.mark.parametrize("world", [3, 4])
def test_errors_of_the_balanced_exchange_average_out_too(world: int) -> None:
    """Two estimates from n errors differ by 5 * sqrt(2 * 2 / n) at most (kurtosis below 3). The
    second hop adds steps (15 / 255)^2 as large in square for all pieces but the owner's.
    """
    assert is_balanced((shape_of(0, NOISY_NUMEL, NOISY),), world)
    second_hop = (world - 1) / world * (15 / 255) ** 2
    ratio = noise_variance(world) / noise_variance(1)
    assert ratio == pytest.approx(1 / world + second_hop, rel=5 * (4 / NOISY_NUMEL) ** 0.5)


# ---- weights ----

LOSSY = {
    "int8 shifted": GroupCodec(bits=8, group_size=64, range="minmax", rounding="random_shift"),
    "int4 stochastic": GroupCodec(bits=4, group_size=32, rounding="stochastic"),
    "int3 nearest": INT3,
}


def _gather_rank() -> dict[tuple[str, str], list[np.ndarray]]:
    """By case: all parts after a gather to which only the owners contributed."""
    results = {}
    for layout, codec in [(la, c) for la in LAYOUTS for c in (*CODECS, *LOSSY)]:
        link, traffic = make_link()
        shapes = LAYOUTS[layout]((CODECS | LOSSY)[codec], link.size)
        values = [
            owned_values(item, codec) if shape.owner == link.rank else unread(item)
            for shape, item in zip(shapes, items(shapes), strict=True)
        ]
        before = [bits(v) for v in values]
        pending = gather_from_owners(shapes, values, link)
        early = any((bits(v) != b).any() for v, b in zip(values, before, strict=True))
        pending.wait()
        results[layout, codec] = [bits(v) for v in values], early, traffic.collectives["weights"]
    return results


def owned_values(item: Item, codec: str) -> torch.Tensor:
    if codec in LOSSY:
        return item.off_grid()
    return item.on_grid([(0, item.numel)])


def unread(item: Item) -> torch.Tensor:
    return torch.full((item.numel,), float("nan"))


@functools.cache
def gathered(world: int) -> list[dict]:
    return run(_gather_rank, world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("layout", "codec"), CASES)
def test_all_ranks_get_the_owners_values_on_the_grid_exactly(
    world: int, layout: str, codec: str
) -> None:
    shapes = LAYOUTS[layout](CODECS[codec], world)
    for result in gathered(world):
        values, early, collectives = result[layout, codec]
        for item, raw in zip(items(shapes), values, strict=True):
            np.testing.assert_array_equal(raw, bits(owned_values(item, codec)))
        assert not early, "values changed before the gather was waited for"
        assert collectives == (0 if layout == "nothing" else 1)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codec", LOSSY)
def test_all_ranks_and_the_owner_hold_the_decoded_bits(world: int, layout: str, codec: str) -> None:
    shapes = LAYOUTS[layout](LOSSY[codec], world)
    for place, (shape, item) in enumerate(zip(shapes, items(shapes), strict=True)):
        wire = torch.empty(1, item.codec.wire_bytes(item.numel), dtype=torch.uint8)
        values = item.off_grid().view(1, -1)
        encode(item.codec, values, wire, address=item.coding(shape.owner).address)
        decoded = torch.empty_like(values)
        decode(item.codec, wire, decoded)
        assert item.numel < 3 or (decoded != values).any()
        for result in gathered(world):
            np.testing.assert_array_equal(result[layout, codec][0][place], bits(decoded))


def _outstanding_rank() -> list[np.ndarray]:
    """Two gathers in flight, the later one waited for first."""
    link, _ = make_link()
    two = []
    for layout in ("split", "two owners"):
        shapes = LAYOUTS[layout](INT8, link.size)
        values = [owned_values(item, "int8") for item in items(shapes)]
        two.append((values, gather_from_owners(shapes, values, link)))
    for _, pending in reversed(two):
        pending.wait()
    return [bits(v) for values, _ in two for v in values]


def test_two_gathers_may_be_outstanding() -> None:
    for result in run(_outstanding_rank, 3):
        shapes = split(INT8, 3), two_owners(INT8, 3)
        expected = [owned_values(item, "int8") for s in shapes for item in items(s)]
        for raw, values in zip(result, expected, strict=True):
            np.testing.assert_array_equal(raw, bits(values))
