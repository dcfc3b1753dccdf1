"""Messages whose length the values decide, on ranks of one process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ds_quant.comm import lossless_gather
from ds_quant.comm.lossless_gather import LosslessGather, LosslessMessage, posts
from ds_quant.comm.node_rows import LosslessRows
from ds_quant.comm.traffic import Tally
from tests.world import SimulatedRank, World

BF16 = torch.bfloat16
WRONG = (-16, 0, 8, 40, 1 << 20, 1 << 62)


def outbox(rank: SimulatedRank, parcels: Sequence[LosslessMessage]) -> LosslessGather:
    hierarchy, how = (
        rank.run.world.hierarchy,
        {"device": torch.device("cpu"), "traffic": rank.run.traffic},
    )
    return LosslessGather(parcels, hierarchy.flat, hierarchy, **how)


def gathered(rank: SimulatedRank) -> list[list[float]]:
    """Return the bytes of all ranks after messages of three sizes, one of them none."""
    ranks, mine = rank.run.topology.world, rank.number
    reference = [torch.zeros(ranks, numel, dtype=BF16) for numel in (5, 0, 3000)]
    sent = outbox(
        rank,
        [
            LosslessMessage(rows.shape[1], lambda rows=rows: (rows[mine] + 1 + mine, rows[mine]))
            for rows in reference
        ],
    )
    for place, rows in enumerate(reference):
        assert sent.post(place, lambda rows=rows: rows).wait() is rows
    assert rank.run.traffic.lossless.numel == ranks * 3005
    return [rows.float().unique(dim=1).tolist() for rows in reference if rows.numel()]


@pytest.mark.parametrize("topology", [(4, 1), (2, 2), (1, 4)], ids=str)
def test_every_rank_gets_the_values_of_every_other(topology: tuple[int, int], monkeypatch) -> None:
    """A message of all ranks is decoded at once."""
    decode = Mock(side_effect=lossless_gather.decode_lossless)
    monkeypatch.setattr(lossless_gather, "decode_lossless", decode)
    for found in World(*topology).all(gathered):
        assert found == [[[1.0], [2.0], [3.0], [4.0]]] * 2
    assert decode.call_count == 4 * 2


@pytest.mark.parametrize("columns", [(range(9),), (range(2, 9),), (range(3), range(5, 8))], ids=str)
def test_rows_of_fsdp2_are_updated_in_columns_of_trained_parameters_alone(columns: Any) -> None:
    def exchanged(rank: SimulatedRank) -> torch.Tensor:
        rows, link = torch.zeros(3, 9, dtype=BF16), rank.run.world.hierarchy.flat
        new_row = torch.full((9,), 1.0 + rank.number, dtype=BF16)
        kept = [rows[:, column.start : column.stop] for column in columns]
        new = [new_row[column.start : column.stop] for column in columns]
        sources = [LosslessRows(kept, rank.number, lambda: new)]
        for post in posts(sources, link, link, device=rows.device, traffic=rank.run.traffic):
            post().wait()
        return rows

    wanted = torch.zeros(3, 9)
    for column in itertools.chain(*columns):
        wanted[:, column] = torch.tensor([1.0, 2.0, 3.0])
    for rows in World(3, 1).all(exchanged):
        assert torch.equal(rows.float(), wanted)


@pytest.mark.parametrize("lost", [0.0, 1.0])
def test_a_sample_reads_back_what_every_message_holds(lost: float) -> None:
    """Weights that are not those encoded show as an error."""
    wanted = torch.linspace(1, 2, 3000).to(BF16)

    def read_back(rank: SimulatedRank) -> Tally:
        values = iter([wanted, wanted + lost])
        meter = rank.run.traffic.meter
        meter.open(lambda: 0.0)
        outbox(rank, [LosslessMessage(3000, lambda: (next(values), wanted * 1.01))])
        return meter.close().tallies["weights", "inter"]

    for tally in World(4, 1).all(read_back):
        error, norm = tally.squares.tolist()
        assert error == pytest.approx(3000 * lost, rel=0.01)
        assert norm == pytest.approx((wanted + lost).double().square().sum().item())
        assert tally.numel == 3000 and 0 < tally.nbytes < 2 * 3000


@pytest.mark.parametrize("damaged", [0, 1, 3])
@pytest.mark.parametrize("topology", [(4, 1), (2, 2)], ids=str)
def test_an_error_names_the_rank_whose_weights_were_changed(topology: Any, damaged: int) -> None:
    """All ranks change their old weights of one rank after encoding, and ``wait`` decodes them."""

    def changed(rank: SimulatedRank) -> Any:
        rows = torch.linspace(1, 2, 4 * 3000).view(4, -1).to(BF16)
        own = rows[rank.number].clone()
        posted = outbox(rank, [LosslessMessage(3000, lambda: (own * 1.01, own))]).post(
            0, lambda: rows
        )
        rows[damaged, 100] += 1
        posted.wait()
        return rank.run.world.hierarchy.flat.message_errors.first()

    for number, found in enumerate(World(*topology).all(changed)):
        assert (found.role, found.sender) == ("weights", damaged)
        said = found.problem.format(number)
        assert said.startswith(f"cannot be decoded on rank {number} (lossless message: wrong ")


def announced(rank: SimulatedRank) -> list[str]:
    """Return the errors of an outbox for every wrong length."""
    reference, said, link = torch.zeros(100, dtype=BF16), [], rank.run.world.hierarchy.flat
    gather = link.all_gather

    def announce(wrong: int, lengths: torch.Tensor, **how: Any) -> Any:
        lengths.view(torch.int64).fill_(wrong)
        return gather(lengths, **how)

    for wrong in WRONG:
        if rank.number == 1:
            link.all_gather = partial(announce, wrong)
        with pytest.raises(RuntimeError) as told:
            outbox(rank, [LosslessMessage(100, lambda: (reference + 1, reference))] * 2)
        said.append(str(told.value))
    return said


@pytest.mark.parametrize("topology", [(4, 1), (2, 2)], ids=str)
def test_a_length_that_cannot_be_ends_all_ranks_before_anything_is_received(topology: Any) -> None:
    world = World(*topology)
    for said in world.all(announced):
        for message, wrong in zip(said, WRONG, strict=True):
            assert f"rank 1 announces {wrong} bytes of weights" in message
            assert "multiples of 16 up to" in message
    counted = {sum(rank.run.traffic.collectives.values()) for rank in world.ranks}
    assert counted == {len(WRONG)}, "lengths alone"


def test_lengths_that_one_rank_received_otherwise_end_all_ranks() -> None:
    """One that may be."""
    reference = torch.zeros(2000, dtype=BF16)

    def received(rank: SimulatedRank) -> str:
        link = rank.run.world.hierarchy.flat
        if rank.number == 2:
            gather = link.all_gather
            link.all_gather = lambda *a, **how: gather(*a, **how).then(garbled)
        with pytest.raises(RuntimeError) as told:
            outbox(rank, [LosslessMessage(2000, lambda: (reference + 1, reference))])
        return str(told.value)

    def garbled(arrived: torch.Tensor) -> torch.Tensor:
        arrived.view(torch.int64)[1] += 16
        return arrived

    for said in World(1, 4).all(received):
        assert "ranks have received different lengths" in said and "faulty memory" in said
