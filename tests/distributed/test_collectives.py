"""all_gather of ds_quant.comm.gather and ShardSums of comm.reduce on real gloo ranks.

Each group of claims needs one start of the ranks per world size, whose outcome is cached; the
expected values are computed here, from the same seeds, without any collective.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import pytest
import torch

from ds_quant.codec.bound import Coding
from ds_quant.codec.codec import CastCodec, Codec, GroupCodec
from ds_quant.comm.gather import all_gather
from ds_quant.kernels.wire import shard_range
from tests.distributed.harness import run
from tests.distributed.messages import (
    Item,
    Message,
    bits,
    correlation_limit,
    make_link,
    received_bytes,
    reduce_scatter,
    shards,
)

pytestmark = pytest.mark.distributed

WORLDS = (1, 2, 3, 4)
NUMELS = (1, 0, 2, 3, 97, 1021, 4096)  # single, none, below the world size, primes, even
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EXACT = tuple(
    GroupCodec(bits=b, group_size=32, range=r, rounding=rounding)
    for b in (8, 4, 3)
    for r in ("absmax", "minmax")
    for rounding in ("nearest", "stochastic")
)
CASTS = tuple(CastCodec(dtype) for dtype in DTYPES)
LOSSY = (
    GroupCodec(bits=8, group_size=64, range="minmax", rounding="random_shift"),
    GroupCodec(bits=4, group_size=32, range="minmax", rounding="stochastic"),
    GroupCodec(bits=3, group_size=96, range="absmax", rounding="nearest"),
)


def uniform(codec: Codec, dtype: torch.dtype) -> Message:
    return tuple(Item(n, codec, dtype, seed) for seed, n in enumerate(NUMELS))


MIXED: Message = tuple(
    Item(n, codec, DTYPES[i % 3], i)
    for i, (n, codec) in enumerate(
        [
            (1021, EXACT[0]),
            (5, CASTS[0]),
            (0, EXACT[3]),
            (97, EXACT[7]),
            (3, CASTS[2]),
            (640, EXACT[9]),
        ]
    )
)
UNEVEN: Message = tuple(Item(n, c, seed=n) for n in (1, 0, 3, 97, 1021) for c in (*LOSSY, *CASTS))
GRID_MESSAGES: dict[Any, Message] = {
    **{(c, d): uniform(c, d) for c in EXACT for d in DTYPES},
    **{(CastCodec(d), d): uniform(CastCodec(d), d) for d in DTYPES},
    "mixed": MIXED,
}
GRID_CASES = [
    pytest.param(k, id=k if k == "mixed" else f"{k[0].name}-{k[1]}") for k in GRID_MESSAGES
]


def gather(message: Message, values: list[torch.Tensor], link: Any) -> Any:
    """Post the gather of this rank's shards of full tensors."""
    own = [v[slice(*shard_range(v.numel(), link.size, link.rank))] for v in values]
    codings = [item.coding(link.rank) for item in message]
    return all_gather(own, [item.numel for item in message], codings, link)


def reduce(message: Message, values: list[torch.Tensor], link: Any, scale: float = 1.0) -> Any:
    codings = [item.coding(link.rank) for item in message]
    return reduce_scatter(values, codings, link, scale=scale)


# ---- exactness ----


def _grid_rank() -> dict[str, list]:
    link, traffic = make_link()
    gathered, reduced = [], []
    for message in GRID_MESSAGES.values():
        full = [item.on_grid(shards(item.numel, link.size)) for item in message]
        gathered.append([(str(t.dtype), bits(t)) for t in gather(message, full, link).wait()])
        own = [item.on_grid(shards(item.numel, link.size), rank=link.rank) for item in message]
        handle = reduce(message, own, link, scale=1 / link.size)
        reduced.append([t.numpy() for t in handle.wait()])
    return {"gathered": gathered, "reduced": reduced, "collectives": traffic.collectives}


@functools.cache
def grid_results(world: int) -> list[dict]:
    """By rank: everything that exactness is about, in one start of the ranks."""
    return run(_grid_rank, world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", GRID_CASES)
def test_all_gather_returns_tensors_on_the_grid_exactly(world: int, case: Any) -> None:
    index = list(GRID_MESSAGES).index(case)
    for result in grid_results(world):
        received = result["gathered"][index]
        for item, (dtype, raw) in zip(GRID_MESSAGES[case], received, strict=True):
            expected = item.on_grid(shards(item.numel, world))
            assert dtype == str(item.dtype)
            np.testing.assert_array_equal(raw, bits(expected), err_msg=str(item))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", GRID_CASES)
def test_reduce_scatter_returns_the_mean_of_tensors_on_the_grid_exactly(
    world: int, case: Any
) -> None:
    index = list(GRID_MESSAGES).index(case)
    results = grid_results(world)
    for place, item in enumerate(GRID_MESSAGES[case]):
        runs = shards(item.numel, world)
        total = sum(item.on_grid(runs, rank=r).float() for r in range(world))
        mean = (total * np.float32(1 / world)).numpy()
        received = [r["reduced"][index][place] for r in results]
        assert [len(shard) for shard in received] == [stop - start for start, stop in runs]
        np.testing.assert_array_equal(np.concatenate(received), mean, err_msg=str(item))


@pytest.mark.parametrize("world", WORLDS)
def test_every_call_is_one_collective(world: int) -> None:
    calls = len(GRID_MESSAGES)
    for result in grid_results(world):
        assert result["collectives"] == {"weights": calls, "gradients": calls}


def _cast_rank() -> list[np.ndarray]:
    link, _ = make_link()
    return [
        reduce((item,), [item.off_grid(rank=link.rank, spread=2)], link).wait()[0].numpy()
        for item in CAST_ITEMS
    ]


CAST_ITEMS = tuple(Item(1021, codec, codec.dtype, seed) for seed, codec in enumerate(CASTS))


@pytest.mark.parametrize("world", WORLDS)
def test_cast_reduce_scatter_is_the_fp32_sum_in_rank_order(world: int) -> None:
    results = run(_cast_rank, world)
    order_matters = False
    for place, item in enumerate(CAST_ITEMS):
        rows = [item.off_grid(rank=r, spread=2).float() for r in range(world)]
        total = functools.reduce(torch.add, rows).numpy()
        backwards = functools.reduce(torch.add, rows[::-1]).numpy()
        order_matters |= bool((total != backwards).any())
        np.testing.assert_array_equal(np.concatenate([r[place] for r in results]), total)
    assert order_matters or world < 3, "values on which every order gives the same sum"


# ---- equal bits ----


def _lossy_rank(fill: bool) -> dict[str, list]:
    torch.use_deterministic_algorithms(fill)  # fills what torch.empty returns with NaN or 255
    assert not fill or bool((torch.empty(64, dtype=torch.uint8) == 255).all())
    link, traffic = make_link()
    full = [item.off_grid() for item in UNEVEN]
    own = [item.off_grid(rank=link.rank) for item in UNEVEN]
    alone = [(gather((i,), [v], link).wait()[0]) for i, v in zip(UNEVEN, full, strict=True)]
    summed = [(reduce((i,), [v], link).wait()[0]) for i, v in zip(UNEVEN, own, strict=True)]
    backwards = UNEVEN[::-1], full[::-1], own[::-1]
    posted = [
        gather(UNEVEN, full, link),
        reduce(UNEVEN, own, link),
        gather(*backwards[:2], link),
        reduce(backwards[0], backwards[2], link),
    ]
    issued = dict(traffic.collectives)
    results = [handle.wait() for handle in posted[::-1]][::-1]  # last posted, first waited for
    again = [handle.wait() for handle in posted]
    return {
        "gather alone": [bits(t) for t in alone],
        "gather": [bits(t) for t in results[0]],
        "gather backwards": [bits(t) for t in results[2]][::-1],
        "reduce alone": [bits(t) for t in summed],
        "reduce": [bits(t) for t in results[1]],
        "reduce backwards": [bits(t) for t in results[3]][::-1],
        "same objects": [a is b for a, b in zip(results, again, strict=True)],
        "posted by wait": [traffic.collectives != issued],
    }


@functools.cache
def lossy_results(world: int, fill: bool = False) -> list[dict[str, list]]:
    return run(_lossy_rank, world, fill)


@pytest.mark.parametrize("world", WORLDS)
def test_all_ranks_hold_the_same_bits_and_the_sender_its_decoded_shard(world: int) -> None:
    first, *others = lossy_results(world)
    for other in others:
        for item, mine, theirs in zip(UNEVEN, first["gather"], other["gather"], strict=True):
            np.testing.assert_array_equal(mine, theirs, err_msg=str(item))
    for rank, result in enumerate(lossy_results(world)):
        item = UNEVEN[-6]  # 1021 elements, the first lossy codec
        own = slice(*shard_range(item.numel, world, rank))
        assert (result["gather"][-6][own] != bits(item.off_grid())[own]).any()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("call", ["gather", "reduce"])
def test_a_result_does_not_depend_on_what_shares_its_message(world: int, call: str) -> None:
    for result in lossy_results(world):
        for place, item in enumerate(UNEVEN):
            alone = result[f"{call} alone"][place]
            np.testing.assert_array_equal(result[call][place], alone, err_msg=str(item))
            np.testing.assert_array_equal(result[f"{call} backwards"][place], alone)


@pytest.mark.parametrize("world", WORLDS)
def test_waiting_in_reverse_order_and_twice_is_harmless(world: int) -> None:
    """Orders are compared by test_a_result_does_not_depend_on_what_shares_its_message."""
    for result in lossy_results(world):
        assert all(result["same objects"]) and not any(result["posted by wait"])


@pytest.mark.parametrize("world", WORLDS)
def test_uninitialised_memory_never_shows(world: int) -> None:
    for plain, filled in zip(lossy_results(world), lossy_results(world, True), strict=True):
        for name, arrays in plain.items():
            for place, array in enumerate(arrays):
                np.testing.assert_array_equal(array, filled[name][place], err_msg=name)
        for array in filled["gather"] + filled["reduce"]:
            if array.shape[-1] == 4:
                assert np.isfinite(array.view(np.float32)).all()


# ---- non-finite values, nothing to send, part of the world ----


def _non_finite_rank() -> list[np.ndarray]:
    link, _ = make_link()
    item = Item(256, GroupCodec(bits=8, group_size=32), seed=1)
    values = item.off_grid(rank=link.rank)
    if link.rank == link.size - 1:
        values[40] = float("inf")
    full = gather((item,), [item.off_grid()], link).wait()[0]
    return [reduce((item,), [values], link).wait()[0].numpy(), full.numpy()]


def test_a_non_finite_value_of_one_rank_makes_its_group_nan_and_no_other() -> None:
    results = run(_non_finite_rank, 2)
    total = np.concatenate([r[0] for r in results])
    assert np.isnan(total[32:64]).all()
    assert np.isfinite(np.delete(total, range(32, 64))).all()


def _empty_rank() -> tuple:
    link, traffic = make_link()
    message = (Item(0, LOSSY[0]), Item(0, CASTS[0], torch.bfloat16))
    values = [item.off_grid() for item in message]
    full = gather(message, values, link).wait()
    own = reduce(message, values, link).wait()
    return (
        [(t.numel(), str(t.dtype)) for t in full + own],
        traffic.collectives,
        received_bytes(traffic),
    )


def test_nothing_to_send_starts_no_collective() -> None:
    for sizes, collectives, received in run(_empty_rank, 2):
        assert sizes == [
            (0, "torch.float32"), (0, "torch.bfloat16"), (0, "torch.float32"), (0, "torch.float32")
        ]  # fmt: skip
        assert collectives == {"weights": 0, "gradients": 0} and received == 0


def _subgroup_rank(node_size: int) -> tuple:
    groups = [torch.distributed.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    mine = groups[0] if int(os.environ["RANK"]) in (0, 3) else groups[1]
    link, traffic = make_link(node_size, mine)
    item = Item(97, EXACT[0], seed=5)
    full = gather((item,), [item.on_grid(shards(97, 2))], link).wait()[0]
    return full.numpy(), traffic.received["weights"]


@pytest.mark.parametrize(
    ("node_size", "links"),
    [(4, ["intra"] * 4), (2, ["inter"] * 4), (1, ["inter"] * 4)],
)
def test_part_of_the_world_gathers_and_counts_by_node(node_size: int, links: list[str]) -> None:
    item = Item(97, EXACT[0], seed=5)
    size = EXACT[0].wire_bytes(49)
    for link, (full, received) in zip(links, run(_subgroup_rank, 4, node_size), strict=True):
        np.testing.assert_array_equal(full, item.on_grid(shards(97, 2)).numpy())
        assert received == {"intra": 0, "inter": 0} | {link: size}


# ---- random bits ----

NOISY = GroupCodec(bits=4, group_size=1024, range="minmax", rounding="stochastic")
NOISY_NUMEL = 4 * 16384


def _noise_rank(same_address: bool) -> np.ndarray:
    """Error of the mean of identical gradients, this rank's shard of it."""
    link, _ = make_link()
    item = Item(NOISY_NUMEL, NOISY, seed=2)
    gradient = item.off_grid()
    coding = item.coding(0 if same_address else link.rank)
    (mean,) = reduce_scatter([gradient], [coding], link, scale=1 / link.size).wait()
    start, stop = shard_range(NOISY_NUMEL, link.size, link.rank)
    return (mean - gradient[start:stop]).numpy()


@functools.cache
def noise_variance(world: int, same_address: bool = False) -> float:
    errors = np.concatenate(run(_noise_rank, world, same_address)).astype(np.float64)
    return float(np.mean(errors**2))


# The variance estimate of n errors of kurtosis k has the relative deviation sqrt((k - 1) / n);
# k is below 3 here, so two of them differ by less than 5 * sqrt(2 * 2 / n) = 3.9 %.
TOLERANCE = 5 * (4 / NOISY_NUMEL) ** 0.5


@pytest.mark.parametrize("world", [2, 3, 4])
def test_errors_of_different_ranks_average_out(world: int) -> None:
    ratio = noise_variance(world) * world / noise_variance(1)
    assert ratio == pytest.approx(1, abs=TOLERANCE)


@pytest.mark.parametrize("world", [2, 4])
def test_errors_of_ranks_that_shared_an_address_would_not_average_out(world: int) -> None:
    ratio = noise_variance(world, same_address=True) / noise_variance(1)
    assert ratio == pytest.approx(1, abs=TOLERANCE)


REPEATED = 4096  # elements of a full shard


def _repeated_rank() -> dict[str, np.ndarray]:
    """Every shard holds the same values, the last one is short; each rank's shard and message."""
    link, _ = make_link()
    piece = Item(REPEATED, NOISY, seed=3).off_grid()
    numel = REPEATED * link.size - 2
    item = Item(numel, NOISY, seed=3)
    values = piece.repeat(link.size)[:numel]
    (mean,) = reduce((item,), [values], link, scale=1 / link.size).wait()
    (full,) = gather((item,), [values], link).wait()
    errors = (full - values).numpy()
    return {"reduced": (mean - piece[: mean.numel()]).numpy(), "gathered": errors}


@functools.cache
def repeated_results() -> list[dict[str, np.ndarray]]:
    return run(_repeated_rank, 3)


@pytest.mark.parametrize("pair", [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("call", ["gathered", "reduced"])
def test_shards_of_one_tensor_never_share_random_bits(call: str, pair: tuple[int, int]) -> None:
    if call == "reduced":
        rows = [result["reduced"] for result in repeated_results()]
    else:
        rows = np.split(repeated_results()[0]["gathered"], [REPEATED, 2 * REPEATED])
    numel = REPEATED - 1024  # the groups that all shards have in full
    first, second = (rows[place][:numel] for place in pair)
    assert abs(np.corrcoef(first, second)[0, 1]) < correlation_limit(numel)


def test_a_coding_leaves_vectors_for_padded_runs() -> None:
    coding = Item(100, NOISY, seed=1).coding(2)
    assert coding.at(40).address.first_vector == coding.address.first_vector + 16 * 40
    assert coding.at(40).at(8) == coding.at(48)
    assert Coding(codec=CASTS[0]).at(40) == Coding(codec=CASTS[0])
