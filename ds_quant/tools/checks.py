"""What a check of the environment found, and how it is shown. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One finding. A ``problem`` makes the machine unhealthy and carries a fix; so may a warning.

    details: facts as JSON types, for ``--json``.
    """

    name: str
    status: str
    found: str
    fix: str = ""
    details: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        assert self.status in (OK, WARNING, PROBLEM), self.status
        assert self.fix or self.status != PROBLEM, f"{self.name}: a problem without a fix"


def healthy(checks: Sequence[Check]) -> bool:
    """Whether nothing stands in the way."""
    return all(check.status != PROBLEM for check in checks)


def lines(checks: Sequence[Check]) -> list[str]:
    """One line per check, its fix below it; tracebacks at the end."""
    width = max((len(check.name) for check in checks), default=0)
    shown = []
    for check in checks:
        shown.append(f"{check.status:7}  {check.name:{width}}  {check.found}")
        if check.fix:
            shown.append(f"{'':7}  {'':{width}}  fix: {check.fix}")
    for check in checks:
        if (check.details or {}).get("traceback"):
            shown.append(f"\n{check.name}:\n{check.details['traceback']}\n")
    return shown
