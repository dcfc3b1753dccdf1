"""The table of behaviours: every row speaks of every front, and what FSDP2 is said to do is tried.

A failing cell names its row, front, scheme and ranks, and what a user would notice.
"""

from __future__ import annotations

import ast
import time
import traceback
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from tests.conftest import COLLECTED
from tests.distributed import support_page, test_features, test_support
from tests.distributed.behaviours import TABLE
from tests.distributed.cells import (
    FRONTS,
    Cannot,
    Featured,
    Proven,
    RefusalProven,
    RefusesModel,
    Row,
    Trains,
    Tries,
    Untried,
)
from tests.distributed.features import DEEPSPEED_FEATURES
from tests.distributed.fsdp2_trials import Differs, Refusal, Trial
from tests.distributed.harness import run_each, scratch
from tests.thin import thinned

FOLDERS = [Path(__file__).parent, Path(__file__).parents[1] / "integration"]


# ---- the table ----


def silent(table: dict[str, Row]) -> list[str]:
    """Return every row and front of which the table says nothing."""
    return [
        f"{name}: {title}"
        for name, row in table.items()
        for front, title in FRONTS.items()
        if not row.of(front)
    ]


def test_every_row_speaks_of_every_front() -> None:
    assert silent(TABLE) == []


def test_a_front_that_forgets_a_row_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new column, and a row that speaks of one front only."""
    forgetful = Row("a new behaviour", "", zero=Cannot("a reason"))
    assert silent({forgetful.name: forgetful}) == ["a new behaviour: FSDP2", "a new behaviour: DDP"]
    monkeypatch.setitem(FRONTS, "pipe", "pipelines")
    assert silent(TABLE) == [f"{name}: pipelines" for name in TABLE]
    with pytest.raises(TypeError, match=r"\['fsdp'\] are no fronts"):
        Row("misspelt", "", fsdp=Cannot("a reason"))


def test_rows_have_names_of_their_own_and_say_what_breaks() -> None:
    for name, row in TABLE.items():
        assert name == row.name and row.broken, name
        for front in FRONTS:
            stages = [stage for cell in row.of(front) for stage in cell.stages]
            if front != "zero":
                assert not stages, name
            elif not any(isinstance(cell, (Cannot, Untried)) for cell in row.of(front)):
                assert stages, f"{name}: ZeRO stages are missing"


def test_every_feature_of_deepspeed_has_a_row() -> None:
    cells = [cell for row in TABLE.values() for cell in row.of("zero")]
    named = {cell.feature for cell in cells if isinstance(cell, Featured)}
    assert DEEPSPEED_FEATURES.keys() - named == set()


@cache
def functions(file: str) -> set[str]:
    """Return the names of the test functions of a file."""
    for folder in FOLDERS:
        if (folder / file).exists():
            tree = ast.parse((folder / file).read_text("utf-8"))
            return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return set()


def test_every_test_that_the_table_names_exists() -> None:
    for name, row in TABLE.items():
        for front in FRONTS:
            for cell in row.of(front):
                for file in cell.files:
                    assert functions(file), f"{name}: there is no {file}"
                if isinstance(cell, (Proven, RefusalProven)):
                    for test in cell.tests:
                        file, _, function = test.partition("::")
                        assert function in functions(file), f"{name}: there is no {test}"
                if isinstance(cell, Proven) and cell.rows:
                    (file,) = cell.files
                    titles = import_module(f"tests.distributed.{file.removesuffix('.py')}").TABLE
                    assert set(cell.rows) <= titles.rows.keys(), name


def quick_proofs(name: str, row: Row, front: str, collected: dict[str, bool]) -> list[bool]:
    """Return for every proof of a cell that works: True if `make test` runs it.

    Trials have tests of their own. collected: see conftest.py.
    """
    found = []
    for cell in row.of(front):
        if isinstance(cell, Trains):
            stages = [(f"{name}, ZeRO-{stage}", stage) for stage in cell.stages]
            found += [test_support.TABLE.is_quick(*case) for case in stages]
        elif isinstance(cell, Featured):
            titles = [(f"ZeRO-{stage}, {cell.feature}", stage) for stage in cell.stages]
            found += [test_features.TABLE.is_quick(*case) for case in titles]
        elif isinstance(cell, Proven) and cell.rows:
            (file,) = cell.files
            table = import_module(f"tests.distributed.{file.removesuffix('.py')}").TABLE
            for title in cell.rows:
                stages = table.rows[title].feature.stages
                found += [table.is_quick(title, stage) for stage in stages]
        elif isinstance(cell, (Proven, RefusalProven)):
            found += [collected[test] for test in cell.tests]
    return found


ONLY_IN_TEST_ALL = {
    ("compiled layers, backend eager", "zero"),  # slow to compile; FSDP2 and DDP run it
    ("Ulysses: one sequence over all ranks", "zero"),  # slow with Trainer; FSDP2 and DDP run it
}


def test_make_test_runs_every_behaviour_of_every_front() -> None:
    for name, row in TABLE.items():
        for front in FRONTS:
            try:
                in_make_test = quick_proofs(name, row, front, COLLECTED)
            except KeyError as test:
                pytest.skip(f"needs all of tests/distributed and tests/integration, as {test}")
            if in_make_test:  # one for each proof; trials have tests of their own
                assert any(in_make_test) == ((name, front) not in ONLY_IN_TEST_ALL), (name, front)


def test_the_page_is_made_from_the_table() -> None:
    text = support_page.PAGE.read_text("utf-8")
    assert text == support_page.page(text), "run: python -m tests.distributed.support_page"


# ---- FSDP2 ----


class Case(NamedTuple):
    """A cell that this file runs. scheme: "" for a refusal. mesh: as of ``Trial.play``."""

    row: str
    scheme: str
    world: int
    mesh: str = ""

    @property
    def is_quick(self) -> bool:
        """True if `make test` runs it."""
        trial = trials()[self.row]
        return self.world == 2 and (isinstance(trial, Refusal) or self.scheme == trial.scheme)


@cache
def trials() -> dict[str, Trial | Refusal]:
    """Return what is tried under FSDP2, by name of the row."""
    found: dict[str, Trial | Refusal] = {}
    for name, row in TABLE.items():
        for cell in row.of("fsdp2"):
            if isinstance(cell, (Tries, RefusesModel)):
                assert name not in found, f"{name}: two trials under FSDP2"
                found[name] = cell.trial if isinstance(cell, Tries) else cell.refusal
    return found


def cases() -> list[Case]:
    listed = []
    for row, trial in trials().items():
        if isinstance(trial, Refusal):
            listed.append(Case(row, "", 2))
            continue
        listed += [Case(row, scheme, world) for world in (2, 4) for scheme in trial.schemes]
        listed += [Case(row, trial.scheme, 4, mesh) for mesh in trial.meshes]
    return listed


def test_every_trial_is_quick_once() -> None:
    quick = [case.row for case in cases() if case.is_quick]
    assert quick == list(trials())


def failure(case: Case, cause: str) -> str:
    """Describe a failing cell."""
    scheme = f" with {case.scheme}" if case.scheme else ""
    mesh = f" ({case.mesh})" if case.mesh else ""
    return (
        f"row: {case.row}\nfront: FSDP2{scheme}, on {case.world} ranks{mesh}\n"
        f"a user would notice: {TABLE[case.row].broken}\ncause: {cause}"
    )


def play(listed: list[Case]) -> dict[Case, str]:
    """Run cases on this rank. Return the causes of failures, "" for none.

    No case follows one that some ranks have not finished: they may wait for each other.
    """
    causes: dict[Case, str] = {}
    for place, case in enumerate(listed):
        try:
            trial = trials()[case.row]
            if isinstance(trial, Refusal):
                trial.require()
            else:
                trial.compare(case.scheme, case.mesh)
            causes[case] = ""
            end = FINISHED
        except Differs as error:
            causes[case] = str(error)
            end = FINISHED
        except BaseException as error:  # pytest's own, too
            causes[case] = traceback.format_exc()
            end = repr(error)
        if len(set(ends_of_all_ranks(place, end))) > 1:
            dist.destroy_process_group()  # else the end of the run waits for all ranks
            break
    return causes


FINISHED = "finished"


def ends_of_all_ranks(place: int, end: str) -> list[str]:
    """Return how a case has ended on all ranks, by files: a collective may be under way."""
    own = scratch() / f"case {place} on rank {dist.get_rank()}.part"
    own.write_text(end)
    own.rename(own.with_suffix(".end"))
    ends = []
    for rank in range(dist.get_world_size()):
        file = scratch() / f"case {place} on rank {rank}.end"
        while not file.exists():  # the test has a time limit
            time.sleep(0.001)
        ends.append(file.read_text())
    return ends


@cache
def outcomes(world: int, is_quick: bool) -> list[dict[Case, str]]:
    """Run all cases of some ranks in one start. Return causes of failures by rank."""
    listed = [case for case in cases() if (case.world, case.is_quick) == (world, is_quick)]
    limits = {"TEST_COLLECTIVE_TIMEOUT": "60"}
    found = []
    for causes, error in run_each(play, world, listed, timeout=1200, environment=limits):
        found.append(dict.fromkeys(listed, error) if error is not None else causes)
    return found


@pytest.mark.parametrize(
    ("row", "scheme", "world", "mesh"), thinned(cases(), lambda *case: Case(*case).is_quick)
)
def test_fsdp2_does_with_the_block_what_it_does_alone(
    row: str, scheme: str, world: int, mesh: str
) -> None:
    case = Case(row, scheme, world, mesh)
    found = []
    for rank, causes in enumerate(outcomes(world, case.is_quick)):
        cause = causes.get(case, "not run: ranks have ended an earlier case in different ways")
        if cause:
            found.append(f"rank {rank}: {cause}")
    if found:
        pytest.fail(failure(case, "\n".join(found)), pytrace=False)
