"""Late messages: data are received at the wait only, and sent data must not change until then.

Real messages on one machine arrive so early that a missing wait has no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

UNTOUCHED = 0xA7  # every byte before the message is received; no message of a test consists of it


class LateMessage:
    """A posted collective of torch.distributed.

    arrive: fills ``received``.
    """

    def __init__(self, arrive: Callable[[], Any], sent: Tensor, received: Tensor | None) -> None:
        self._arrive = arrive
        self._sent = sent
        self._posted = sent.clone()
        self.is_done = False
        if received is not None:
            received.view(torch.uint8).fill_(UNTOUCHED)

    def wait(self) -> None:
        """Receive the message. The sent data must be unchanged."""
        assert torch.equal(self._sent, self._posted), "a message was changed on its way"
        self._arrive()
        self.is_done = True
