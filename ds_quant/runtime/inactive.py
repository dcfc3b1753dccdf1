"""The front of a model without a block: it quantizes nothing and says so."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ds_quant.config.errors import KEY
from ds_quant.runtime import log


class InactiveFront:
    """Has the methods of a front that users call, so that a loop runs with and without a block.

    The state of a checkpoint passes through: a later run with a block goes on from it.
    """

    def __init__(self, reason: str) -> None:
        self.line = reason
        self._state: dict[str, Any] = {"step": 0}
        log.info_rank0(f"{KEY}: {reason}")

    def state_dict(self) -> dict[str, Any]:
        """Return the state that was loaded."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep a checkpoint's state for the next one."""
        self._state = dict(state)

    def discard_gradients(self, parameters: Collection[int] | None = None) -> None:
        """Do nothing: no gradients are kept."""

    def resync(self) -> None:
        """Do nothing: no weights are kept."""

    def found_nonfinite(self) -> bool:
        """Return False: no gradients are watched."""
        return False

    def detach(self) -> None:
        """Do nothing: nothing is attached."""
