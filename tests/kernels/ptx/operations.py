"""The instructions of PTX, as functions of the registers of some lanes.

``bind`` makes such a function of every instruction that the kernels are compiled to; any other one
is a NotImplementedError, as is arithmetic that flushes denormals. Control flow is in ``machine``.

Registers of a size are one array (registers, lanes), which an instruction reads as the type that it
names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tests.kernels.ptx import arithmetic
from tests.kernels.ptx.memory import UNSIGNED, check_alignment
from tests.kernels.ptx.program import Address, Group, Immediate, Instruction, Name, Register

if TYPE_CHECKING:
    from tests.kernels.ptx.machine import Lanes, Machine

Execute = Callable[["Machine", "Lanes"], None]
Read = Callable[["Machine", "Lanes"], np.ndarray]
Write = Callable[["Machine", "Lanes", np.ndarray], None]

TYPES: dict[str, type] = {
    "pred": np.bool_,
    "b8": np.uint8,
    "u8": np.uint8,
    "s8": np.int8,
    "b16": np.uint16,
    "u16": np.uint16,
    "s16": np.int16,
    "b32": np.uint32,
    "u32": np.uint32,
    "s32": np.int32,
    "b64": np.uint64,
    "u64": np.uint64,
    "s64": np.int64,
    "f32": np.float32,
    "f16x2": np.uint32,
    "bf16x2": np.uint32,
}
UNDEFINED = np.uint32(0x7FABCDEF)  # what a shuffle gets of a lane that has ended


def bits_of(type_name: str) -> int:
    """Return the bits of a type, 1 for predicates."""
    dtype = TYPES[type_name]
    return 1 if dtype is np.bool_ else 8 * dtype().itemsize


# ---- operands ----


def reader(operand: Register | Immediate | Name, type_name: str) -> Read:
    """Return a function that reads an operand as a type: (lanes,)."""
    dtype = TYPES[type_name]
    if isinstance(operand, Immediate):
        constant = _constant(operand.bits, type_name)
        return lambda machine, lanes: constant
    if isinstance(operand, Name):
        name = operand.text
        return lambda machine, lanes: machine.named[name][lanes].astype(dtype, copy=False)
    row = operand.row
    if operand.bits == bits_of(type_name):
        return lambda machine, lanes: machine.registers[type_name][row, lanes]
    stored = _unsigned(operand.bits)
    return lambda machine, lanes: machine.registers[stored][row, lanes].astype(dtype)


def _constant(bits: int, type_name: str) -> np.generic:
    if type_name == "pred":
        return np.bool_(bits)
    width = bits_of(type_name)
    return UNSIGNED[width](bits & ((1 << width) - 1)).view(TYPES[type_name])


def writer(operand: Register | Immediate | Name | Group, type_name: str) -> Write:
    """Return a function that writes values of a type to a register, which may be wider."""
    if operand == Name("_"):
        return lambda machine, lanes, values: None
    if not isinstance(operand, Register):
        raise NotImplementedError(f"a result in {operand}")
    row = operand.row
    same = operand.bits == bits_of(type_name)
    stored = type_name if same else _unsigned(operand.bits)

    def write(machine: Machine, lanes: Lanes, values: np.ndarray) -> None:
        machine.registers[stored][row, lanes] = values

    return write


def _unsigned(bits: int) -> str:
    return "pred" if bits == 1 else f"u{bits}"


def full(values: np.ndarray, lanes: Lanes, machine: Machine) -> np.ndarray:
    """Return the values of an operand, also of a constant, as an array of all lanes."""
    return np.broadcast_to(values, machine.count(lanes))


# ---- instructions ----

_INTEGER = {
    "add": np.add,
    "sub": np.subtract,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "neg": np.negative,
    "min": np.minimum,
    "max": np.maximum,
    "div": np.floor_divide,
    "rem": np.remainder,
    "mul.lo": np.multiply,
    "mul.hi": arithmetic.upper_half,
    "mad.lo": lambda a, b, c: a * b + c,
}
_FLOAT = {
    "add.rn": lambda a, b: arithmetic.rounded(a + b),
    "sub.rn": lambda a, b: arithmetic.rounded(a - b),
    "mul.rn": lambda a, b: arithmetic.rounded(a * b),
    "fma.rn": arithmetic.fused,
    "abs": np.abs,
    "neg": np.negative,
    "max.NaN": lambda a, b: arithmetic.extreme_nan(a, b, largest=True),
    "min.NaN": lambda a, b: arithmetic.extreme_nan(a, b, largest=False),
}
_COMPARISON = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_ON_WORDS = {
    "popc": np.bitwise_count,
    "brev": arithmetic.reversed_bits,
    "clz": lambda x: np.uint32(32) - arithmetic.bit_lengths(x),
    # .shiftamt: how far the highest one is from the top
    "bfind": lambda x: np.where(x == 0, ~np.uint32(0), np.uint32(32) - arithmetic.bit_lengths(x)),
}
_ATOMIC = {"add": np.add, "max": np.maximum, "or": np.bitwise_or}


def bind(instruction: Instruction) -> Execute:
    """Return the function that executes an instruction for some lanes."""
    binder = _BINDERS.get(instruction.name)
    found = binder(instruction) if binder else None
    if found is None:
        raise NotImplementedError(f"PTX: {instruction.text}")
    return found


def _elementwise(instruction: Instruction) -> Execute | None:
    """An arithmetic function of operands that all have the type of the result."""
    *modifiers, kind = instruction.modifiers
    key = ".".join([instruction.name, *modifiers])
    if kind in ("bf16x2", "f16x2") and key in ("max.NaN", "min.NaN"):
        largest = instruction.name == "max"

        def function(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            return arithmetic.extreme_of_pairs(a, b, largest=largest, kind=kind)
    elif kind == "f32":
        function = _FLOAT.get(key)
    elif key in ("mul.hi", "div", "rem") and kind[0] != "u":
        return None
    elif kind == "pred":
        function = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor,
                    "not": np.logical_not}.get(key)  # fmt: skip
    else:
        function = _INTEGER.get(key)
    if function is None:
        return None
    destination, *sources = instruction.operands
    return _applied(function, writer(destination, kind), [reader(each, kind) for each in sources])


def _applied(function: Callable[..., np.ndarray], write: Write, reads: list[Read]) -> Execute:
    if len(reads) == 1:
        (first,) = reads
        return lambda machine, lanes: write(machine, lanes, function(first(machine, lanes)))
    if len(reads) == 2:
        first, second = reads

        def execute(machine: Machine, lanes: Lanes) -> None:
            write(machine, lanes, function(first(machine, lanes), second(machine, lanes)))

        return execute

    def execute_all(machine: Machine, lanes: Lanes) -> None:
        write(machine, lanes, function(*(read(machine, lanes) for read in reads)))

    return execute_all


def _multiply(instruction: Instruction) -> Execute | None:
    if "wide" not in instruction.modifiers:
        return _elementwise(instruction)
    kind = instruction.type
    wide = f"{kind[0]}{2 * bits_of(kind)}"
    dtype = TYPES[wide]
    destination, *sources = instruction.operands
    return _applied(
        lambda a, b: a.astype(dtype) * b.astype(dtype),
        writer(destination, wide),
        [reader(each, kind) for each in sources],
    )


def _reciprocal(instruction: Instruction) -> Execute | None:
    if instruction.modifiers != ("approx", "ftz", "f32"):
        return None
    destination, source = instruction.operands
    read, write = reader(source, "f32"), writer(destination, "f32")

    def execute(machine: Machine, lanes: Lanes) -> None:
        write(machine, lanes, arithmetic.reciprocal(read(machine, lanes), machine.reciprocal_shift))

    return execute


def _compare(instruction: Instruction) -> Execute | None:
    if len(instruction.modifiers) != 2:
        return None
    comparison, kind = instruction.modifiers
    destination, *sources = instruction.operands
    reads = [reader(each, kind) for each in sources]
    return _applied(_COMPARISON[comparison], writer(destination, "pred"), reads)


def _select(instruction: Instruction) -> Execute:
    kind = instruction.type
    destination, first, second, chosen = instruction.operands
    reads = [reader(chosen, "pred"), reader(first, kind), reader(second, kind)]
    return _applied(np.where, writer(destination, kind), reads)


def _shift(instruction: Instruction) -> Execute:
    kind = instruction.type
    destination, source, amount = instruction.operands
    left = instruction.name == "shl"
    return _applied(
        lambda values, bits: arithmetic.shifted(values, bits, left=left),
        writer(destination, kind),
        [reader(source, kind), reader(amount, "u32")],
    )


def _on_words(instruction: Instruction) -> Execute | None:
    kind = instruction.type
    modifiers = ("shiftamt",) if instruction.name == "bfind" else ()
    if instruction.modifiers[:-1] != modifiers or bits_of(kind) != 32:
        return None
    destination, source = instruction.operands
    return _applied(
        _ON_WORDS[instruction.name], writer(destination, "u32"), [reader(source, "u32")]
    )


def _lookup(instruction: Instruction) -> Execute:
    destination, *sources, table = instruction.operands
    return _applied(
        lambda a, b, c: arithmetic.lookup(a, b, c, table.bits),
        writer(destination, "b32"),
        [reader(each, "b32") for each in sources],
    )


def _permute(instruction: Instruction) -> Execute | None:
    if instruction.modifiers != ("b32",):
        return None
    destination, *sources = instruction.operands
    reads = [reader(each, "b32") for each in sources]
    write = writer(destination, "b32")

    def execute(machine: Machine, lanes: Lanes) -> None:
        values = (full(read(machine, lanes), lanes, machine) for read in reads)
        write(machine, lanes, arithmetic.permuted_bytes(*values))

    return execute


def _insert(instruction: Instruction) -> Execute:
    kind = instruction.type
    destination, field, into, position, length = instruction.operands
    reads = [reader(field, kind), reader(into, kind)]
    reads += [reader(each, "u32") for each in (position, length)]
    return _applied(arithmetic.inserted_bits, writer(destination, kind), reads)


def _move(instruction: Instruction) -> Execute:
    """mov and cvta: addresses of all spaces but the shared one are those of the process."""
    kind = instruction.type
    destination, source = instruction.operands
    if isinstance(destination, Group):
        return _unpack(destination, source, kind)
    if isinstance(source, Group):
        return _pack(destination, source, kind)
    return _applied(lambda values: values, writer(destination, kind), [reader(source, kind)])


def _unpack(parts: Group, packed: Register, kind: str) -> Execute:
    """mov of a register into its parts, the lowest bits first."""
    part_kind = f"b{bits_of(kind) // len(parts.members)}"
    read = reader(packed, kind)
    writes = [writer(each, part_kind) for each in parts.members]

    def execute(machine: Machine, lanes: Lanes) -> None:
        values = np.ascontiguousarray(full(read(machine, lanes), lanes, machine))
        columns = values.view(TYPES[part_kind]).reshape(len(values), len(writes))
        for place, write in enumerate(writes):
            write(machine, lanes, columns[:, place])

    return execute


def _pack(packed: Register, parts: Group, kind: str) -> Execute:
    """mov of parts into a register, the lowest bits first."""
    part_kind = f"b{bits_of(kind) // len(parts.members)}"
    write = writer(packed, kind)
    reads = [reader(each, part_kind) for each in parts.members]

    def execute(machine: Machine, lanes: Lanes) -> None:
        columns = [full(read(machine, lanes), lanes, machine) for read in reads]
        write(machine, lanes, np.stack(columns, axis=-1).view(TYPES[kind])[:, 0])

    return execute


def _convert(instruction: Instruction) -> Execute | None:
    *rounding, to, source_kind = instruction.modifiers
    destination, *sources = instruction.operands
    if to in ("bf16x2", "f16x2"):
        return _convert_pair(
            instruction, arithmetic.to_bf16 if to == "bf16x2" else arithmetic.to_fp16
        )
    if source_kind == "f16" and to == "f32" and not rounding:
        return _applied(
            lambda bits: arithmetic.rounded(bits.view(np.float16).astype(np.float32)),
            writer(destination, "f32"),
            [reader(sources[0], "u16")],
        )
    if "f" in to + source_kind and (rounding, to, source_kind[0]) != (["rn"], "f32", "u"):
        return None
    dtype = TYPES[to]
    return _applied(
        lambda values: values.astype(dtype),
        writer(destination, to),
        [reader(sources[0], source_kind)],
    )


def _convert_pair(
    instruction: Instruction, half: Callable[[np.ndarray], np.ndarray]
) -> Execute | None:
    """cvt.rn.bf16x2.f32 and cvt.rn.f16x2.f32: the first source is the upper half."""
    if instruction.modifiers[0] != "rn" or len(instruction.modifiers) != 3:
        return None
    destination, upper, lower = instruction.operands
    return _applied(
        lambda a, b: half(a).astype(np.uint32) << np.uint32(16) | half(b),
        writer(destination, "b32"),
        [reader(upper, "f32"), reader(lower, "f32")],
    )


# ---- memory ----


def _address_of(operand: Address) -> Read:
    """Return a function that computes an address: (lanes,) u64."""
    offset = np.uint64(operand.offset % (1 << 64))
    bits = operand.base.bits if isinstance(operand.base, Register) else 64
    read = reader(operand.base, f"u{bits}")

    def address(machine: Machine, lanes: Lanes) -> np.ndarray:
        return np.asarray(read(machine, lanes)).astype(np.uint64) + offset

    return address


def space_of(instruction: Instruction) -> str:
    """Return "global", "shared", "local" or "param"; "generic" addresses are of any but shared."""
    spaces = {"global", "shared", "local", "param"}.intersection(instruction.modifiers)
    return spaces.pop() if spaces else "generic"


def _access(instruction: Instruction) -> Execute:
    """ld and st, of one or more neighbouring words."""
    kind = instruction.type
    is_load = instruction.name == "ld"
    registers, memory = instruction.operands if is_load else instruction.operands[::-1]
    members = registers.members if isinstance(registers, Group) else (registers,)
    bits = bits_of(kind)
    address_of = _address_of(memory)
    steps = [np.uint64(place * bits // 8) for place in range(len(members))]
    is_shared = space_of(instruction) == "shared"
    if is_load:
        writes = [writer(each, kind) for each in members]

        def load(machine: Machine, lanes: Lanes) -> None:
            space = machine.shared if is_shared else machine.memory
            numbers = machine.numbers(lanes)
            address = address_of(machine, lanes)
            check_alignment(address, len(members) * bits // 8)
            found = [space.load(address + step, bits, numbers) for step in steps]
            for write, words in zip(writes, found, strict=True):
                write(machine, lanes, words.view(TYPES[kind]))

        return load
    reads = [reader(each, kind) for each in members]

    def store(machine: Machine, lanes: Lanes) -> None:
        space = machine.shared if is_shared else machine.memory
        numbers = machine.numbers(lanes)
        address = address_of(machine, lanes)
        check_alignment(address, len(members) * bits // 8)
        for step, read in zip(steps, reads, strict=True):
            words = np.asarray(read(machine, lanes)).view(UNSIGNED[bits])
            space.store(address + step, words, bits, numbers)

    return store


def _combine(instruction: Instruction) -> Execute | None:
    """atom. The old values, which no kernel uses, are undefined."""
    *modifiers, operation, kind = instruction.modifiers
    destination, memory, source = instruction.operands
    if operation not in _ATOMIC:
        return None
    address_of, read, ufunc = _address_of(memory), reader(source, kind), _ATOMIC[operation]
    write = writer(destination, "u32")
    is_shared = "shared" in modifiers

    def combine(machine: Machine, lanes: Lanes) -> None:
        space = machine.shared if is_shared else machine.memory
        values = full(read(machine, lanes), lanes, machine)
        address = address_of(machine, lanes)
        check_alignment(address, bits_of(kind) // 8)
        space.combine(ufunc, address, values, bits_of(kind), machine.numbers(lanes))
        write(machine, lanes, UNDEFINED)

    return combine


# ---- between lanes ----


def _shuffle(instruction: Instruction) -> Execute | None:
    if instruction.modifiers not in (("sync", "bfly", "b32"), ("sync", "idx", "b32")):
        return None
    is_butterfly = instruction.modifiers[1] == "bfly"
    destination, value, place, clamp, _ = instruction.operands
    members = destination.members if isinstance(destination, Group) else (destination,)
    write = writer(members[0], "b32")
    write_inside = writer(members[1], "pred") if len(members) == 2 else None
    reads = [reader(each, "u32") for each in (value, place, clamp)]

    def execute(machine: Machine, lanes: Lanes) -> None:
        values, places, clamps = (full(read(machine, lanes), lanes, machine) for read in reads)
        numbers = machine.numbers(lanes)
        lane = (numbers % 32).astype(np.uint32)
        segment = (clamps >> np.uint32(8)) & np.uint32(31)
        last = (lane & segment) | (clamps & np.uint32(31) & ~segment)
        if is_butterfly:
            source = lane ^ places
        else:
            source = (lane & segment) | (places & ~segment & np.uint32(31))
        is_inside = source <= last
        source = np.where(is_inside, source, lane)
        left = np.full(machine.lanes, UNDEFINED)
        left[numbers] = values
        write(machine, lanes, left[numbers - lane + source])
        if write_inside:
            write_inside(machine, lanes, is_inside)

    return execute


def _largest_of_warp(instruction: Instruction) -> Execute | None:
    if instruction.modifiers != ("sync", "max", "u32"):
        return None
    destination, value, _ = instruction.operands
    read, write = reader(value, "u32"), writer(destination, "u32")

    def execute(machine: Machine, lanes: Lanes) -> None:
        values = full(read(machine, lanes), lanes, machine)
        warp = machine.numbers(lanes) // 32
        starts = np.flatnonzero(np.diff(warp, prepend=-1))
        largest = np.maximum.reduceat(values, starts)
        write(machine, lanes, largest.repeat(np.diff(starts, append=len(warp))))

    return execute


def _barrier(instruction: Instruction) -> Execute | None:
    """The lanes of a block or warp have met: ``machine`` waits for them."""
    if instruction.modifiers not in (("sync",), ("warp", "sync")):
        return None
    of_block = "warp" not in instruction.modifiers

    def execute(machine: Machine, lanes: Lanes) -> None:
        machine.shared.pass_barrier(machine.numbers(lanes), of_block=of_block)

    return execute


_BINDERS: dict[str, Callable[[Instruction], Execute | None]] = {
    **{key.partition(".")[0]: _elementwise for key in (*_INTEGER, *_FLOAT)},
    **dict.fromkeys(_ON_WORDS, _on_words),
    "mul": _multiply,
    "rcp": _reciprocal,
    "setp": _compare,
    "selp": _select,
    "shl": _shift,
    "shr": _shift,
    "lop3": _lookup,
    "prmt": _permute,
    "bfi": _insert,
    "mov": _move,
    "cvta": _move,
    "cvt": _convert,
    "ld": _access,
    "st": _access,
    "atom": _combine,
    "shfl": _shuffle,
    "redux": _largest_of_warp,
    "bar": _barrier,
}
