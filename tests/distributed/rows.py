"""Tables of trainings whose results must agree.

[Note: a row]
Feature  how to set DeepSpeed up: model, optimizer, config
Way      a difference between two runs of a row: other keys of the block or the config, another loop
Row      one feature, trained in several ways. The run of the first way is compared with the others
Relation the comparison of two runs: ``same``, ``same_weights``, ``close``, ...
Case     a row at one ZeRO stage: one test
Table    the rows of a test module

Starting ranks takes longer than a run, so cases are trained together: those of a family, which have
the same word before the comma of their titles, share one start.
"""

from __future__ import annotations

import gc
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

Step = Callable[[Any, int, int], list[float]]  # engine, step, seed -> losses of the micro-steps
Relation = Callable[[Run, Run], None]  # the first run and another one; raises AssertionError
Case = tuple[str, int]  # title of the row, ZeRO stage


@dataclass(frozen=True, kw_only=True)
class Way:
    """A difference of a run from the other runs of its row.

    block: further keys of the block; None: no block, DeepSpeed as shipped.
    zero: further keys of ``zero_optimization``.
    step: loop of one optimizer step; None: that of the feature.
    inside: context manager around the run; its value becomes ``Run.noted``.
    resumes: True to end at the row's ``save_at``, and to continue with an engine that was built on
        other weights and has loaded the checkpoint.
    """

    block: dict[str, Any] | None = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    step: Step | None = None
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext
    resumes: bool = False

    def train(self, row: Row, stage: int) -> Run:
        block = None if self.block is None else row.block | self.block
        feature = replace(
            row.feature,
            step=self.step or row.feature.step,
            zero=row.feature.zero | self.zero,
        )
        with self.inside() as noted:
            run = feature.train(stage, block, row.steps, save_at=row.save_at, resumes=self.resumes)
        return replace(run, noted=noted)


# ---- relations ----


def seen_in(run: Run) -> set[tuple[int, str, str]]:
    """Return (step, parameter, digest) of all weights that forwards and backwards have used."""
    return {(sighting.step, sighting.name, sighting.bits) for sighting in run.seen}


def same_weights(run: Run, other: Run) -> None:
    """Losses, master weights and the weights used in every step have equal bits."""
    assert repr(other.losses) == repr(run.losses)  # repr: NaN equals NaN
    assert digests(other.weights) == digests(run.weights)
    assert seen_in(other) == seen_in(run)


def same(run: Run, other: Run) -> None:
    """``same_weights``, and equal numbers of received bytes."""
    same_weights(run, other)
    assert other.report["received_bytes"] == run.report["received_bytes"]


def same_for(steps: int) -> Relation:
    """Return the relation of runs that are equal in the first ``steps`` steps and differ later."""

    def compare(run: Run, other: Run) -> None:
        micro_steps = steps * run.report["micro_steps"] // run.report["steps"]
        assert other.losses[:micro_steps] == run.losses[:micro_steps]
        assert other.losses[micro_steps:] != run.losses[micro_steps:]
        differing = seen_in(run) ^ seen_in(other)
        assert differing and min(step for step, *_ in differing) >= steps

    return compare


def close(atol: float) -> Relation:
    """Return the relation of losses and weights that differ by the order of sums at most."""

    def compare(run: Run, other: Run) -> None:
        np.testing.assert_allclose(other.losses, run.losses, rtol=2e-5, atol=atol)
        assert other.weights.keys() == run.weights.keys()
        for name, values in run.weights.items():
            np.testing.assert_allclose(
                other.weights[name], values, rtol=2e-5, atol=atol, err_msg=name
            )

    return compare


# ---- tables ----


@dataclass(frozen=True, kw_only=True)
class Row:
    """A feature, trained in several ways.

    ways: the first one is compared with the others.
    holds: relation between the runs.
    block: keys of the block in all ways.
    world: ranks.
    steps: optimizer steps.
    save_at: step before which a checkpoint is saved; None: no checkpoint.
    quick: stages that `make test` trains; the feature's other stages are slow tests. None: the
        riskiest stage of the feature.
    of_mean: True to average losses over the ranks before the comparison.
    alike: True if all ranks compute with equal bits.
    """

    ways: tuple[Way, ...]
    feature: Feature
    holds: Relation
    block: dict[str, Any] = field(default_factory=lambda: QSDP)
    world: int = 2
    steps: int = 3
    save_at: int | None = None
    quick: tuple[int, ...] | None = None
    of_mean: bool = False
    alike: bool = True


class Table:
    """The rows of a test module. Its name there must be TABLE: ranks import it by that name."""

    def __init__(self, module: str) -> None:
        self._module = module
        self.rows: dict[str, Row] = {}

    def add(self, title: str, *ways: Way, holds: Relation = same, **fields: Any) -> None:
        """Add a row.

        fields: fields of ``Row``, and either a ``feature`` or fields of ``Feature``.
        """
        row_fields = {}
        for name in Row.__dataclass_fields__:
            if name in fields:
                row_fields[name] = fields.pop(name)
        if "feature" not in row_fields:
            row_fields["feature"] = Feature(**fields)
        elif fields:
            raise TypeError(f"{title}: fields beside a feature: {sorted(fields)}")
        self.rows[title] = Row(ways=ways, holds=holds, **row_fields)

    def cases(self) -> list[Case]:
        """Return all rows at all stages of their features."""
        return [(title, stage) for title, row in self.rows.items() for stage in row.feature.stages]

    def params(self) -> list[Any]:
        """Return the cases as parameters of a test. Those that are not quick are marked slow."""
        return thinned(self.cases(), self.is_quick)

    def is_quick(self, title: str, stage: int) -> bool:
        row = self.rows[title]
        if row.quick is not None:
            return stage in row.quick
        return stage == row.feature.riskiest_stage

    def start_of(self, title: str, stage: int) -> tuple[str, int, bool]:
        """Return the key of the start: cases with equal keys are trained together.

        The key is the family, the number of ranks, and True if the case is quick.
        """
        family, comma, _ = title.partition(",")
        return family if comma else "", self.rows[title].world, self.is_quick(title, stage)

    def runs(self, title: str, stage: int) -> list[list[Run]]:
        """Train a case with all others of its start. Return a run per way, by rank."""
        self.rows[title].feature.skip_if_too_old()
        ranks = []
        for outcomes in _train_start(self._module, *self.start_of(title, stage)):
            runs = outcomes[title, stage]
            assert not isinstance(runs, str), runs
            ranks.append(runs)
        return ranks

    def check(self, title: str, stage: int) -> list[list[Run]]:
        """Train a case and compare its runs. Return a run per way, by rank.

        In every run all fetches of an optimizer step must see equal bits, on all ranks if the row
        is ``alike``.
        """
        row = self.rows[title]
        ranks = self.runs(title, stage)
        for first_rank, *other_ranks in zip(*ranks, strict=True):
            assert first_rank.seen
            assert unsteady(first_rank.seen) == []
            if row.alike:
                assert all(seen_in(run) == seen_in(first_rank) for run in other_ranks)
        if row.of_mean:
            ranks = _with_mean_losses(ranks)
        for first, *others in ranks:
            for other in others:
                row.holds(first, other)
        return ranks


def _with_mean_losses(ranks: list[list[Run]]) -> list[list[Run]]:
    """Replace the losses of every run by their mean over the ranks."""
    means = [mean_losses(list(runs)).tolist() for runs in zip(*ranks, strict=True)]
    return [
        [replace(run, losses=losses) for run, losses in zip(runs, means, strict=True)]
        for runs in ranks
    ]


@cache
def _train_start(module: str, *start: Any) -> list[dict[Case, list[Run] | str]]:
    """Train all cases of a start. Return by rank the runs of each case, or its traceback."""
    table = import_module(module).TABLE
    _, world, _ = start
    cases = [case for case in table.cases() if table.start_of(*case) == start]
    return run(_train_cases, world, module, cases, timeout=280)


def _train_cases(module: str, cases: list[Case]) -> dict[Case, list[Run] | str]:
    """Train cases on this rank. Return the runs of each, or its traceback."""
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    rows = import_module(module).TABLE.rows
    outcomes: dict[Case, list[Run] | str] = {}
    for title, stage in cases:
        try:
            outcomes[title, stage] = [way.train(rows[title], stage) for way in rows[title].ways]
        except Exception:
            outcomes[title, stage] = traceback.format_exc()
        # DeepSpeed collects garbage in every engine: exclude the results of earlier cases.
        gc.collect()
        gc.freeze()
    return outcomes
