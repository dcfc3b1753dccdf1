"""The table of mutants follows the code; the mutants themselves are run by hand."""

from __future__ import annotations

from tests import mutants


def test_every_row_has_its_line_once_and_its_test() -> None:
    assert mutants.problems() == []
    says = [row.says for row in mutants.rows()]
    assert len(says) == len(set(says)) > 30
