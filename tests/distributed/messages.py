"""Messages of this process over gloo, caught where torch.distributed sends and receives them.

What is replaced here stays replaced until the process ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class PostedRole:
    """Notes the role of the collective that is being posted, such as "weights".

    A communicator counts a collective before it posts its messages.
    """

    def __init__(self) -> None:
        from ds_quant.comm.traffic import Traffic

        self.current = ""
        count = Traffic.count

        def noted(traffic: Traffic, role: str, *, intra: int, inter: int) -> None:
            self.current = role
            count(traffic, role, intra=intra, inter=inter)

        Traffic.count = noted


def before_each_send(act: Callable[[str], None]) -> None:
    """From now on call ``act`` with the role of a message before this process sends it.

    The receives of its collective are posted by then.
    """
    posted_role = PostedRole()
    send = torch.distributed.isend

    def sending(*args: Any, **kwargs: Any) -> Any:
        act(posted_role.current)
        return send(*args, **kwargs)

    torch.distributed.isend = sending


class DamagedMessage(NamedTuple):
    """A message that arrives with one bit changed. work: its ``irecv``."""

    work: Any
    message: torch.Tensor

    def wait(self) -> None:
        self.work.wait()
        self.message[3] ^= 4


class MessageDamage:
    """Once ``armed``, damages the next message of ``role`` that this rank gets from ``sender``."""

    def __init__(self, role: str, *, sender: int) -> None:
        self.armed = False
        self._role = role
        self._sender = sender
        self._posted_role = PostedRole()
        self._receive = torch.distributed.irecv
        torch.distributed.irecv = self._receive_damaged

    def _receive_damaged(self, message: torch.Tensor, sender: int, **kwargs: Any) -> Any:
        work = self._receive(message, sender, **kwargs)
        is_meant = self._posted_role.current == self._role and sender == self._sender
        if not (self.armed and is_meant):
            return work
        self.armed = False
        return DamagedMessage(work, message)
