"""ZeRO-1/2 updated weights: every rank encodes the partition it has stepped, all decode.

The replica then holds decoded weights on all ranks, the owner too, bit for bit. The fp32 master
weights stay untouched, and exact replicas come back on demand (checkpoints, exports).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ds_quant.codec import CastCodec
from ds_quant.collectives import Coding
from ds_quant.layout import ceil_div
from ds_quant.link import Link
from ds_quant.owners import Part, gather_from_owners
from ds_quant.rng import Role
from ds_quant.zero import seams
from ds_quant.zero.binding import Binding


class Replica:
    """The 16-bit (or fp32) replica of one ZeRO-1/2 engine."""

    def __init__(self, binding: Binding, optimizer: Any) -> None:
        self._binding, self._optimizer = binding, optimizer
        self._shows_exact = False

    def gather_updated(self) -> None:
        """Inside ``optimizer.step``: the own partition holds new exact weights, gather them."""
        self._shows_exact = False  # also where a save that raised has left ``exact`` open
        step = self._binding.step + 1  # DeepSpeed counts the step only after it
        self._binding.learn_levels(step, self._own_values())
        self._gather(step)

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Exact weights inside, the decoded ones again outside. All ranks must enter and leave."""
        nested = self._shows_exact
        if not nested:
            gather = partial(self._gather, self._binding.step, exact=True)
            seams.refresh_replica(self._optimizer, gather)
            self._shows_exact = True
        try:
            yield
        finally:
            if self._shows_exact and not nested:
                self._shows_exact = False
                if self._binding.step > 0:
                    self._gather(self._binding.step)  # equal step, equal bits

    def _gather(self, step: int, *, exact: bool = False) -> None:
        """Gather all partitions, slice by slice so that the message stays within DeepSpeed's
        ``allgather_bucket_size``; slice i travels while slice i - 1 is decoded.
        """
        decode: Callable[[], None] = _nothing
        for flat, params, process_group in seams.replica_groups(self._optimizer):
            link = self._binding.link(process_group)
            if link.size == 1:
                continue
            width = flat.numel() // link.size
            stride = max(1, self._optimizer.allgather_bucket_size // link.size)
            for first in range(0, width, stride):
                window = range(first, min(first + stride, width))
                parts = self._parts(flat, params, link, window, step, exact)
                previous, decode = decode, gather_from_owners(parts, link)
                previous()
        decode()

    def _own_values(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, Link]]:
        """(parameter, this rank's elements of it, link) of every parameter."""
        for flat, params, process_group in seams.replica_groups(self._optimizer):
            link = self._binding.link(process_group)
            for p in params:
                start, stop = _own_range(flat, p, link)
                yield p, flat[start:stop], link

    def _parts(
        self,
        flat: torch.Tensor,
        params: list[torch.Tensor],
        link: Link,
        window: range,
        step: int,
        exact: bool,
    ) -> list[Part]:
        """Cut the flat replica at parameter and partition borders, keeping the elements that lie
        in ``window`` of their partition; alignment gaps stay out.
        """
        width = flat.numel() // link.size
        parts = []
        for p in params:
            begin = _offset(flat, p)
            for owner in range(begin // width, ceil_div(begin + p.numel(), width)):
                start = max(begin, owner * width + window.start)
                stop = min(begin + p.numel(), owner * width + window.stop)
                if start < stop:
                    coding = self._coding(p, flat.dtype, owner, step, exact)
                    values = flat[start:stop]
                    parts.append(Part(owner=owner, values=values, coding=coding.at(start - begin)))
        return parts

    def _coding(
        self, parameter: torch.Tensor, dtype: torch.dtype, owner: int, step: int, exact: bool
    ) -> Coding:
        if exact:
            return Coding(codec=CastCodec(dtype))
        tracked = self._binding.tracked(parameter)
        return self._binding.coding(Role.WEIGHTS, tracked, dtype, step=step, rank=owner)


def _nothing() -> None:
    """Stands for the decoding that precedes the first slice."""


def _offset(flat: torch.Tensor, parameter: torch.Tensor) -> int:
    """First element of a parameter, a view of the flat buffer."""
    return (parameter.data_ptr() - flat.data_ptr()) // flat.element_size()


def _own_range(flat: torch.Tensor, parameter: torch.Tensor, link: Link) -> tuple[int, int]:
    width = flat.numel() // link.size
    begin = _offset(flat, parameter)
    start = max(begin, link.rank * width)
    return start, max(start, min(begin + parameter.numel(), (link.rank + 1) * width))
