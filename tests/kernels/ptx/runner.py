"""Stands for ds_quant.kernels.cuda.Runner on CPU tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from ds_quant.kernels import cuda
from ds_quant.kernels.launch import Launch, Table
from tests.kernels import compiler
from tests.kernels.ptx.machine import Kernel
from tests.kernels.ptx.program import parse


class Runner:
    """Compiles kernels to PTX, each once, and executes it.

    architecture: "80", "90" or "100".
    source: returns the text of a kernel. reciprocal_shift: see Kernel.launch.
    executed: instructions by class, see Kernel.launch.
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
        self.launched: list[tuple[str, tuple[tuple[str, int], ...]]] = []  # kernels and macros
        self.executed: Counter[str] = Counter()
        self._source = source
        self._kernels: dict[tuple[str, tuple[tuple[str, int], ...]], Kernel] = {}

    def run_tables(self, tables: Iterable[Table]) -> None:
        for table in tables:
            for launch in table.launches():
                self._launch(launch)

    def _launch(self, launch: Launch) -> None:
        key = (launch.kernel, launch.macros)
        self.launched.append(key)
        if key not in self._kernels:
            text = compiler.ptx(self._source(launch.kernel), launch.macros, self.architecture)
            self._kernels[key] = Kernel(parse(text))
        self.executed += self._kernels[key].launch(
            launch.grid, launch.threads, launch.job, reciprocal_shift=self.reciprocal_shift
        )
