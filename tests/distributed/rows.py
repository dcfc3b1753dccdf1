"""Tables of runs that are compared: every row trains something in several ways, and the first of
them is compared with the others. The rows of a family share one start of the ranks.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from tests.distributed.features import Feature
from tests.distributed.harness import run
from tests.distributed.models import QSDP, Run, digests, mean_losses, unsteady
from tests.thin import thinned

Step = Callable[[Any, int, int], list[float]]
Relation = Callable[[Run, Run], None]
Case = tuple[str, int]  # title and stage


@dataclass(frozen=True, kw_only=True)
class Way:
    """What a run has besides: keys of the block (None: no block at all) and of zero_optimization,
    a loop of its own. ``inside`` is entered around it; what that gives is noted. ``resumes``: it
    ends where it saves, and an engine on other weights loads that and goes on.
    """

    block: dict[str, Any] | None = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    step: Step | None = None
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext
    resumes: bool = False

    def train(self, row: Row, stage: int) -> Run:
        feature, block = row.feature, None if self.block is None else row.block | self.block
        changed = replace(feature, step=self.step or feature.step, zero=feature.zero | self.zero)
        saving = {"save_at": row.save_at, "resumes": self.resumes}
        with self.inside() as noted:
            return replace(changed.train(stage, block, row.steps, **saving), noted=noted)


# ---- how runs are compared ----


def seen_in(run: Run) -> set[tuple[int, str, str]]:
    return {(s.step, s.name, s.bits) for s in run.seen}


def same_weights(run: Run, other: Run) -> None:
    """Losses, masters, and what every forward and backward has seen in each step."""
    assert repr(other.losses) == repr(run.losses)  # NaN, too
    assert digests(other.weights) == digests(run.weights)
    assert seen_in(other) == seen_in(run)


def same(run: Run, other: Run) -> None:
    """And as many bytes."""
    same_weights(run, other)
    assert other.report["received_bytes"] == run.report["received_bytes"]


def same_for(steps: int) -> Relation:
    """In so many first steps and no longer."""

    def compare(run: Run, other: Run) -> None:
        before = steps * run.report["micro_steps"] // run.report["steps"]
        assert other.losses[:before] == run.losses[:before]
        assert other.losses[before:] != run.losses[before:]
        differing = seen_in(run) ^ seen_in(other)
        assert differing and min(step for step, *_ in differing) >= steps

    return compare


def close(atol: float) -> Relation:
    """Losses and weights, to within the rounding of sums in another order."""

    def compare(run: Run, other: Run) -> None:
        np.testing.assert_allclose(other.losses, run.losses, rtol=2e-5, atol=atol)
        assert other.weights.keys() == run.weights.keys()
        for name, values in run.weights.items():
            found = other.weights[name]
            np.testing.assert_allclose(found, values, rtol=2e-5, atol=atol, err_msg=name)

    return compare


# ---- tables ----


@dataclass(frozen=True, kw_only=True)
class Row:
    """quick: the stages at which make test trains it, of those of the feature.
    of_mean: losses are averaged over the ranks before they are compared.
    alike: all ranks compute with equal bits.
    """

    ways: tuple[Way, ...]
    feature: Feature
    holds: Relation
    block: dict[str, Any] = field(default_factory=lambda: QSDP)
    world: int = 2
    steps: int = 3
    save_at: int | None = None
    quick: tuple[int, ...] = (1, 2, 3)
    of_mean: bool = False
    alike: bool = True


class Table:
    """The rows of a test module, which calls it TABLE."""

    def __init__(self, module: str) -> None:
        self._module = module
        self.rows: dict[str, Row] = {}

    def add(self, title: str, *ways: Way, holds: Relation = same, **fields: Any) -> None:
        """A row; ``fields``: those of a ``Row`` and of its ``Feature``."""
        own = {name: fields.pop(name) for name in Row.__dataclass_fields__ if name in fields}
        own.setdefault("feature", Feature(**fields))
        self.rows[title] = Row(ways=ways, holds=holds, **own)

    def cases(self) -> list[Case]:
        return [(title, stage) for title, row in self.rows.items() for stage in row.feature.stages]

    def params(self) -> list[Any]:
        return thinned(self.cases(), self.is_quick)

    def is_quick(self, title: str, stage: int) -> bool:
        return stage in self.rows[title].quick

    def start_of(self, title: str, stage: int) -> tuple[str, int, bool]:
        """What cases that are played together share: a family, named before the comma, a world."""
        family, comma, _ = title.partition(",")
        return family if comma else "", self.rows[title].world, self.is_quick(title, stage)

    def runs(self, title: str, stage: int) -> list[list[Run]]:
        """By rank, a run for each way."""
        self.rows[title].feature.skip_if_too_old()
        ranks = [
            found[title, stage] for found in _played(self._module, *self.start_of(title, stage))
        ]
        assert not (failed := [runs for runs in ranks if isinstance(runs, str)]), failed[0]
        return ranks

    def check(self, title: str, stage: int) -> list[list[Run]]:
        """Also that in each run all ranks compute with equal bits, from the first fetch of an
        optimizer step to the last one.
        """
        row, ranks = self.rows[title], self.runs(title, stage)
        for of_first, *of_others in zip(*ranks, strict=True):
            assert unsteady(of_first.seen) == [] != of_first.seen
            if row.alike:
                assert all(seen_in(run) == seen_in(of_first) for run in of_others)
        if row.of_mean:
            means = [mean_losses(runs).tolist() for runs in zip(*ranks, strict=True)]
            both = [zip(rank, means, strict=True) for rank in ranks]
            ranks = [[replace(run, losses=mean) for run, mean in pairs] for pairs in both]
        for first, *others in ranks:
            for other in others:
                row.holds(first, other)
        return ranks


@cache
def _played(module: str, *start: Any) -> list[dict[Case, list[Run] | str]]:
    table = import_module(module).TABLE
    together = [case for case in table.cases() if table.start_of(*case) == start]
    return run(_play, start[1], module, together, timeout=280)


def _play(module: str, cases: list[Case]) -> dict[Case, list[Run] | str]:
    """The runs of every case on this rank, or what has gone wrong on all of them."""
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    rows, found = import_module(module).TABLE.rows, dict[Case, list[Run] | str]()
    for title, stage in cases:
        try:
            found[title, stage] = [way.train(rows[title], stage) for way in rows[title].ways]
        except Exception:
            found[title, stage] = traceback.format_exc()
    return found
