"""ZeRO-1/2 updated weights: every rank encodes the partition it has stepped, all decode.

The replica then holds decoded weights on all ranks, the owner too, bit for bit. The fp32 master
weights stay untouched, and exact replicas come back on demand (checkpoints, exports).

[Note: differences] With difference coding the replica itself is the reference: the owner encodes
what its master weights differ from it, everybody adds the decoded difference, in place and without
a copy. What one step loses is in the next difference. A replica that was made exact stays so, on
all ranks: a run that saves continues like a run that loads what was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from ds_quant.bundle import Cuts, is_small, joined, spread_
from ds_quant.coding import Coding, exactly
from ds_quant.layout import ceil_div
from ds_quant.link import Fabric, Link
from ds_quant.owners import Part, gather_from_owners
from ds_quant.zero import replica_seams
from ds_quant.zero.binding import Binding
from ds_quant.zero.replica_seams import ReplicaGroup
from ds_quant.zero.streams import Stream, Tracked


class _Run(NamedTuple):
    """What is one tensor of the message: [start, stop) of the flat replica, elements of one
    parameter from ``first`` on or, in full precision, several small ones of one owner. See
    [Note: bundles]. ``stream`` is None in full precision.
    """

    owner: int
    tracked: Tracked
    stream: Stream | None
    first: int
    ranges: list[tuple[int, int]]


class _Plan(NamedTuple):
    """The tensors of a message and where they lie in the flat replica; this rank's own ones in the
    master weights of its partition.
    """

    runs: list[_Run]
    cuts: Cuts
    own_cuts: Cuts


class Replica:
    """The 16-bit (or fp32) replica of one ZeRO-1/2 engine."""

    def __init__(self, binding: Binding, optimizer: Any) -> None:
        self._binding, self._optimizer = binding, optimizer
        self._shows_exact = False
        self._holds_exact = True  # what was gathered last
        self._plans: dict[tuple[int, range, bool], _Plan] = {}  # do not change between steps

    def gather_updated(self) -> None:
        """Inside ``optimizer.step``: the own partition holds new exact weights, gather them."""
        self._binding.asked.add("weights")
        self._shows_exact = False  # also where a save that raised has left ``exact`` open
        step = self._binding.step + 1  # DeepSpeed counts the step only after it
        self._binding.learn_levels(step, self._own_values())
        self._gather(step)

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Exact weights inside, the decoded ones again outside. All ranks must enter and leave.

        With difference coding the exact ones stay: see [Note: differences].
        """
        nested = self._shows_exact
        if not nested:
            self.resync()
            self._shows_exact = True
        try:
            yield
        finally:
            if self._shows_exact and not nested:
                self._shows_exact = False
                if self._binding.step > 0 and not self._binding.scheme.difference:
                    self._gather(self._binding.step)  # equal step, equal bits

    def is_exact(self) -> bool:
        """Whether the replica shows exact weights."""
        return self._holds_exact or self._binding.is_exact(self._binding.step)

    def resync(self) -> None:
        """Exact weights on all ranks, from the master weights. A collective."""
        gather = partial(self._gather, self._binding.step, exact=True)
        replica_seams.refresh_replica(self._optimizer, gather)

    def copies(self) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """See Holder. The ranks of a process group hold equal replicas."""
        for group in replica_seams.replica_groups(self._optimizer):
            yield self._binding.link(group.process_group).ranks[0], list(group.params)

    def _gather(self, step: int, *, exact: bool = False) -> None:
        """Gather all partitions, slice by slice so that the message stays within DeepSpeed's
        ``allgather_bucket_size``; slice i travels while slice i - 1 is decoded.
        """
        self._holds_exact = exact
        decode: Callable[[], None] = _nothing
        for group in replica_seams.replica_groups(self._optimizer):
            fabric = self._binding.fabric(group.process_group)
            link = fabric.whole
            if link.size == 1:
                continue
            width = group.flat.numel() // link.size
            stride = max(1, self._optimizer.allgather_bucket_size // link.size)
            for first in range(0, width, stride):
                window = range(first, min(first + stride, width))
                previous, decode = decode, self._post(group, fabric, window, step, exact)
                previous()
        decode()

    def _own_values(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, Link]]:
        """(parameter, this rank's elements of it, link) of every parameter."""
        for group in replica_seams.replica_groups(self._optimizer):
            link = self._binding.link(group.process_group)
            for p in group.params:
                start, stop = _own_range(group.flat, p, link)
                yield p, group.flat[start:stop], link

    def _post(
        self, group: ReplicaGroup, fabric: Fabric, window: range, step: int, exact: bool
    ) -> Callable[[], None]:
        """Gather what lies in ``window`` of the partitions; the returned function waits for it."""
        link = fabric.whole
        runs, cuts, own_cuts = self._plan(
            group, link, window, exact or self._binding.is_exact(step)
        )
        codings = [self._coding(run, group.flat.dtype, step) for run in runs]
        views = cuts.views(group.flat.view(1, -1))
        # Else the new weights are in the replica already: exact ones, or absolute codes.
        from_master = self._binding.scheme.difference and not exact
        targets = iter(own_cuts.views(group.master.view(1, -1)) if from_master else ())
        parts = [
            Part(
                owner=run.owner,
                values=joined(pieces),
                coding=coding,
                target=joined(next(targets)) if from_master and run.owner == link.rank else None,
            )
            for run, coding, pieces in zip(runs, codings, views, strict=True)
        ]
        arrived = gather_from_owners(parts, fabric)

        def decode() -> None:
            arrived()
            pairs = zip(views, parts, strict=True)
            spread_((pieces, part.values) for pieces, part in pairs if len(pieces) > 1)

        return decode

    def _plan(self, group: ReplicaGroup, link: Link, window: range, exact: bool) -> _Plan:
        """Cut the flat replica at parameter and partition borders, keeping the elements that lie
        in ``window`` of their partition; alignment gaps stay out.
        """
        key = group.index, window, exact
        if key not in self._plans:
            runs = self._runs(group, link, window, exact)
            first = link.rank * (group.flat.numel() // link.size)
            own = [
                [(start - first, stop - first) for start, stop in run.ranges]
                for run in runs
                if run.owner == link.rank
            ]
            self._plans[key] = _Plan(runs, Cuts([run.ranges for run in runs]), Cuts(own))
        return self._plans[key]

    def _runs(self, group: ReplicaGroup, link: Link, window: range, exact: bool) -> list[_Run]:
        flat, width = group.flat, group.flat.numel() // link.size
        runs: list[_Run] = []
        bundles: dict[int, _Run] = {}  # by owner
        for p in group.params:
            begin = _offset(flat, p)
            end = begin + p.numel()
            tracked = self._binding.tracked(p)
            for owner in range(begin // width, ceil_div(end, width)):
                start = max(begin, owner * width + window.start)
                stop = min(end, owner * width + window.stop)
                if start >= stop:
                    continue
                sender, stream = link.rank if owner == link.rank else None, None
                if not exact:
                    stream = self._binding.weight_stream(tracked, flat.dtype, rank=sender)
                small = stream is None and is_small(stop - start, exactly(flat.dtype))
                if small and owner in bundles:
                    _extend(bundles[owner].ranges, start, stop)
                    continue
                runs.append(_Run(owner, tracked, stream, start - begin, [(start, stop)]))
                if small:
                    bundles[owner] = runs[-1]
        return runs

    def _coding(self, run: _Run, dtype: torch.dtype, step: int) -> Coding:
        if run.stream is None:
            return exactly(dtype)
        return self._binding.coding_of(run.stream, run.tracked, step=step).at(run.first)


def _extend(ranges: list[tuple[int, int]], start: int, stop: int) -> None:
    """Append a range, or let it continue the last one."""
    if ranges[-1][1] == start:
        ranges[-1] = ranges[-1][0], stop
    else:
        ranges.append((start, stop))


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
