"""Runs a kernel: all lanes of some blocks at once, one lane per CUDA thread.

The lanes with the lowest instruction run first, until a branch, the place where others wait, or an
operation of a whole warp or block. So lanes that have parted at a branch meet again. A shuffle or a
barrier waits for all lanes of its warp or block that have not ended, as on a GPU; if they can never
come, that is an error.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import NamedTuple

import numpy as np

from ds_quant.kernels.wire import round_up
from tests.kernels.ptx import operations
from tests.kernels.ptx.memory import MemoryFault, ProcessMemory, SharedMemory
from tests.kernels.ptx.program import Instruction, Name, Program

Lanes = slice | np.ndarray  # numbers of the lanes that execute an instruction, ascending

WARP = 32
LANES_AT_ONCE = 4096  # of whole blocks
_WARP_WIDE = ("shfl", "redux")  # and bar.warp


class Kernel:
    """A program that is ready to run.

    For every instruction: classes, see ``class_of``; stops, "branch" if lanes may part at it,
    "warp" or "block" if it waits for others, else ""; execute, None for a branch.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.classes = [class_of(each) for each in program.instructions]
        self.stops = [_stop_of(each) for each in program.instructions]
        self.execute: list[operations.Execute | None] = []
        for instruction, stop in zip(program.instructions, self.stops, strict=True):
            self.execute.append(None if stop == "branch" else operations.bind(instruction))

    def launch(
        self, grid: tuple[int, int], threads: int, job: bytes, *, reciprocal_shift: int = 0
    ) -> Counter[str]:
        """Run all blocks of a launch.

        reciprocal_shift: units in the last place by which rcp.approx is moved.

        Returns:
            Executed instructions by class, of all lanes: a warp counts 32 also where fewer take
            part, as its instruction takes as long.
        """
        argument = ctypes.create_string_buffer(job, len(job) + 16)
        executed: Counter[str] = Counter()
        blocks = grid[0] * grid[1]
        at_once = max(1, LANES_AT_ONCE // threads)
        for first in range(0, blocks, at_once):
            place = Blocks(grid, threads, first, min(at_once, blocks - first))
            machine = Machine(self, place, ctypes.addressof(argument), reciprocal_shift)
            with np.errstate(all="ignore"):
                machine.run()
            for name, number in zip(self.classes, machine.executed_by_instruction(), strict=True):
                executed[name] += int(number)
        return executed


class Blocks(NamedTuple):
    """Blocks that run at once. first: index of the first one. at_once: how many."""

    grid: tuple[int, int]
    threads: int
    first: int
    at_once: int


class Machine:
    """Registers, memory and progress of some blocks of a launch.

    registers: for each type, (registers, lanes).
    named: special registers and the addresses of symbols, (lanes,) u64.
    """

    def __init__(
        self, kernel: Kernel, blocks: Blocks, argument: int, reciprocal_shift: int
    ) -> None:
        self.kernel = kernel
        self.reciprocal_shift = reciprocal_shift
        self.lanes = blocks.at_once * blocks.threads
        lane = np.arange(self.lanes)
        self._block = lane // blocks.threads
        self._warp = lane // WARP
        self.registers = _registers(kernel.program.register_counts, self.lanes)
        thread = lane % blocks.threads
        number = blocks.first + self._block
        self.named = {
            "%tid.x": thread.astype(np.uint64),
            "%ctaid.x": (number % blocks.grid[0]).astype(np.uint64),
            "%ctaid.y": (number // blocks.grid[0]).astype(np.uint64),
            kernel.program.parameter: np.full(self.lanes, argument, np.uint64),
        }
        self.memory = ProcessMemory()
        self._kept: list[np.ndarray] = []  # memory of variables
        shared_bytes = self._place_variables(kernel.program)
        self.shared = SharedMemory(shared_bytes, self._block, self._warp)
        self._at = np.zeros(self.lanes, np.int64)  # next instruction of every lane
        self._waits = np.zeros(self.lanes, bool)  # for others of its warp or block
        self._is_stuck = False  # no lane has passed a barrier since all began to wait
        # Warps that execute an instruction, less those that execute the one before: see _count.
        self._changes = np.zeros(len(kernel.classes) + 1, np.int64)

    def numbers(self, lanes: Lanes) -> np.ndarray:
        """Return the numbers of lanes as an array."""
        return np.arange(lanes.start, lanes.stop) if isinstance(lanes, slice) else lanes

    def count(self, lanes: Lanes) -> int:
        return lanes.stop - lanes.start if isinstance(lanes, slice) else len(lanes)

    def executed_by_instruction(self) -> np.ndarray:
        """Return how many lanes have executed every instruction, whole warps counted."""
        return WARP * self._changes.cumsum()[:-1]

    def run(self) -> None:
        """Run until every lane has ended."""
        end = len(self.kernel.stops)
        while (self._at < end).any():
            ready = (self._at < end) & ~self._waits
            if not ready.any():
                self._wake_up()
                continue
            first = int(self._at[ready].min())
            others = self._at[ready & (self._at > first)]
            stop = int(others.min()) if others.size else end
            self._run_until(stop, first, _lanes(ready & (self._at == first)))

    def _wake_up(self) -> None:
        """Let all lanes look again for those that they wait for, which may have ended."""
        if self._is_stuck:
            places = np.unique(self._at[self._waits])
            texts = [self.kernel.program.instructions[place].text for place in places]
            raise MemoryFault(f"lanes wait for each other: {'; '.join(texts)}")
        self._is_stuck = True
        self._waits[:] = False

    def _run_until(self, stop: int, place: int, lanes: Lanes) -> None:
        """Run lanes from an instruction to ``stop`` or to where they may part or have to wait."""
        begin = place
        kernel = self.kernel
        while place < stop:
            kind = kernel.stops[place]
            if kind:
                self._count(begin, place, lanes)
                if kind == "branch":
                    self._count(place, place + 1, lanes)
                    self._branch(kernel.program.instructions[place], place, lanes)
                    return
                met = self._meet(place, lanes, self._warp if kind == "warp" else self._block)
                if met is None:
                    return
                lanes, begin = met, place
            self._step(place, lanes)
            place += 1
        self._count(begin, place, lanes)
        self._at[lanes] = place

    def _step(self, place: int, lanes: Lanes) -> None:
        instruction = self.kernel.program.instructions[place]
        chosen = self._guarded(instruction, lanes)
        if chosen is not None:
            try:
                self.kernel.execute[place](self, chosen)
            except (MemoryFault, IndexError) as error:
                raise MemoryFault(f"{instruction.text}: {error}") from error

    def _guarded(self, instruction: Instruction, lanes: Lanes) -> Lanes | None:
        """Return the lanes whose guard lets them execute an instruction, None if there is none."""
        if instruction.guard is None:
            return lanes
        taken = self.registers["pred"][instruction.guard.row, lanes] != instruction.is_negated
        if taken.all():
            return lanes
        return self.numbers(lanes)[taken] if taken.any() else None

    def _branch(self, instruction: Instruction, place: int, lanes: Lanes) -> None:
        self._at[lanes] = place + 1
        taken = self._guarded(instruction, lanes)
        if taken is None:
            return
        if instruction.name == "ret":
            self._at[taken] = len(self.kernel.stops)
            return
        (label,) = instruction.operands
        assert isinstance(label, Name)
        self._at[taken] = self.kernel.program.labels[label.text]

    def _meet(self, place: int, lanes: Lanes, group: np.ndarray) -> Lanes | None:
        """Return the lanes of groups that are all here now, None if there is none.

        group: of every lane, its warp or block. The other lanes wait.
        """
        self._at[lanes] = place
        alive = self._at < len(self.kernel.stops)
        here = self._at == place
        if (here == alive).all():
            complete = here
        else:
            missing = np.zeros(int(group[-1]) + 1, bool)
            missing[group[alive & ~here]] = True
            complete = here & ~missing[group]
        self._waits[here] = True
        self._waits[complete] = False
        if not complete.any():
            return None
        self._is_stuck = False
        return _lanes(complete)

    def _count(self, begin: int, stop: int, lanes: Lanes) -> None:
        """Note that lanes have executed the instructions from ``begin`` to ``stop``."""
        if isinstance(lanes, slice):
            warps = -(-lanes.stop // WARP) - lanes.start // WARP
        else:
            warps = 1 + np.count_nonzero(np.diff(lanes // WARP))
        self._changes[begin] += warps
        self._changes[stop] -= warps

    def _place_variables(self, program: Program) -> int:
        """Name the addresses of variables. Return the bytes of shared memory of a block."""
        shared_bytes = 0
        for name, variable in program.variables.items():
            room = round_up(variable.nbytes, 16)
            if variable.space == "shared":
                self.named[name] = np.full(self.lanes, shared_bytes, np.uint64)
                shared_bytes += room
                continue
            copies = self.lanes if variable.space == "local" else 1
            memory = np.zeros(copies * room + 16, np.uint8)
            self._kept.append(memory)
            aligned = memory[-memory.ctypes.data % 16 :]
            aligned[: len(variable.content)] = np.frombuffer(variable.content, np.uint8)
            own = np.arange(self.lanes) % copies * room
            self.named[name] = np.uint64(aligned.ctypes.data) + own.astype(np.uint64)
        return shared_bytes


def _registers(counts: dict[int, int], lanes: int) -> dict[str, np.ndarray]:
    """Return arrays of all registers: one per size, viewed as every type of that size."""
    by_bits = {1: np.zeros((counts[1], lanes), bool)}
    for bits, dtype in operations.UNSIGNED.items():
        if bits > 8:
            by_bits[bits] = np.zeros((counts[bits], lanes), dtype)
    return {
        name: by_bits[operations.bits_of(name)].view(dtype)
        for name, dtype in operations.TYPES.items()
        if operations.bits_of(name) != 8
    }


def _lanes(chosen: np.ndarray) -> Lanes:
    """Return the lanes of a mask, as a slice if they are neighbours."""
    numbers = np.flatnonzero(chosen)
    first, last = int(numbers[0]), int(numbers[-1])
    return slice(first, last + 1) if last - first + 1 == len(numbers) else numbers


def _stop_of(instruction: Instruction) -> str:
    if instruction.name in ("bra", "ret"):
        return "branch"
    if instruction.name in _WARP_WIDE or instruction.modifiers[0] == "warp":
        return "warp"
    return "block" if instruction.name == "bar" else ""


# ---- classes of instructions ----

CLASSES = (
    "memory",
    "shared",
    "local",
    "integer",
    "float",
    "convert",
    "special",
    "shuffle",
    "barrier",
    "branch",
    "move",
)
_SPACES = {"global": "memory", "generic": "memory", "shared": "shared", "local": "local"}


def class_of(instruction: Instruction) -> str:
    """Return the class of an instruction, one of CLASSES.

    move: copies between registers, arguments and addresses. A GPU executes few of them, as
    arguments are operands and most registers are renamed.
    """
    name = instruction.name
    if name in ("ld", "st", "atom"):
        space = operations.space_of(instruction)
        return "move" if space == "param" else _SPACES[space]
    if name in ("mov", "cvta"):
        return "move"
    if name == "cvt":
        is_float = "f" in "".join(instruction.modifiers[-2:])
        return "convert" if is_float else "move"
    fixed = {"rcp": "special", "shfl": "shuffle", "redux": "shuffle", "bar": "barrier"}
    fixed |= {"bra": "branch", "ret": "branch"}
    if name in fixed:
        return fixed[name]
    is_arithmetic = name not in ("selp", "setp", "max", "min") and instruction.type == "f32"
    return "float" if is_arithmetic else "integer"
