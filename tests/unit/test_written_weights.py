"""Writes into weights are noticed by content: every kind of write, and no other event."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ds_quant.runtime.written_weights import WrittenWeights

CPU = torch.device("cpu")


class OneRank:
    """A communicator of one rank."""

    def least(self, numbers: Tensor) -> Tensor:
        return numbers


class OtherRank:
    """A communicator whose other rank votes ``votes``, in the order of the collectives.

    The first vote of a comparison also has the number of steps and its inverse: 0 and -1.
    """

    def __init__(self, *votes: list[int]) -> None:
        self._votes = list(votes)

    def least(self, numbers: Tensor) -> Tensor:
        return torch.minimum(numbers, torch.tensor(self._votes.pop(0), dtype=numbers.dtype))


def shards_of(*numels: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(numel, generator=generator).to(dtype) for numel in numels]


def watched(shards: list[Tensor], dtype: torch.dtype = torch.bfloat16) -> WrittenWeights:
    weights = WrittenWeights([dtype] * len(shards), CPU)
    weights.take(shards)
    return weights


def square(shard: Tensor) -> Tensor:
    width = int(shard.numel() ** 0.5)
    return shard.view(width, width)


def exchange(shard: Tensor, first: int, second: int) -> None:
    shard[[first, second]] = shard[[second, first]].clone()


WRITES: dict[str, Callable[[Tensor], object]] = {
    "one element": lambda shard: shard[-1].add_(1),
    "one row": lambda shard: square(shard)[3].zero_(),
    "data": lambda shard: shard.data.mul_(1.1),
    "negative": lambda shard: shard.neg_(),
    "sign of one column": lambda shard: square(shard)[:, 3].neg_(),
    "signs of two elements": lambda shard: shard[3 :: 255 * 4][:2].neg_(),
    "rows exchanged": lambda shard: shard.copy_(square(shard).flip(0).reshape(-1)),
    "two elements exchanged": lambda shard: exchange(shard, 4, 12),
    "two elements of a column exchanged": lambda shard: exchange(shard, 4, 4 + 255 * 4),
    "transposed": lambda shard: shard.copy_(square(shard).t().reshape(-1)),
    "elements sorted": lambda shard: shard.copy_(shard.sort().values),
    "not a number": lambda shard: shard[7].fill_(float("nan")),
    "foreach": lambda shard: torch._foreach_mul_([shard], 0.5),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("numel", [4096, 512 * 512])
def test_every_write_is_noticed(write: str, dtype: torch.dtype, numel: int) -> None:
    shards = shards_of(5, numel, 0, 300_001)
    weights = watched(shards, dtype)
    WRITES[write](shards[1])
    assert weights.written(shards, OneRank()) == [1]


def test_shards_of_another_size_count_as_written() -> None:
    first, second = shards_of(5, 300_001)
    weights = watched([first, second])
    longer = [first, torch.cat([second, second, second])]
    assert weights.written(longer, OneRank()) == [0, 1]
    assert weights.written(longer, OneRank()) == []


def test_nothing_is_noticed_without_a_write() -> None:
    shards = shards_of(5, 4096, 0, 300_001)
    weights = watched(shards)
    assert weights.written(shards, OneRank()) == []


def test_a_write_below_the_sent_dtype_does_not_count() -> None:
    shards = [torch.ones(100)]
    weights = watched(shards)
    shards[0].mul_(1 + 1e-6)
    assert weights.written(shards, OneRank()) == []


@pytest.mark.parametrize("place", [0, 262_143, 262_144, 999_999])
def test_large_shards_are_compared_to_their_last_element(place: int) -> None:
    shards = shards_of(100, 1_000_000)
    weights = watched(shards)
    shards[1][place] += 1
    assert weights.written(shards, OneRank()) == [1]


def test_other_storage_and_another_size_are_noticed() -> None:
    shards = shards_of(100, 200)
    weights = watched(shards)
    assert weights.written([shards[0].clone(), shards[1]], OneRank()) == []
    assert weights.written([shards[0], torch.zeros(200)], OneRank()) == [1]
    assert weights.written([shards[0], shards[1][:150]], OneRank()) != []


def test_integers_and_several_dtypes() -> None:
    shards = [torch.arange(1000).to(torch.uint8), torch.randn(77), torch.randn(5).half()]
    weights = WrittenWeights([torch.uint8, torch.bfloat16, torch.float16], CPU)
    weights.take(shards)
    shards[0][999] ^= 1
    shards[2][4] = 3
    assert weights.written(shards, OneRank()) == [0, 2]


def test_a_write_of_another_rank_is_noticed() -> None:
    shards = shards_of(100, 200, 300)
    weights = watched(shards)
    assert weights.written(shards, OtherRank([0, 0, -1], [1, 0, 1])) == [1]


def test_a_write_that_was_noted_is_found_after_a_step() -> None:
    shards = shards_of(100, 200, 300)
    weights = watched(shards)
    shards[2].zero_()
    weights.note(shards)
    for shard in shards:  # the optimizer steps, and the exchange reads the new weights
        shard.add_(1)
    weights.take(shards)
    assert weights.written(shards, OneRank()) == [2]
    assert weights.written(shards, OneRank()) == []


def test_a_mark_of_one_rank_counts_on_all() -> None:
    shards = shards_of(100, 200)
    weights = WrittenWeights([torch.bfloat16] * 2, CPU)
    weights.mark(1)
    assert weights.written(shards, OneRank()) == [1]
    assert weights.written(shards, OneRank()) == []
    assert weights.written(shards, OtherRank([0, 0, -1], [0, 1])) == [0]
    shards[0].zero_()  # what was found counts as sent
    assert weights.written(shards, OneRank()) == [0]


@pytest.mark.parametrize("numels", [(), (0,), (0, 0)])
def test_a_rank_without_elements_has_fingerprints(numels: tuple[int, ...]) -> None:
    shards = shards_of(*numels)
    weights = watched(shards)
    weights.note(shards)
    assert weights.written(shards, OneRank()) == []
