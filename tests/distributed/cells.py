"""Fronts, and what the table of behaviours may say about one of them.

[Note: a cell]
Trains   ZeRO: ``test_support.py`` trains the feature with and without a block
Featured ZeRO: ``test_features.py`` does, and ``test_streams.py``
Tries    FSDP2: ``test_behaviours.py`` runs the trial with FSDP2 alone and with a block
Plays    DDP: ``test_ddp_behaviours.py`` does so with the trial of the row's name
Proven   other tests prove it, which run by themselves
Refuses  start-up refuses it with an error that names a way out
Cannot   the front itself has no such thing: a reason
Untried  it was not tried
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.distributed.features import ALL_FEATURES, Feature
from tests.distributed.fsdp2_trials import Refusal, Trial
from tests.distributed.models import settings

ALL_STAGES = (1, 2, 3)
Version = tuple[int, int]


# The columns of the table: argument of ``Row`` -> title. A new one makes every row fail that does
# not speak of it.
FRONTS = {"zero": "ZeRO", "fsdp2": "FSDP2", "ddp": "DDP"}


@dataclass(frozen=True)
class Cell:
    """One behaviour under one front. remark: for the page."""

    remark: str = field(default="", kw_only=True)

    @property
    def stages(self) -> tuple[int, ...]:
        """ZeRO stages; none for a front without stages."""
        return ()

    @property
    def works(self) -> bool:
        """True if it trains."""
        return True

    @property
    def verdict(self) -> str:
        """Text of the page, without remark."""
        return _listed(self.stages) or "works"

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the test files that prove it."""
        return ()


def _listed(stages: tuple[int, ...]) -> str:
    return ", ".join(map(str, stages))


@dataclass(frozen=True, kw_only=True)
class Trains(Cell):
    """A feature that trains under ZeRO to the same loss with and without the block.

    fails: by version of DeepSpeed, stages that it cannot train, with or without the plugin.
    exact_gradients: versions in which gradients stay on DeepSpeed's own path.
    rough: losses may differ more, because Muon turns rounding errors into directions.
    few_ranks: some parameters have a process group smaller than the world.
    """

    how: Feature
    fails: Mapping[Version, tuple[int, ...]] = field(default_factory=dict)
    exact_gradients: tuple[Version, ...] = ()
    rough: bool = False
    few_ranks: bool = False

    @property
    def stages(self) -> tuple[int, ...]:
        return self.how.stages

    @property
    def files(self) -> tuple[str, ...]:
        return ("test_support.py",)


@dataclass(frozen=True)
class Featured(Cell):
    """A feature of features.py. feature: its name there."""

    feature: str

    @property
    def stages(self) -> tuple[int, ...]:
        return ALL_FEATURES[self.feature].stages

    @property
    def files(self) -> tuple[str, ...]:
        return ("test_features.py",)


@dataclass(frozen=True)
class Tries(Cell):
    """A program under FSDP2."""

    trial: Trial

    @property
    def files(self) -> tuple[str, ...]:
        return ("test_behaviours.py",)


@dataclass(frozen=True)
class Plays(Cell):
    """A program under DDP: the trial of ddp_trials.py with the name of the row."""

    @property
    def files(self) -> tuple[str, ...]:
        return ("test_ddp_behaviours.py",)


@dataclass(frozen=True)
class Proven(Cell):
    """Tests that exist and run by themselves.

    tests: "file.py::test_function". The file is one of tests/distributed or tests/integration.
    rows: titles of rows of the file's table, for a test of a table of rows.py.
    """

    tests: tuple[str, ...]
    rows: tuple[str, ...] = ()
    stages: tuple[int, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        return _files_of(self.tests)


@dataclass(frozen=True, kw_only=True)
class Refuses(Cell):
    """Start-up refuses it. remark: why, and what instead."""

    @property
    def works(self) -> bool:
        return False

    @property
    def verdict(self) -> str:
        stages = _listed(self.stages)
        return f"refused under {stages}" if stages else "refused"


@dataclass(frozen=True, kw_only=True)
class RefusesConfig(Refuses):
    """A DeepSpeed config that start-up refuses. parts: texts of the message."""

    parts: tuple[str, ...]
    zero: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = ALL_STAGES
    dtype: str = "bf16"
    since: Version = (0, 17)  # an older DeepSpeed ignores the setting

    def config(self, stage: int, block: dict[str, Any]) -> dict[str, Any]:
        return settings(stage, block, dtype=self.dtype, zero=self.zero, **self.top)

    @property
    def files(self) -> tuple[str, ...]:
        return ("test_validate.py",)


@dataclass(frozen=True, kw_only=True)
class RefusesModel(Refuses):
    """A model that ``fsdp2.attach`` refuses."""

    refusal: Refusal

    @property
    def files(self) -> tuple[str, ...]:
        return ("test_behaviours.py",)


@dataclass(frozen=True, kw_only=True)
class RefusalProven(Refuses):
    """Something that the named tests show to be refused."""

    tests: tuple[str, ...]
    stages: tuple[int, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        return _files_of(self.tests)


def _files_of(tests: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(test.partition("::")[0] for test in tests))


@dataclass(frozen=True)
class Cannot(Cell):
    """The front has no such thing. reason: a few words."""

    reason: str

    @property
    def works(self) -> bool:
        return False

    @property
    def verdict(self) -> str:
        return f"no: {self.reason}"


@dataclass(frozen=True)
class Untried(Cell):
    """Nobody knows."""

    @property
    def works(self) -> bool:
        return False

    @property
    def verdict(self) -> str:
        return "not tried"


Cells = Cell | tuple[Cell, ...]  # several: of other stages each


class Row:
    """A behaviour that users rely on."""

    def __init__(self, name: str, broken: str, **cells: Cells) -> None:
        """Make a row.

        Args:
            name: as users call it.
            broken: what a user would notice if it failed.
            cells: by front, the names of ``FRONTS``.

        Raises:
            TypeError: a front that does not exist.
        """
        unknown = sorted(cells.keys() - FRONTS.keys())
        if unknown:
            raise TypeError(f"{name}: {unknown} are no fronts: allowed: {sorted(FRONTS)}")
        self.name = name
        self.broken = broken
        self._cells = cells

    def of(self, front: str) -> tuple[Cell, ...]:
        """Return the cells of a front; none if the row does not speak of it."""
        cells = self._cells.get(front, ())
        return cells if isinstance(cells, tuple) else (cells,)
