"""Long tables of cases: ``make test`` runs some of them, ``make test-all`` all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
