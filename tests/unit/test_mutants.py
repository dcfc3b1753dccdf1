"""The table of mutants follows the code: see tests/mutants.py."""

from __future__ import annotations

from dataclasses import replace

from tests import mutants


def test_every_mutant_fits_the_code() -> None:
    """Its old text occurs once in its file, and its test exists."""
    assert mutants.problems() == []


def test_a_mutant_that_does_not_fit_is_named() -> None:
    row = next(row for row in mutants.rows() if "::" in row.test)
    assert row.problem() is None
    wrong_rows = {
        "has its old text 0 times": replace(row, old="no line has this text"),
        "no file": replace(row, file="ds_quant/no_module.py"),
        "are equal": replace(row, new=row.old),
        "no test": replace(row, test=f"{row.test}_is_gone"),
    }
    for problem, wrong_row in wrong_rows.items():
        assert problem in (wrong_row.problem() or "")
