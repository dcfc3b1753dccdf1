"""Long tables of cases: ``make test`` runs those that are named in a test, ``make test-all`` all.

[Note: the choice of make test]
It is made by risk: every behaviour under every front once, at its riskiest stage; of the kernels
one codec of each width and of each formula; of everything else the cases that have failed before or
that no other quick test resembles. test_behaviours.py shows that no behaviour is left out.
"""

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
