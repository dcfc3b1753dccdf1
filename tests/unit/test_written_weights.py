"""Writes into weights are noticed by content: every kind of write, and no other event."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from torch import Tensor

from ds_quant.runtime import written_weights
from ds_quant.runtime.written_weights import Fingerprints, UnequalSteps, WrittenWeights

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


# ---- votes ----


class Noting:
    """A communicator of one rank that notes what it was given to vote on."""

    def __init__(self) -> None:
        self.votes: list[tuple[torch.dtype, list[int]]] = []

    def least(self, numbers: Tensor) -> Tensor:
        assert numbers.device == CPU
        self.votes.append((numbers.dtype, numbers.tolist()))
        return numbers


def test_a_vote_takes_three_numbers_and_a_byte_per_shard_if_one_was_written() -> None:
    """1 if nothing was written, then the steps and their inverse; 0 for a shard that was."""
    shards = shards_of(100, 200, 300)
    ranks = Noting()
    with torch.device("meta"):  # tensors without a device would be there
        weights = watched(shards)
        assert weights.written(shards, ranks, steps=6) == []
        weights.mark(0)
        shards[2].zero_()
        assert weights.written(shards, ranks, steps=7) == [0, 2]
    assert ranks.votes == [
        (torch.int64, [1, 6, -7]),
        (torch.int64, [0, 7, -8]),
        (torch.uint8, [0, 1, 0]),
    ]


def test_a_model_without_shards_needs_no_vote() -> None:
    ranks = Noting()
    assert watched([]).written([], ranks) == [] and ranks.votes == []


@pytest.mark.parametrize(("own", "other"), [(4, 7), (7, 4)])
def test_ranks_that_have_taken_other_numbers_of_steps_are_told_apart(own: int, other: int) -> None:
    shards = shards_of(100)
    weights = watched(shards)
    with pytest.raises(UnequalSteps) as error:
        weights.written(shards, OtherRank([1, other, ~other]), steps=own)
    assert error.value.args == (4, 7)


# ---- what is compared ----


def test_an_exchange_of_some_shards_leaves_the_others_as_they_were_sent() -> None:
    """Also if an exchange has read one that was written."""
    shards = shards_of(100, 200, 300_001, 70_000)
    with torch.device("meta"):
        weights = watched(shards)
        for shard in shards[:3]:
            shard.zero_()
        weights.take(shards, only={1})
    assert weights.written(shards, OneRank()) == [0, 2]


def test_the_first_exchange_takes_all_shards() -> None:
    shards = shards_of(100, 200)
    weights = WrittenWeights([torch.bfloat16] * 2, CPU)
    assert not weights.is_taken
    weights.note(shards)  # of nothing
    weights.take(shards, only={1})
    assert weights.is_taken and weights.written(shards, OneRank()) == []
    shards[0].zero_()
    assert weights.written(shards, OneRank()) == [0]


def test_an_exchange_of_some_shards_takes_all_if_one_has_another_size() -> None:
    shards = shards_of(100, 300_001)
    weights = watched(shards)
    shards[0].zero_()
    longer = [shards[0], torch.cat([shards[1], shards[1]])]
    weights.take(longer, only={1})
    assert weights.written(longer, OneRank()) == []


def test_nothing_is_compared_with_weights_that_are_forgotten() -> None:
    shards = shards_of(100, 200)
    weights = watched(shards)
    shards[0].zero_()
    weights.note(shards)
    weights.forget()
    assert not weights.is_taken
    shards[1].zero_()
    assert weights.written(shards, OneRank()) == []
    weights.take(shards)
    assert weights.written(shards, OneRank()) == []
    shards[1].fill_(1)
    assert weights.written(shards, OneRank()) == [1]


def test_what_was_noted_of_shards_of_another_size_is_dropped() -> None:
    shards = shards_of(100, 300_001)
    weights = watched(shards)
    shards[0].zero_()
    weights.note(shards)
    longer = [shards[0], torch.cat([shards[1], shards[1]])]
    weights.take(longer)
    assert weights.written(longer, OneRank()) == []


# ---- fingerprints ----


def words_of(values: Tensor) -> np.ndarray:
    """Return the words of a piece, filled with zeros."""
    bits = values.contiguous().view(torch.uint8).numpy()
    return np.pad(bits, (0, -len(bits) % 8)).view(np.int64)


def folded(words: np.ndarray) -> np.ndarray:
    """Return sums of columns and rows of a table of 255 columns, then the words behind it."""
    rows = len(words) // 255
    rows -= 1 - rows % 2  # an odd number
    table = words[: rows * 255].reshape(rows, 255)
    return np.concatenate([table.sum(0), table.sum(1), words[rows * 255 :]])


def fingerprint(words: np.ndarray, first: int) -> int:
    """Follow [Note: fingerprints]. first: index of the first word, which says by which odd number
    it is multiplied.
    """
    indices = np.arange(first, first + len(words), dtype=np.int64)
    mixed = words * ((2 * indices + 1) * np.int64(0x9E3779B97F4A7C15 - (1 << 64)))
    return int((mixed ^ (mixed >> 32)).sum())


Pieces = list[tuple[int, int, int]]  # shard, start and stop


def fingerprints(shards: list[Tensor], runs: list[Pieces]) -> list[int]:
    """Return the fingerprints of pieces. Those of a run share a count of words."""
    found = []
    for pieces in runs:
        first = 0
        for shard, start, stop in pieces:
            words = words_of(shards[shard][start:stop])
            if len(pieces) == 1 and len(words) >= 8192:
                words = folded(words)
            found.append(fingerprint(words, first))
            first += len(words)
    return found


FP64, BF16 = torch.float64, torch.bfloat16
RUN = 65536  # words on the CPU


@pytest.mark.parametrize(
    ("shards", "runs"),
    [
        # pieces of one dtype share a run
        ([(5, BF16), (8191, FP64), (3, BF16)], [[(0, 0, 5), (2, 0, 3)], [(1, 0, 8191)]]),
        # from 8192 words on a piece of its own is folded, to 31 and 33 rows
        ([(8192, FP64)], [[(0, 0, 8192)]]),
        ([(33 * 255, FP64), (4 * 9000, BF16)], [[(0, 0, 33 * 255)], [(1, 0, 4 * 9000)]]),
        # a run has 65536 words at most
        ([(RUN // 2, FP64), (RUN // 2, FP64)], [[(0, 0, RUN // 2), (1, 0, RUN // 2)]]),
        ([(RUN // 2, FP64), (RUN // 2 + 1, FP64)], [[(0, 0, RUN // 2)], [(1, 0, RUN // 2 + 1)]]),
        (
            [(40_000, FP64), (RUN // 2, FP64), (RUN // 2 - 7, FP64), (7, FP64)],
            [[(0, 0, 40_000)], [(1, 0, RUN // 2), (2, 0, RUN // 2 - 7), (3, 0, 7)]],
        ),
        # larger shards are cut
        (
            [(4 * 2 * RUN + 6, BF16), (3, BF16)],
            [[(0, 0, 4 * RUN)], [(0, 4 * RUN, 8 * RUN)], [(0, 8 * RUN, 8 * RUN + 6), (1, 0, 3)]],
        ),
        ([(0, FP64), (1, FP64)], [[(1, 0, 1)]]),
        ([(0, FP64)], []),
    ],
)
def test_fingerprints_are_those_of_the_note(
    shards: list[tuple[int, torch.dtype]], runs: list[Pieces]
) -> None:
    values = [shards_of(numel, dtype=dtype)[0] for numel, dtype in shards]
    with torch.device("meta"):
        made = Fingerprints([dtype for _, dtype in shards], CPU)
        found = made.of(values)
    assert found.dtype == torch.int64 and found.tolist() == fingerprints(values, runs)
    wanted = [shard for pieces in runs for shard, _, _ in pieces]
    assert made.shard_of_piece.dtype == torch.int64 and made.shard_of_piece.tolist() == wanted


def test_fingerprints_of_shards_that_are_not_asked_for_are_zeros_if_no_run_needs_them() -> None:
    """Here bf16 is a run, and fp64 another one."""
    values = [
        shards_of(numel, dtype=dtype)[0] for numel, dtype in ((5, BF16), (9, FP64), (3, BF16))
    ]
    made = Fingerprints([BF16, FP64, BF16], CPU)
    first, third, second = made.of(values).tolist()
    assert made.of(values, only={2}).tolist() == [first, third, 0]
    assert made.of(values, only={1}).tolist() == [0, 0, second]
    assert made.of(values, only=set()).tolist() == [0, 0, 0]
    assert made.pieces_of({0, 1}).tolist() == [True, False, True]


def test_runs_on_a_device_are_longer_than_on_the_cpu() -> None:
    """2^21 words: kernels should be few there. On the CPU a run stays in the cache."""
    made = Fingerprints([FP64], torch.device("meta"))
    made._plan(((1 << 22) + 1,))
    assert made.shard_of_piece.device.type == "meta" and len(made.shard_of_piece) == 3


@pytest.mark.parametrize(
    ("shard", "copies"),
    [
        (torch.randn(64, 32), False),
        (torch.randn(2050)[2:], False),  # 8 bytes behind the start
        (torch.randn(2049)[1:], True),  # 4 bytes
        (torch.randn(2047), True),  # half a word at the end
        (torch.randn(32, 64).t(), True),
        (torch.randn(2048, dtype=FP64), True),  # compared in fp32
        (torch.randn(2048, requires_grad=True), False),
    ],
)
def test_a_shard_that_lies_in_whole_words_is_not_copied(
    shard: Tensor, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[object] = []
    copy = written_weights._Run._copied_words

    def noted(self: object, *args: object) -> Tensor:
        copied.append(self)
        return copy(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(written_weights._Run, "_copied_words", noted)
    found = Fingerprints([torch.float32], CPU).of([shard])
    flat = shard.detach().float().reshape(-1)
    assert found.tolist() == fingerprints([flat], [[(0, 0, flat.numel())]])
    assert len(copied) == copies and not found.requires_grad


def test_planned_pieces_and_runs_are_given_by_name_and_do_not_change() -> None:
    """They serve all steps."""
    piece = written_weights._Piece(shard=0, start=0, stop=8)
    run = written_weights._Run(
        dtype=BF16, pieces=(piece,), numels=(8,), last_words=torch.tensor([1])
    )
    with pytest.raises(FrozenInstanceError):
        piece.start = 1  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        run.numels = ()  # type: ignore[misc]
    with pytest.raises(TypeError):
        written_weights._Piece(0, 0, 8)  # type: ignore[misc]
    with pytest.raises(TypeError):
        written_weights._Run(BF16, (piece,), (8,), torch.tensor([1]))  # type: ignore[misc]
