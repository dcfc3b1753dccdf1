"""Stands for ds_quant.kernels.cuda.Runner on CPU tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ds_quant.kernels import cuda
from ds_quant.kernels.launch import Launch, Table
from tests.kernels import compiler
from tests.kernels.ptx.machine import Kernel
from tests.kernels.ptx.program import parse

Key = tuple[str, tuple[tuple[str, int], ...]]  # a kernel and its macros


class Counts(NamedTuple):
    """Executed instructions of a kernel by class, see Kernel.launch, and those of its text."""

    by_class: Counter[str]
    static: int


class Runner:
    """Compiles kernels to PTX, each once, and executes it.

    architecture: "80", "90" or "100".
    source: returns the text of a kernel. reciprocal_shift: see Kernel.launch.
    executed: per kernel, since the last call of ``forget_counts``.
    """

    def __init__(
        self,
        architecture: str,
        *,
        source: Callable[[str], str] = cuda.source,
        reciprocal_shift: int = 0,
    ) -> None:
        self.architecture = architecture
        self.reciprocal_shift = reciprocal_shift
        self.executed: dict[Key, Counts] = {}
        self._source = source
        self._kernels: dict[Key, Kernel] = {}

    def forget_counts(self) -> None:
        self.executed = {}

    def run_tables(self, tables: Iterable[Table]) -> None:
        for table in tables:
            for launch in table.launches():
                self._launch(launch)

    def _launch(self, launch: Launch) -> None:
        key = (launch.kernel, launch.macros)
        if key not in self._kernels:
            text = compiler.ptx(self._source(launch.kernel), launch.macros, self.architecture)
            self._kernels[key] = Kernel(parse(text))
        kernel = self._kernels[key]
        counts = self.executed.setdefault(key, Counts(Counter(), len(kernel.classes)))
        executed = kernel.launch(
            launch.grid, launch.threads, launch.job, reciprocal_shift=self.reciprocal_shift
        )
        counts.by_class.update(executed)
