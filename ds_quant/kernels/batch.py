"""Operations on pieces of many tensors as one call, with their arguments as arrays.

[Note: operations] A collective does the same for every tensor, slice and rank: encode, add up,
encode the sum. An operation says what is done and in which buffers, its places say where. Both
follow from sizes alone, so they are made once per kind of bucket; a step hands over the buffers and
the streams of random bits, whose numbers are filled into one array. So the host's work does not
grow with the ranks. Places are in items of a buffer, and vectors count from the stream's first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ds_quant.kernels.wire import Format, round_up

Places = tuple[int, ...]
OWN_SIGNS = 2

# Numbers by which the kernels know dtypes and ways to round.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ROUNDINGS = {"nearest": 0, "stochastic": 1, "random_shift": 2}


def rounding_of(fmt: Format) -> int:
    """Return how the codes of a format are made."""
    if fmt.is_gaussian:
        return 4
    return 3 if fmt.levels == "learned" else _ROUNDINGS[fmt.rounding]


class Encode(NamedTuple):
    """Places: values, wire, vector, and base if there is one: the buffer ``base`` has what
    is subtracted. ``block``: of a rotation, 0 for none, as below; then the wire holds whole blocks.
    ``flips``: whether its signs may flip.
    """

    codec: Format
    numel: int
    values: int  # a buffer, as wire and own
    wire: int
    stream: int
    block: int = 0
    flips: bool = False
    base: int | None = None

    @property
    def on_wire(self) -> int:
        """Elements of a row."""
        return round_up(self.numel, self.block or 1)


class Decode(NamedTuple):
    """Places: wire, values. ``add``: to the values that are there."""

    codec: Format
    numel: int
    wire: int
    values: int
    stream: int
    add: bool = False


class Sum(NamedTuple):
    """Places: wire, values, own. Sources are rows ``stride`` bytes apart; ``place`` is the one
    that the wire leaves out, its values are ``own``, fp32; None for none. A rotation is undone,
    with OWN_SIGNS that of every source before it is added: see ``reference.decode_sum``.
    ``beside``: the codec to which other sums are recoded, of fp32 values that are neither scaled
    nor rotated back; no number depends on it.
    """

    codec: Format
    numel: int
    wire_in: int
    values: int
    stream: int
    sources: int
    stride: int
    place: int | None
    own: int
    block: int = 0
    flips: int = 0
    scale: float = 1.0
    beside: Format | None = None

    on_wire = Encode.on_wire


class Recode(NamedTuple):
    """Places: wire_in, wire, own, vector. The sum of ``sources`` is encoded; see Sum. Rotated
    values stay so.
    """

    source: Format
    codec: Format
    numel: int
    wire_in: int
    wire: int
    stream: int
    sources: int
    stride: int
    place: int | None
    own: int
    block: int = 0

    on_wire = Encode.on_wire


class Rotate(NamedTuple):
    """Places: values, fp32 rotated blocks. Without a block: the values as fp32. ``codec``: of other
    values of the tensor; no number depends on it.
    """

    codec: Format
    numel: int
    values: int
    rotated: int
    stream: int
    block: int = 0
    flips: bool = False

    padded = Encode.on_wire


Operation = Encode | Decode | Sum | Recode | Rotate
Task = tuple[Operation, Places]


class Rows(NamedTuple):
    """An operation at places that follow each other at equal steps, in one or more dimensions."""

    operation: Operation
    places: Places
    shape: tuple[int, ...] = ()
    steps: tuple[Places, ...] = ()  # of each dimension


def rows_of(tasks: Iterable[Task], dims: int) -> list[Rows]:
    """Merge consecutive tasks into few rows of ``dims`` dimensions, whose places increase."""
    found = [Rows(*task) for task in tasks]
    for _ in range(dims):
        found = _joined(found)
    return found


def _joined(rows: Sequence[Rows]) -> list[Rows]:
    found, first = [], 0
    while first < len(rows):
        one, last = rows[first], first
        step = tuple(0 for _ in one.places)
        while last + 1 < len(rows) and _are_alike(one, rows[last + 1]):
            pairs = zip(rows[last + 1].places, rows[last].places, strict=True)
            difference = tuple(b - a for b, a in pairs)
            if min(difference) < 0 or (last > first and difference != step):
                break
            step, last = difference, last + 1
        shape, steps = (last - first + 1, *one.shape), (step, *one.steps)
        found.append(Rows(one.operation, one.places, shape, steps))
        first = last + 1
    return found


def _are_alike(a: Rows, b: Rows) -> bool:
    return a.operation == b.operation and a.shape == b.shape and a.steps == b.steps


class StreamArrays(NamedTuple):
    """The streams of a run as arrays, (streams,) uint64, and the tensors that must outlive them."""

    key: np.ndarray
    step: np.ndarray
    first_vector: np.ndarray
    levels: np.ndarray  # addresses of tables, 0 for the initial one
    flips_low: np.ndarray
    flips_high: np.ndarray
    signs_key: np.ndarray
    signs_step: np.ndarray
    tensors: Sequence[torch.Tensor] = ()


class Arguments:
    """Arguments of many operations of one kernel: records, of which a run fills in some fields."""

    def __init__(self, fields: np.dtype, records: bytes, streams: Sequence[int]) -> None:
        self.records = np.frombuffer(bytearray(records), dtype=fields)
        self._streams = np.array(streams)
        self._pointers: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._taken: list[tuple[np.ndarray, str, np.ndarray, np.ndarray, np.ndarray | None]] = []
        self._tables: list[dict[Format, torch.Tensor | None]] = []  # behind addresses

    def point(self, field: str, to: Iterable[tuple[int, int]], part: slice = slice(None)) -> None:
        """``field`` of every record is an address: of a buffer, and bytes behind it."""
        buffers, offsets = np.array(list(to), dtype=np.int64).reshape(-1, 2).T
        self._pointers.append(
            (self.records[field][part], buffers.copy(), offsets.astype(np.uint64))
        )

    def take_randomness(self, vectors: Sequence[int], part: slice = slice(None)) -> None:
        """Take the random bits of the streams, ``vectors`` behind the first of each."""
        self._take("key", part=part)
        self._take("step", part=part)
        self._take("first_vector", plus=vectors, part=part)

    def take_flips(
        self, low: str = "flips_low", high: str = "flips_high", *, own: bool = False
    ) -> None:
        """Take the sign flips of the streams, ``own``: what those of each source are drawn from."""
        self._take(low, "signs_key" if own else "flips_low")
        self._take(high, "signs_step" if own else "flips_high")

    def take_levels(
        self, codecs: Sequence[Format], device: torch.device, field: str = "levels"
    ) -> None:
        """Take the learned levels of the streams; where there are none, the codecs' own."""
        with torch.inference_mode(False):
            tables = {codec: codec.table(None, device) for codec in set(codecs)}
        if any(table is not None for table in tables.values()):
            self._tables.append(tables)
            initial = [0 if tables[c] is None else tables[c].data_ptr() for c in codecs]
            self._take(field, "levels", instead=np.array(initial, dtype=np.uint64))

    def _take(
        self,
        field: str,
        name: str = "",
        *,
        plus: Sequence[int] = (),
        instead: np.ndarray | None = None,
        part: slice = slice(None),
    ) -> None:
        """``field`` of every record is ``name`` of its stream, plus a number; ``instead`` of 0."""
        target, streams = self.records[field][part], self._streams[part]
        more = np.array(plus, dtype=np.uint64) if plus else np.uint64(0)
        self._taken.append((target, name or field, streams, more, instead))

    def fill(self, addresses: np.ndarray, streams: StreamArrays) -> None:
        """addresses: of the buffers, uint64."""
        for target, buffers, offsets in self._pointers:
            np.add(addresses[buffers], offsets, out=target)
        for target, name, places, more, instead in self._taken:
            values = getattr(streams, name)[places] + more
            target[:] = values if instead is None else np.where(values, values, instead)


Runnable = Callable[[np.ndarray, StreamArrays], None]  # addresses of the buffers, uint64
