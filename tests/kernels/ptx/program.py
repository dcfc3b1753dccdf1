"""Parses the PTX of a kernel: instructions, registers, memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

# ---- operands ----


class Register(NamedTuple):
    """bits: 1 for predicates, else 16, 32 or 64. row: its place among those of that size."""

    bits: int
    row: int


class Immediate(NamedTuple):
    """A constant, as an unsigned number of 64 bits."""

    bits: int


class Name(NamedTuple):
    """A special register such as %tid.x, a symbol, or a label."""

    text: str


class Address(NamedTuple):
    base: Register | Name | Immediate
    offset: int  # bytes


class Group(NamedTuple):
    """Operands in braces, or a result and its predicate: ``d|p``."""

    members: tuple[Register | Immediate | Name, ...]


Operand = Register | Immediate | Name | Address | Group


# ---- a kernel ----


class Instruction(NamedTuple):
    """``@guard name.modifiers operands``. The last modifier is the type."""

    name: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None
    is_negated: bool  # runs where the guard is false
    text: str

    @property
    def type(self) -> str:
        return self.modifiers[-1]


class Variable(NamedTuple):
    """Declared memory. space: "shared", "local" or "global"."""

    space: str
    nbytes: int
    content: bytes


class Program(NamedTuple):
    """A kernel.

    parameter: symbol of its one argument, a struct.
    register_counts: number of registers by their bits.
    labels: index of the instruction that follows.
    """

    parameter: str
    register_counts: dict[int, int]
    variables: dict[str, Variable]
    instructions: list[Instruction]
    labels: dict[str, int]


_ENTRY = re.compile(r"\.visible \.entry \w+\(\s*\.param [^\n]*\.b8 (\w+)\[\d+\]\s*\)[^{]*\{")
_VARIABLE = re.compile(
    r"\.(shared|local|global)\s+\.align \d+\s+\.[bu](\d+)\s+(\w+)(?:\[(\d+)\])?(?:\s*=\s*(\d+))?;"
)
_REGISTERS = re.compile(r"\.reg \.(\w+)\s+(%?\w+)(?:<(\d+)>)?$")
_LABEL = re.compile(r"(\$\w+):\s*")
_STATEMENT = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+")
_REGISTER_BITS = {"pred": 1, "b16": 16, "b32": 32, "f32": 32, "b64": 64}


def parse(text: str) -> Program:
    """Return the one kernel of a PTX module."""
    text = re.sub(r"//[^\n]*", "", text)
    entry = _ENTRY.search(text)
    if entry is None:
        raise ValueError("PTX without an entry of one parameter")
    return _Parser(text, entry).program


class _Parser:
    def __init__(self, text: str, entry: re.Match[str]) -> None:
        self.registers: dict[str, Register] = {}
        self.program = Program(
            parameter=entry[1],
            register_counts={1: 0, 16: 0, 32: 0, 64: 0},
            variables={},
            instructions=[],
            labels={},
        )
        for space, bits, name, count, value in _VARIABLE.findall(text):
            nbytes = int(bits) // 8 * int(count or 1)
            content = int(value or 0).to_bytes(nbytes, "little") if space == "global" else b""
            self.program.variables[name] = Variable(space, nbytes, content)
        for statement in self._statements(text[entry.end() :]):
            if statement.startswith(".reg"):
                self._declare(statement)
            elif not statement.startswith("."):
                self.program.instructions.append(self._instruction(statement))

    def _statements(self, body: str) -> Iterator[str]:
        """Yield the statements between semicolons. Labels are noted on the way.

        A block of inline assembly declares a register of its own: ``{.reg .pred p; ...}``. Blocks
        follow each other, so all of them may use the same one.
        """
        for piece in body.split(";"):
            statement = piece.strip().lstrip("{}").strip()
            while label := _LABEL.match(statement):
                self.program.labels[label[1]] = len(self.program.instructions)
                statement = statement[label.end() :].lstrip("{}").strip()
            if statement:
                yield statement

    def _declare(self, statement: str) -> None:
        """Note ``.reg .b32 %r<559>`` or a single register."""
        declared = _REGISTERS.match(statement)
        if declared is None:
            raise NotImplementedError(statement)
        kind, name, count = declared.groups()
        bits = _REGISTER_BITS[kind]
        names = [name] if count is None else [f"{name}{number}" for number in range(int(count))]
        for each in names:
            if each not in self.registers:
                self.registers[each] = Register(bits, self.program.register_counts[bits])
                self.program.register_counts[bits] += 1

    def _instruction(self, statement: str) -> Instruction:
        found = _STATEMENT.match(statement)
        if found is None:
            raise NotImplementedError(statement)
        negation, guard, opcode, rest = found.groups()
        name, *modifiers = opcode.split(".")
        return Instruction(
            name=name,
            modifiers=tuple(modifiers) or ("",),
            operands=tuple(self._operand(each) for each in _OPERAND.findall(rest)),
            guard=self.registers[guard] if guard else None,
            is_negated=bool(negation),
            text=" ".join(statement.split()),
        )

    def _operand(self, text: str) -> Operand:
        if text[0] == "{":
            return Group(tuple(self._simple(each.strip()) for each in text[1:-1].split(",")))
        if text[0] == "[":
            base, _, offset = text[1:-1].partition("+")
            return Address(self._simple(base.strip()), int(offset or 0))
        if "|" in text:
            return Group(tuple(self._simple(each) for each in text.split("|")))
        return self._simple(text)

    def _simple(self, text: str) -> Register | Immediate | Name:
        if text in self.registers:
            return self.registers[text]
        if text.startswith("0f"):
            return Immediate(int(text[2:], 16))
        if text.lstrip("-")[0].isdigit():
            return Immediate(int(text.rstrip("U"), 0) % (1 << 64))
        return Name(text)
