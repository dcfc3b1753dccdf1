"""Into how many slices a reduction over two hops is cut.

While one slice crosses between the nodes, the next is inside them. With n slices that takes
longer + shorter / n + n * overhead: the two hops' seconds, and what a slice costs beyond its bytes.
It takes least with n = sqrt(shorter / overhead). To the host a slice is two messages and five calls
of kernels, of however many tensors and ranks: 0.13 ms for a layer of Llama-7B on 4 x 8 ranks.
May import the standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SLICE_SECONDS = 1e-4  # what a slice costs beyond its bytes and the links' latency
MOST = 16  # slices, unless more are asked for


@dataclass(frozen=True, kw_only=True)
class Slicing:
    """Number of slices: ``count``, or the best one for a ``pace``, which is the shorter hop's
    seconds per element over a slice's overhead in seconds. Where no link is measured it is that of
    8 bits at 20 GB/s inside a node.
    """

    count: int | None = None
    pace: float = 5e-11 / SLICE_SECONDS

    def slices(self, numel: int) -> int:
        """For ``numel`` elements of this rank's input."""
        if self.count is not None:
            return self.count
        return max(1, min(MOST, round(math.sqrt(numel * self.pace))))
