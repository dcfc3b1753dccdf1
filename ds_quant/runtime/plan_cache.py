"""Remember plans between steps, in bounded memory."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Plan = TypeVar("Plan")


class PlanCache(dict[Key, Plan]):
    """Plans by the facts that they follow from.

    Steps repeat their work, so a plan is made once and looked up afterwards. A parameter that comes
    and goes makes more plans: the cache is emptied when it is full.
    """

    LIMIT = 1000

    def add(self, key: Key, plan: Plan) -> Plan:
        """Store a plan and return it."""
        if len(self) >= self.LIMIT:
            self.clear()
        self[key] = plan
        return plan
