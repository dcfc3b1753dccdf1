"""Memory of a launch: that of this process, and the shared memory of its blocks.

Global, local and parameter memory have the addresses of this process, as the tensors do. Addresses
of shared memory count from the begin of a block's own.
"""

from __future__ import annotations

import ctypes

import numpy as np

from ds_quant.kernels.wire import round_up

_FIRST = 1 << 12  # no page below is mapped
_SPACE = (ctypes.c_uint8 * ((1 << 47) - _FIRST)).from_address(_FIRST)
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_PROCESS = {bits: np.frombuffer(_SPACE, dtype, ((1 << 47) - _FIRST) // dtype().itemsize)
            for bits, dtype in UNSIGNED.items()}  # fmt: skip


class MemoryFault(Exception):
    """An access that a GPU would refuse, or a race."""


class ProcessMemory:
    """The memory of this process. A wrong address ends the process."""

    def load(self, address: np.ndarray, bits: int, lanes: np.ndarray) -> np.ndarray:
        """Return the words at the addresses (lanes,) u64. bits: of a word."""
        return _PROCESS[bits][_index(address, bits)]

    def store(self, address: np.ndarray, values: np.ndarray, bits: int, lanes: np.ndarray) -> None:
        _PROCESS[bits][_index(address, bits)] = values

    def combine(
        self, ufunc: np.ufunc, address: np.ndarray, values: np.ndarray, bits: int, lanes: np.ndarray
    ) -> None:
        """Atomic operation: combine words with values, one lane after the other."""
        places, inverse = np.unique(_index(address, bits), return_inverse=True)
        words = _PROCESS[bits][places]
        ufunc.at(words, inverse, values)
        _PROCESS[bits][places] = words


def _index(address: np.ndarray, bits: int) -> np.ndarray:
    return (address - np.uint64(_FIRST)).view(np.int64) // (bits // 8)


def check_alignment(address: np.ndarray, nbytes: int) -> None:
    if (address & np.uint64(nbytes - 1)).any():
        raise MemoryFault(f"an address is no multiple of {nbytes} bytes")


# Races are looked for in units of so many bytes: kernels share nothing smaller.
_UNIT = 2


class SharedMemory:
    """Shared memory of several blocks, and a detector of races.

    Two accesses to a word by different lanes, of which one writes, are ordered by a barrier of the
    block or, within a warp, of the warp; otherwise they are a race. Of several readers the last one
    is remembered, and lanes that execute one instruction at once are not compared, so a race may be
    missed; none is invented. Atomic operations do not race with each other.

    block_of_lane, warp_of_lane: (lanes,) i64.
    """

    def __init__(self, nbytes: int, block_of_lane: np.ndarray, warp_of_lane: np.ndarray) -> None:
        self.nbytes = round_up(nbytes, 16)
        blocks = int(block_of_lane.max()) + 1
        self._start = block_of_lane * self.nbytes
        self._warp = warp_of_lane
        # Nothing is zero before a block has written it.
        self._words = {8: np.full(blocks * self.nbytes, 0xA5, np.uint8)}
        for bits in (16, 32, 64):
            self._words[bits] = self._words[8].view(UNSIGNED[bits])
        self._block_barriers = np.zeros(len(block_of_lane), np.int64)  # that a lane has passed
        self._warp_barriers = np.zeros(len(block_of_lane), np.int64)
        units = len(self._words[8]) // _UNIT
        self._read = _LastAccess(units)
        self._written = _LastAccess(units)
        self._combined = _LastAccess(units)  # atomically

    def pass_barrier(self, lanes: np.ndarray, *, of_block: bool) -> None:
        """Note that the lanes have passed a barrier of their block or warp."""
        barriers = self._block_barriers if of_block else self._warp_barriers
        barriers[lanes] += 1

    def load(self, address: np.ndarray, bits: int, lanes: np.ndarray) -> np.ndarray:
        """Return the words at the addresses (lanes,) u64. bits: of a word."""
        place = self._place(address, bits, lanes)
        self._order(place, bits, lanes, self._read, after=(self._written, self._combined))
        return self._words[bits][place]

    def store(self, address: np.ndarray, values: np.ndarray, bits: int, lanes: np.ndarray) -> None:
        place = self._place(address, bits, lanes)
        others = (self._read, self._written, self._combined)
        self._order(place, bits, lanes, self._written, after=others)
        self._words[bits][place] = values

    def combine(
        self, ufunc: np.ufunc, address: np.ndarray, values: np.ndarray, bits: int, lanes: np.ndarray
    ) -> None:
        """Atomic operation: combine words with values, one lane after the other."""
        place = self._place(address, bits, lanes)
        self._order(place, bits, lanes, self._combined, after=(self._read, self._written))
        ufunc.at(self._words[bits], place, values)

    def _place(self, address: np.ndarray, bits: int, lanes: np.ndarray) -> np.ndarray:
        if (address > np.uint64(self.nbytes - bits // 8)).any():
            raise MemoryFault(f"an access beyond {self.nbytes} bytes of shared memory")
        return (self._start[lanes] + address.view(np.int64)) // (bits // 8)

    def _order(
        self,
        place: np.ndarray,
        bits: int,
        lanes: np.ndarray,
        access: _LastAccess,
        *,
        after: tuple[_LastAccess, ...],
    ) -> None:
        """Check that a barrier lies between this access and earlier ones of others. Note it."""
        units = bits // 8 // _UNIT
        unit = (place[:, None] * units + np.arange(units)).ravel()
        lane = lanes.repeat(units)
        for earlier in after:
            other = earlier.lane[unit]
            races = (other >= 0) & (other != lane)
            if not races.any():
                continue
            races &= earlier.block_barriers[unit] == self._block_barriers[lane]
            is_same_warp = self._warp[other] == self._warp[lane]
            has_warp_barrier = earlier.warp_barriers[unit] != self._warp_barriers[lane]
            races &= ~(is_same_warp & has_warp_barrier)
            if races.any():
                first = int(races.argmax())
                raise MemoryFault(
                    f"race: no barrier lies between lanes {other[first]} and {lane[first]}, "
                    f"which use byte {unit[first] * _UNIT % self.nbytes} of shared memory"
                )
        access.lane[unit] = lane
        access.block_barriers[unit] = self._block_barriers[lane]
        access.warp_barriers[unit] = self._warp_barriers[lane]


class _LastAccess:
    """The lane that used each unit last, and the barriers that it had passed. lane -1: none."""

    def __init__(self, units: int) -> None:
        self.lane = np.full(units, -1, np.int64)
        self.block_barriers = np.zeros(units, np.int64)
        self.warp_barriers = np.zeros(units, np.int64)
