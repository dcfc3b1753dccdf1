"""Thins a table of cases to all pairs: of any two factors, every pair of values is in a case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations, product
from typing import Any

Case = tuple[Any, ...]
Pair = tuple[int, Any, int, Any]


@cache
def pairs_of(case: Case) -> frozenset[Pair]:
    """Return the pairs of values in a case, each with the positions of its factors."""
    return frozenset((i, case[i], j, case[j]) for i, j in combinations(range(len(case)), 2))


def all_pairs(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Return cases that have every pair of values of two factors, chosen greedily.

    Values of the first factor are covered one by one: appending a value to it only adds cases.
    """
    first, *others = factors.values()
    candidates = list(product(*others))
    uses: Counter[Pair] = Counter()
    chosen: list[Case] = []
    for value in first:
        missing = {(0, value, j, v) for j, vs in enumerate(others, 1) for v in vs}
        while missing:
            case = max(
                ((value, *rest) for rest in candidates),
                key=lambda case: _gain(pairs_of(case), missing, uses),
            )
            chosen.append(case)
            uses.update(pairs_of(case))
            missing -= uses.keys()
    return chosen


def _gain(pairs: frozenset[Pair], missing: set[Pair], uses: Counter[Pair]) -> tuple[int, int, int]:
    """Return the gain of a case: missing pairs of the current value, new pairs, and balance."""
    return len(pairs & missing), len(pairs - uses.keys()), -sum(uses[pair] for pair in pairs)
