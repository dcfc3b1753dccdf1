"""Long tables of cases: ``make test`` runs some of them, ``make test-all`` all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def thinned(cases: Iterable[Any], quick: Callable[..., bool]) -> list[Any]:
    """Return the cases of a test as ``pytest.param``, marked slow unless they are ``quick``.

    A tuple is a case of several arguments; ``quick`` gets them one by one.
    """
    params = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marks = () if quick(*values) else pytest.mark.slow
        params.append(pytest.param(*values, marks=marks))
    return params


def every_second(cases: Sequence[Any]) -> list[Any]:
    """Return the cases as ``pytest.param``, every second one marked slow.

    A tuple is a case of several arguments; a named tuple is one argument.
    """
    params = []
    for index, case in enumerate(cases):
        values = case if type(case) is tuple else (case,)
        marks = pytest.mark.slow if index % 2 else ()
        params.append(pytest.param(*values, marks=marks))
    return params
