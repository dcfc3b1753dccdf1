"""The volume of a model whose parts are sent between other ranks, by formula.

A *part* is what one set of ranks shares, such as the experts of a mixture. Figures per parameter
are averages over the elements that a rank sends and receives of all parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds_quant.policy.cost import CommVolume
from ds_quant.policy.memory import Sizes, peak_bytes
from ds_quant.policy.route import Routes


@dataclass(frozen=True)
class ModelVolume:
    """The volumes of all parts of a model. Methods as of ``CommVolume``."""

    parts: tuple[CommVolume, ...]

    # ---- the model ----

    @property
    def numel(self) -> int:
        """Elements of all parts."""
        return sum(part.numel for part in self.parts)

    @property
    def routes(self) -> Routes:
        """Routes of the first part."""
        return self.parts[0].routes

    @property
    def gathers(self) -> float:
        """Gathers of every element in a micro-step."""
        return self.parts[0].gathers

    @property
    def trained(self) -> float:
        """Share of the elements that are trained."""
        return self._mean(lambda part: part.trained)

    @property
    def crosses_once(self) -> bool:
        """Return True if gradients of any part cross between nodes once per optimizer step."""
        return any(part.crosses_once for part in self.parts)

    @property
    def varies(self) -> bool:
        """Return True if message lengths depend on the weights."""
        return any(part.varies for part in self.parts)

    @property
    def kept(self) -> dict[str, int]:
        """Number of tensors that are not quantized, by reason."""
        kept: Counter[str] = Counter()
        for part in self.parts:
            kept.update(part.kept)
        return dict(kept)

    @property
    def full_precision_share(self) -> float:
        """Share of the weights and gradients bytes in full precision."""
        sent = [_sent(part) for part in self.parts]
        total = sum(sent)
        if not total:
            return 0.0
        shares = zip(self.parts, sent, strict=True)
        return sum(part.full_precision_share * (nbytes / total) for part, nbytes in shares)

    # ---- bytes per parameter ----

    @property
    def boundary(self) -> float:
        """Gathers of DeepSpeed for Muon."""
        return self._mean(lambda part: part.boundary)

    @property
    def memory(self) -> float:
        """Bytes that every rank keeps between steps."""
        return self._mean(lambda part: part.memory)

    @property
    def partial_sums(self) -> float:
        """Bytes that every rank keeps while gradients accumulate."""
        return self._mean(lambda part: part.partial_sums)

    def step_bytes(self, stage: int, *, micro_steps: int = 1, most: bool = False) -> float:
        """Return the bytes between nodes, or over all ranks where no part has several nodes."""

        def outer(part: CommVolume) -> float:
            if self._stays_inside(part):
                return 0.0
            return part.step_bytes(stage, micro_steps=micro_steps, most=most)

        return self._mean(outer)

    def intra_bytes(self, stage: int, *, micro_steps: int = 1) -> float:
        """Return the bytes inside a node."""

        def inner(part: CommVolume) -> float:
            nbytes = part.intra_bytes(stage, micro_steps=micro_steps)
            if self._stays_inside(part):
                nbytes += part.step_bytes(stage, micro_steps=micro_steps)
            return nbytes

        return self._mean(inner)

    def received_per_node(self, stage: int, *, micro_steps: int) -> float:
        """Return the bytes into one node, or into one rank where no part has several nodes."""

        def received(part: CommVolume) -> float:
            if self._stays_inside(part):
                return 0.0
            return part.received_per_node(stage, micro_steps=micro_steps)

        return self._mean(received)

    # ---- bytes of a rank ----

    def received(self, stage: int, *, micro_steps: int) -> dict[str, dict[str, float]]:
        """Return the bytes into one rank per step, by role and link."""
        total = {role: {"intra": 0.0, "inter": 0.0} for role in ("weights", "gradients")}
        for part in self.parts:
            for role, links in part.received(stage, micro_steps=micro_steps).items():
                for link, nbytes in links.items():
                    total[role][link] += nbytes
        return total

    def peak_bytes(self, sizes: Sequence[Sizes]) -> float:
        """Return the peak of messages and sums, as if all parts were sent at once.

        sizes: of every part.
        """
        return sum(map(peak_bytes, self.parts, sizes))

    # ---- averages ----

    def _stays_inside(self, part: CommVolume) -> bool:
        """Return True if a part has one node and another one has several."""
        return part.routes.nodes == 1 and any(other.routes.nodes > 1 for other in self.parts)

    def _mean(self, value: Callable[[CommVolume], float]) -> float:
        """Return the mean of a value over all elements."""
        numel = self.numel
        if not numel:
            return value(self.parts[0])
        return sum(value(part) * (part.numel / numel) for part in self.parts)


def _sent(part: CommVolume) -> float:
    """Return the bytes of which ``full_precision_share`` is a share."""
    per_param = part.weights + part.gradients + part.summed + part.boundary
    return per_param * part.numel
