"""One step under FSDP2 against the wire page: every message, byte for byte, and the weights and
sums that its oracles compute from the messages, bit for bit.

A rank returns what it has sent, and what FSDP2 gave it and got back. The page is followed by
tests/unit/wire_oracle.py and lossless_oracle.py, which import nothing of ds_quant.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ds_quant.comm.transport import Communicator
from ds_quant.config.schema import parse_block
from ds_quant.fsdp2.attaching import front_of
from ds_quant.fsdp2.gradients import QuantizedReduceScatter
from tests.codecs import format_of
from tests.distributed.harness import run
from tests.distributed.test_fsdp2 import train, weights_of
from tests.distributed.test_fsdp2_weights import attached, computed_with
from tests.thin import thinned
from tests.unit import lossless_oracle
from tests.unit import wire_oracle as oracle

RANKS, NODE_SIZE = 4, 2
NODES = ((0, 1), (2, 3))
EQUAL_INDICES = ((0, 2), (1, 3))
STEP = 1  # the recorded one; steps are counted from 0
Bits = np.ndarray  # of bf16
PieceValues = dict[oracle.Piece, np.ndarray]


class Sent(NamedTuple):
    """A message of one rank. sizes: bytes for every rank of the group; None for a gather."""

    payload: bytes
    sizes: list[int] | None

    def to(self, index: int) -> bytes:
        if self.sizes is None:
            return self.payload
        start = sum(self.sizes[:index])
        return self.payload[start : start + self.sizes[index]]


class Row(NamedTuple):
    """A parameter in the rows of a module. quantized: False if in full precision."""

    name: str
    index: int
    numel: int
    offset: int
    width: int
    lengths: tuple[int, ...]
    quantized: bool

    def shard(self, flat: np.ndarray, rank: int) -> np.ndarray:
        start = rank * self.width
        return flat[start : start + self.lengths[rank]]


class Recorded(NamedTuple):
    """One step of a rank.

    modules: the rows of every module, by its name.
    before, after: bits of the weights that the rank computes with, by parameter.
    exact: bits of the optimizer's weights after the step.
    reductions: (module, bits of its gradients, bits of their sums), in order.
    sent: by ranks of the group and role, in order.
    """

    modules: dict[str, list[Row]]
    before: dict[str, Bits]
    after: dict[str, Bits]
    exact: dict[str, Bits]
    reductions: list[tuple[str, Bits, Bits]]
    sent: dict[tuple[tuple[int, ...], str], list[Sent]]


def bits(values: torch.Tensor) -> Bits:
    return values.detach().bfloat16().view(torch.uint16).flatten().numpy().copy()


def floats(halves: Bits) -> np.ndarray:
    return (halves.astype(np.uint32) << 16).view(np.float32)


def rounded(values: np.ndarray) -> Bits:
    return bits(torch.from_numpy(values))


# ---- on the ranks ----


def record(scheme: str) -> Recorded:
    """Train two steps, and record the second one and the weights after it."""
    model, optimizer = attached({"scheme": scheme, "slices": 2})
    front = front_of(model)
    train(model, optimizer, steps=STEP)
    found = Recorded(
        modules={
            sharded.name: [
                Row(p.name, p.index, p.shape.numel(), *place, p.is_quantized(sharded.dtype))
                for p, *place in zip(
                    sharded.params, sharded.offsets, sharded.widths, sharded.lengths, strict=True
                )
            ]
            for sharded, _, _ in front.served
        },
        before={name: bits(values) for name, values in computed_with(model).items()},
        after={},
        exact={},
        reductions=[],
        sent=defaultdict(list),
    )
    gather, exchange, reduce = (
        Communicator.all_gather, Communicator.all_to_all, QuantizedReduceScatter.__call__
    )  # fmt: skip

    def gathered(self: Any, payload: torch.Tensor, *, role: str) -> Any:
        sent = Sent(payload.numpy().tobytes(), None)
        found.sent[tuple(self.ranks), role].append(sent)
        return gather(self, payload, role=role)

    def exchanged(self: Any, payload: torch.Tensor, *, sent: Any, received: Any, role: str) -> Any:
        found.sent[tuple(self.ranks), role].append(Sent(payload.numpy().tobytes(), list(sent)))
        return exchange(self, payload, sent=sent, received=received, role=role)

    def reduced(self: Any, output: torch.Tensor, gradients: torch.Tensor, *how: Any) -> None:
        given = bits(gradients)
        reduce(self, output, gradients, *how)
        found.reductions.append((self.sharded.name, given, bits(output)))

    Communicator.all_gather, Communicator.all_to_all = gathered, exchanged
    QuantizedReduceScatter.__call__ = lambda self, output_tensor, input_tensor, group, op, **_: (
        reduced(self, output_tensor, input_tensor, group, op)
    )
    train(model, optimizer, steps=1)
    found.after.update((name, bits(values)) for name, values in computed_with(model).items())
    found.exact.update((name, bits(values)) for name, values in weights_of(model).items())
    return found


# ---- weights ----


SCHEMES = thinned(["qsdp", "sdp4bit", "eden4", "lossless_w_g3"], lambda scheme: scheme != "sdp4bit")


@functools.cache
def recorded_ranks(scheme: str) -> list[Recorded]:
    return run(record, RANKS, scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_between_nodes_are_those_of_the_page(scheme: str) -> None:
    """Compares the last messages, which are those of every module after the step."""
    ranks = recorded_ranks(scheme)
    modules = ranks[0].modules
    for sender, recorded in enumerate(ranks):
        sent = recorded.sent[EQUAL_INDICES[sender % NODE_SIZE], "weights"]
        for rows, message in zip(modules.values(), sent[-len(modules) :], strict=True):
            if scheme == "lossless_w_g3":
                decoded = decode_lossless(rows, message.payload, recorded, sender)
            else:
                decoded = decode(scheme, rows, message.payload, recorded, sender)
            for row, wanted in zip(rows, decoded, strict=True):
                for one in ranks:
                    found = row.shard(one.after[row.name], sender)
                    assert np.array_equal(found, wanted), (row.name, sender)
    for name, before in ranks[0].before.items():
        assert not np.array_equal(before, ranks[0].after[name])


def decode(
    scheme: str, rows: Sequence[Row], message: bytes, recorded: Recorded, sender: int
) -> list[Bits]:
    """Return the shards of a sender, decoded from its message, which must be the page's."""
    fmt = format_of(scheme_of(scheme).weights)
    messages: dict[oracle.Piece, bytes] = {}
    decoded = []
    for i, row in enumerate(rows):
        sent = fmt if row.quantized else "bf16"
        piece = oracle.Piece(
            tensor=i, start=0, stop=row.lengths[sender], reducer=0, formats=(sent,), room=row.width
        )
        values = floats(row.shard(recorded.exact[row.name], sender))
        reference = np.zeros_like(values)
        if row.quantized and scheme != "qsdp":
            reference = floats(row.shard(recorded.before[row.name], sender))
        key = oracle.key_of(seed=0, role=0, parameter=row.index, stream=0, hop=0)
        messages[piece] = oracle.row_of(values - reference, sent, (key, STEP + 1), 0)
        decoded.append(rounded(oracle.read(messages[piece], sent, piece.stop) + reference))
    assert oracle.holds(message, messages, 0)
    return decoded


def decode_lossless(
    rows: Sequence[Row], message: bytes, recorded: Recorded, sender: int
) -> list[Bits]:
    """Return the shards of a sender, decoded: exact ones.

    A message has all rows of a module end to end, of which the padding is 0.
    """
    reference = np.zeros(sum(row.width for row in rows), np.uint16)
    for row in rows:
        shard = row.shard(recorded.before[row.name], sender)
        reference[row.offset : row.offset + len(shard)] = shard
    used = int.from_bytes(message[8:16], "little")
    values = np.array(
        lossless_oracle.decode(message[:used], reference.tolist(), exponent_at=7), np.uint16
    )
    shards = [values[row.offset : row.offset + row.lengths[sender]] for row in rows]
    for row, shard in zip(rows, shards, strict=True):
        assert np.array_equal(shard, row.shard(recorded.exact[row.name], sender))
    return shards


def scheme_of(name: str) -> Any:
    return parse_block({"scheme": name}).to_scheme()


# ---- sums ----


@pytest.mark.parametrize("scheme", SCHEMES)
def test_messages_and_sums_of_gradients_are_those_of_the_page(scheme: str) -> None:
    ranks = recorded_ranks(scheme)
    rounds: dict[tuple[int, ...], int] = defaultdict(int)
    assert len(ranks[0].reductions) == len(ranks[0].modules)
    for number, (module, _, _) in enumerate(ranks[0].reductions):
        rows = ranks[0].modules[module]
        given = [one.reductions[number][1] for one in ranks]
        found = [one.reductions[number][2] for one in ranks]
        reduction = ReductionOracle(scheme, rows, given, ranks, rounds)
        for rank, sums in enumerate(reduction.checked_sums()):
            for i, row in enumerate(rows):
                parts = sorted((p.start, s) for p, s in sums.items() if p.tensor == i)
                wanted = np.concatenate([np.zeros(0, np.float32), *(s for _, s in parts)])
                result = found[rank][row.offset : row.offset + row.lengths[rank]]
                assert np.array_equal(result, rounded(wanted)), (row.name, rank)


class ReductionOracle:
    """One reduction over both hops as the page says. Its messages are compared with those sent.

    rows: of the module. given: the gradients of every rank.
    rounds: messages of every group that were looked at.
    """

    def __init__(
        self,
        scheme: str,
        rows: Sequence[Row],
        given: Sequence[Bits],
        ranks: Sequence[Recorded],
        rounds: dict[tuple[int, ...], int],
    ) -> None:
        self._scheme = scheme_of(scheme)
        self._rows = rows
        self._given = given
        self._ranks = ranks
        self._rounds = rounds

    def checked_sums(self) -> list[PieceValues]:
        """Compare all messages of gradients. Return the sums of every rank."""
        scheme = self._scheme
        formats = (
            format_of(scheme.gradients_intra or scheme.gradients),
            format_of(scheme.gradients),
        )
        pieces = list(pieces_of(self._rows, formats, scheme.block.gradients.rotation))
        finished: list[PieceValues] = [{} for _ in self._ranks]
        for part in oracle.slices(pieces, 2):
            for rank, sums in self._checked_sums_of_slice(part).items():
                for piece, total in sums.items():
                    mean = oracle.finished(piece, total, 1 / RANKS)
                    finished[rank][piece] = mean * self._signs(piece, len(mean))
        return finished

    def _checked_sums_of_slice(self, pieces: Sequence[oracle.Piece]) -> dict[int, PieceValues]:
        """Compare the messages of a slice on both hops. Return its sums by rank, still rotated.

        A rank has the sums of those pieces that it reduces: after the first hop for its node, after
        the second for all ranks.
        """
        values = {}
        for rank in range(RANKS):
            values[rank] = {piece: self._own_values(piece, rank) for piece in pieces}
        for level, groups in enumerate((NODES, EQUAL_INDICES)):
            sums: dict[int, PieceValues] = {}
            for group in groups:
                sums |= self._checked_sums_of_group(level, group, values)
            values = sums
        return values

    def _checked_sums_of_group(
        self, level: int, group: tuple[int, ...], values: dict[int, PieceValues]
    ) -> dict[int, PieceValues]:
        """Compare the messages of a group on one hop, and return the sums of its ranks."""
        number = self._rounds[group]
        self._rounds[group] += 1
        sums = {}
        for index, receiver in enumerate(group):
            taken = [p for p in values[receiver] if _index_of_reducer(p, level, group) == index]
            messages = {}
            for source, sender in enumerate(group):
                if sender == receiver:
                    continue  # its own values take no message
                message = self._ranks[sender].sent[group, "gradients"][number].to(index)
                expected = {p: self._encoded(p, values[sender][p], sender, level) for p in taken}
                assert oracle.holds(message, expected, level)
                messages[source] = message
            sums[receiver] = oracle.add_up(taken, messages, level, (index, values[receiver]))
        return sums

    def _own_values(self, piece: oracle.Piece, rank: int) -> np.ndarray:
        """Return the values that a rank adds, rotated."""
        row = self._rows[piece.tensor]
        shards = floats(self._given[rank]).reshape(RANKS, -1)
        gradient = shards[:, row.offset : row.offset + row.width].reshape(-1)
        values = gradient[piece.start : piece.stop]
        values = values * self._signs(piece, len(values))
        return oracle.rotate(values, piece.h) if piece.h else values

    def _signs(self, piece: oracle.Piece, numel: int) -> np.ndarray | np.float32:
        if not piece.h or not self._scheme.block.gradients.rotation_signs:
            return np.float32(1)
        key = self._key(piece, stream=0, hop=99)
        return np.resize(oracle.signs_of(key, STEP << 24, piece.h), numel)

    def _encoded(self, piece: oracle.Piece, values: np.ndarray, sender: int, level: int) -> bytes:
        key = self._key(piece, stream=sender + 1, hop=level)
        return oracle.row_of(values, piece.formats[level], (key, STEP << 24), piece.first())

    def _key(self, piece: oracle.Piece, *, stream: int, hop: int) -> int:
        parameter = self._rows[piece.tensor].index
        return oracle.key_of(seed=0, role=1, parameter=parameter, stream=stream, hop=hop)


def _index_of_reducer(piece: oracle.Piece, level: int, group: tuple[int, ...]) -> int:
    """Return the index in the group of the rank that sums a piece on a hop."""
    if level == 0:  # inside the node: the rank of equal local rank
        return piece.reducer % NODE_SIZE
    return group.index(piece.reducer)


def pieces_of(
    rows: Sequence[Row], formats: tuple[oracle.Sent, ...], h: int
) -> Iterator[oracle.Piece]:
    """Yield every rank's shard of every gradient, small ones last."""
    for wanted in (False, True):
        for i, row in enumerate(rows):
            sent = formats if row.quantized else ("bf16", "bf16")
            small = oracle.is_small(sent, row.numel)
            for rank, numel in enumerate(row.lengths if small == wanted else ()):
                yield oracle.Piece(
                    tensor=i,
                    start=rank * row.width,
                    stop=rank * row.width + numel,
                    reducer=rank,
                    formats=sent,
                    h=h if row.quantized else 0,
                    small=small,
                    room=row.width if small else 0,
                )
