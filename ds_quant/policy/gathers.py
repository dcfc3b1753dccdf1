"""Predict how often ZeRO-3 gathers the weights in a micro-step. Standard library only.

[Note: what stays gathered] DeepSpeed gathers a module's parameters for forward and again for
backward, unless they stay gathered in between. After the forward of a module it keeps a parameter
when the elements of all modules up to its next use are fewer than ``stage3_max_reuse_distance``, or
when the prefetcher has passed that use already: it gathers up to ``stage3_prefetch_bucket_size``
elements more at every module, as long as fewer than ``stage3_max_live_parameters`` are gathered.
So with the default of a billion elements each a model below half a billion is gathered once.
Parameters below ``stage3_param_persistence_threshold`` always stay and are gathered once per
optimizer step. ``mean_gathers`` repeats these rules, taking modules to run in the order in which
they are registered.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class FetchSettings:
    """The keys of ``zero_optimization`` that decide, with DeepSpeed's defaults, in elements."""

    max_reuse_distance: int = 10**9
    max_live_parameters: int = 10**9
    prefetch_bucket_size: int = 5 * 10**7


class Unit(NamedTuple):
    """A parameter; tied ones have equal keys. persistent: never released."""

    key: Hashable
    numel: int
    persistent: bool = False


class Module(NamedTuple):
    """A module with the parameters of its own. One without any prefetches, too."""

    units: tuple[Unit, ...] = ()
    children: tuple[Module, ...] = ()

    def all_units(self) -> Iterator[Unit]:
        """Those of the children too; tied ones as often as they occur."""
        yield from self.units
        for child in self.children:
            yield from child.all_units()


def mean_gathers(root: Module, settings: FetchSettings, *, micro_steps: int = 1) -> float:
    """Gathers of an element per micro-step, on average. See [Note: what stays gathered]."""
    every = {unit.key: unit for unit in root.all_units()}
    numel = sum(unit.numel for unit in every.values())
    persistent = sum(unit.numel for unit in every.values() if unit.persistent)
    gathered = _Coordinator(root, settings).gathered() + persistent / micro_steps
    return gathered / numel if numel else 0.0


def most_live(root: Module, settings: FetchSettings) -> int:
    """Most elements that are gathered at once, persistent ones included."""
    persistent = {unit.key: unit.numel for unit in root.all_units() if unit.persistent}
    coordinator = _Coordinator(root, settings)
    coordinator.gathered()
    return coordinator.most + sum(persistent.values())


class _Visit(NamedTuple):
    """DeepSpeed enters or leaves a module."""

    enters: bool
    units: tuple[Unit, ...]


def _walk(module: Module, *, forward: bool) -> Iterator[_Visit]:
    yield _Visit(True, module.units)
    for child in module.children if forward else reversed(module.children):
        yield from _walk(child, forward=forward)
    yield _Visit(False, module.units)


class _Coordinator:
    """DeepSpeed's PartitionedParameterCoordinator with a complete trace, for one micro-step."""

    def __init__(self, root: Module, settings: FetchSettings) -> None:
        self._settings = settings
        self._visits = [*_walk(root, forward=True), *_walk(root, forward=False)]
        steps = [visit.units for visit in self._visits if visit.enters]
        # Persistent parameters count as distance.
        self._starts = [0, *accumulate(sum(u.numel for u in units) for units in steps)]
        self._uses: dict[Hashable, list[int]] = {}
        for step, units in enumerate(steps):
            for unit in units:
                self._uses.setdefault(unit.key, []).append(step)
        self._queue = deque((unit, step) for step, units in enumerate(steps) for unit in units)
        self._available = {unit.key for unit in root.all_units() if unit.persistent}
        self._live = self.most = 0
        self._passed: dict[Hashable, int] = {}  # last use that has left the queue

    def gathered(self) -> int:
        """Elements that are gathered."""
        total = step = 0
        for visit in self._visits:
            if visit.enters:
                total += self._gather(visit.units)
                for _ in [u for u in visit.units if self._passed.get(u.key, -1) < step]:
                    unit, use = self._queue.popleft()
                    self._passed[unit.key] = use
                total += self._prefetch()
                step += 1
            else:
                self._release(visit.units, step)
        return total

    def _gather(self, units: Sequence[Unit]) -> int:
        missing = {u.key: u.numel for u in units if u.key not in self._available}
        self._available.update(missing)
        numel = sum(missing.values())
        self._live += numel
        self.most = max(self.most, self._live)
        return numel

    def _prefetch(self) -> int:
        settings = self._settings
        room = min(settings.max_live_parameters - self._live, settings.prefetch_bucket_size)
        found: dict[Hashable, Unit] = {}
        numel = 0
        while self._queue and numel < room:
            unit, use = self._queue.popleft()
            self._passed[unit.key] = max(self._passed.get(unit.key, -1), use)
            if unit.key not in self._available and unit.key not in found:
                found[unit.key] = unit
                numel += unit.numel
        return self._gather(list(found.values()))

    def _release(self, units: Sequence[Unit], step: int) -> None:
        """``step``: that of the next module."""
        for unit in units:
            if unit.persistent or unit.key not in self._available or self._stays(unit, step):
                continue
            self._available.remove(unit.key)
            self._live -= unit.numel

    def _stays(self, unit: Unit, step: int) -> bool:
        if self._passed.get(unit.key, -1) > step:
            return True
        uses = self._uses[unit.key]
        following = bisect_left(uses, step)
        if following == len(uses):
            return False
        distance = self._starts[uses[following]] - self._starts[step]
        return distance < self._settings.max_reuse_distance
