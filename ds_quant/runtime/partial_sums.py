"""Bytes of partial gradient sums, and the reduction that still adds to some of them.

[Note: one running reduction] A reduction that adds to partial sums is waited for when the next one
begins. So the messages of one reduction are in memory between two backwards, not those of all.
"""

from __future__ import annotations

from torch import Tensor

from ds_quant.comm.reduce import Reduction


class PartialSumsMemory:
    """The memory of all partial sums of one model.

    running: the last reduction that adds to partial sums, see [Note: one running reduction]. The
        next one frees it, or the last backward of a step.
    nbytes: bytes of partial sums now. most_nbytes: most bytes so far.
    """

    def __init__(self) -> None:
        self.running: Reduction | None = None
        self.nbytes = 0
        self.most_nbytes = 0

    def wait(self) -> None:
        """Wait for the running reduction."""
        if self.running is not None:
            self.running.wait()
            self.running = None

    def hold(self, values: Tensor) -> None:
        """Count new partial sums."""
        self.nbytes += values.nbytes
        self.most_nbytes = max(self.most_nbytes, self.nbytes)

    def release(self, values: Tensor, last: Reduction) -> Tensor:
        """Return partial sums that nobody keeps any more. last: the reduction that adds to them."""
        last.wait()
        if self.running is last:
            self.running = None
        self.nbytes -= values.nbytes
        return values
