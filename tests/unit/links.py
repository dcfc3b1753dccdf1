"""A link whose other ranks send what this one sends, and what a step over it costs the host."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import ds_quant
from ds_quant.comm.checksum import Findings
from ds_quant.comm.traffic import Meter

PACKAGE = str(Path(ds_quant.__file__).parent)


class Echo:
    """A link, or fabric, of ``size`` ranks. ``payloads``: what was sent; ``rooms``: dtypes of the
    buffers that it was asked for.
    """

    node_size, backend = None, "auto"

    def __init__(self, size: int, rank: int = 1) -> None:
        meter = Meter()
        self.size, self.rank, self.ranks, self.whole = size, rank, range(size), self
        self.payloads: list[torch.Tensor] = []
        self.rooms: list[torch.dtype] = []
        self.encoding = lambda role: meter.encoding(role, "inter")
        self.decoding = lambda: meter.section("decode")
        self.findings = Findings()

    def empty(self, *shape: int, dtype: torch.dtype = torch.uint8, device: Any) -> torch.Tensor:
        self.rooms.append(dtype)
        return torch.empty(shape, dtype=dtype)

    def least(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers

    def all_gather(self, payload: torch.Tensor, *, role: str) -> Any:
        return self._arrives(payload, payload.repeat(self.size))

    def all_to_all(
        self, payload: torch.Tensor, *, sent: Sequence[int], received: Sequence[int], role: str
    ) -> Any:
        """Zeros arrive where the others' rows are not as long as this one's."""
        rows = payload.split(sent)
        row = rows[self.rank] if sent[self.rank] else rows[0]  # what is kept exact is not sent
        arriving = row.repeat(sum(map(bool, received)))
        if len(arriving) != sum(received):
            arriving = payload.new_zeros(sum(received))
        return self._arrives(payload, arriving)

    def _arrives(self, payload: torch.Tensor, arriving: torch.Tensor) -> Any:
        self.payloads.append(payload.clone())
        return SimpleNamespace(wait=lambda: arriving)


def calls_of(step: Callable[[], Any]) -> int:
    """Python calls in the package of a second step."""
    step()
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls
