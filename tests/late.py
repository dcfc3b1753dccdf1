"""A late link: nothing is received before it was waited for, and nothing sent may change till then.

A link of this machine delivers so soon that a wait that is left out is not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

UNTOUCHED = 0xA7  # every byte of what has not arrived; no message of a test consists of it


class LateMessage:
    """A posted collective of torch.distributed. ``arrive``: makes or awaits what is received."""

    def __init__(self, arrive: Callable[[], Any], sent: Tensor, received: Tensor | None) -> None:
        self._arrive, self._sent, self._posted = arrive, sent, sent.clone()
        self.is_done = False
        if received is not None:
            received.view(torch.uint8).fill_(UNTOUCHED)

    def wait(self) -> None:
        """Let it arrive."""
        assert torch.equal(self._sent, self._posted), "a message was changed on its way"
        self._arrive()
        self.is_done = True
