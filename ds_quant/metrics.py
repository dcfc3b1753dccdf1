"""Counters of what the collectives really move, by role and by link. May import meter."""

from __future__ import annotations

from dataclasses import dataclass, field

from ds_quant.meter import Meter


@dataclass
class Traffic:
    """Bytes this rank received and messages it posted, since the engine was built.

    ``received[role][link]`` is in bytes; role is ``weights`` or ``gradients``, link is ``intra``
    (from ranks of the same node) or ``inter`` (from other nodes). A rank's own payload never
    crosses a link and is not counted. ``collectives[role]`` counts collectives issued.
    ``meter`` measures the same collectives in sampled steps.
    """

    received: dict[str, dict[str, int]] = field(
        default_factory=lambda: {
            role: {"intra": 0, "inter": 0} for role in ("weights", "gradients")
        }
    )
    collectives: dict[str, int] = field(default_factory=lambda: {"weights": 0, "gradients": 0})
    meter: Meter = field(default_factory=Meter)

    def count(self, role: str, *, intra: int, inter: int) -> None:
        """Add one collective that brought ``intra`` + ``inter`` bytes to this rank."""
        self.received[role]["intra"] += intra
        self.received[role]["inter"] += inter
        self.collectives[role] += 1

    def total(self) -> int:
        """All bytes received."""
        return sum(sum(links.values()) for links in self.received.values())
