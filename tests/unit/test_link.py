"""Communicators without their other ranks: memory that is kept for a stream, messages that are
awaited, ranks that an error names.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from ds_quant.comm import lossless_gather
from ds_quant.comm.checksum import MessageErrors, seal
from ds_quant.comm.lossless_gather import LosslessGather
from ds_quant.comm.topology import Topology
from ds_quant.comm.traffic import Traffic
from ds_quant.comm.transport import Communicator, Pending
from ds_quant.zero.chunked_exchange import ChunkedExchange
from tests.late import LateMessage


class ProcessGroup:
    """A process group of torch with one backend, such as "gloo"."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def _get_backend(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(name=lambda: self._backend)


def communicator_of(
    ranks: Sequence[int],
    *,
    index: int,
    backend: str = "gloo",
    sealed: bool = False,
    buffers: Any = None,
    collective: Any = None,
) -> Communicator:
    """Return the communicator of one rank of a group that has no other member in this process.

    ranks: global ranks of the group. index: of this rank in it.
    collective: takes the place of both collectives of torch.
    """
    collectives = SimpleNamespace(
        get_world_size=lambda group: len(ranks),
        get_rank=lambda group: index,
        get_global_rank=lambda group, rank: ranks[rank],
        all_gather_into_tensor=collective,
        all_to_all_single=collective,
    )
    return Communicator(
        ProcessGroup(backend),
        topology=Topology(world=4, node_size=4),
        traffic=Traffic(),
        sealed=sealed,
        buffers=buffers,
        dist=collectives,
    )


# ---- buffers on a device ----


class DeviceBytes:
    """A CUDA tensor that notes the streams it was recorded on."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self) -> None:
        self.streams: list[str] = []

    def numel(self) -> int:
        return 8

    def record_stream(self, stream: str) -> None:
        self.streams.append(stream)


def post(communicator: Communicator, collective: str, payload: Any) -> Pending[Any]:
    """Post a collective of two ranks that send four bytes to each."""
    if collective == "all_gather":
        return communicator.all_gather(payload, role="weights")
    return communicator.all_to_all(payload, sent=[4, 4], received=[4, 4], role="weights")


@pytest.mark.parametrize("collective", ("all_gather", "all_to_all"))
def test_buffers_are_kept_for_the_stream_that_waits(collective: str, monkeypatch) -> None:
    current, waited_on = ["posting"], []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    work = SimpleNamespace(wait=lambda: waited_on.append(current[0]))
    communicator = communicator_of(
        [0, 1],
        index=0,
        backend="nccl",
        buffers=SimpleNamespace(empty=lambda numel, device: DeviceBytes()),
        collective=lambda *args, **options: work,
    )
    payload = DeviceBytes()
    pending = post(communicator, collective, payload)
    current[0] = "waiting"
    received = pending.wait()
    assert waited_on == ["waiting"]
    assert payload.streams == ["waiting"]
    assert received.streams == ["waiting"]


# ---- messages between peers ----


@pytest.mark.parametrize("collective", ("all_gather", "all_to_all"))
def test_messages_between_peers_are_awaited_sent_ones_too(collective: str, monkeypatch) -> None:
    """gloo on the CPU; three ranks that send the same."""
    link, payload, posted = communicator_of([0, 1, 2], index=1), torch.arange(32).byte(), []

    def receive(message: torch.Tensor, peer: int, *, group: object) -> LateMessage:
        posted.append(LateMessage(partial(message.copy_, payload), payload, message))
        return posted[-1]

    def send(message: torch.Tensor, peer: int, *, group: object) -> LateMessage:
        posted.append(LateMessage(lambda: None, message, None))
        return posted[-1]

    monkeypatch.setattr(torch.distributed, "irecv", receive)
    monkeypatch.setattr(torch.distributed, "isend", send)
    if collective == "all_gather":
        pending = link.all_gather(payload, role="weights")
    else:
        sizes = {"sent": [32] * 3, "received": [32] * 3}
        pending = link.all_to_all(payload.repeat(3), **sizes, role="weights")
    assert len(posted) == 4 and not any(message.is_done for message in posted)
    assert torch.equal(pending.wait(), payload.repeat(3))
    assert all(message.is_done for message in posted)


def test_the_sender_of_a_changed_message_is_named_by_its_global_rank(monkeypatch) -> None:
    link = communicator_of([1, 3], index=0, sealed=True)
    payload = torch.zeros(32, dtype=torch.uint8)
    changed = seal(payload, [32], sender=1)
    changed[5] ^= 1

    def receive(message: torch.Tensor, peer: int, *, group: object) -> LateMessage:
        return LateMessage(partial(message.copy_, changed), changed, message)

    monkeypatch.setattr(torch.distributed, "irecv", receive)
    monkeypatch.setattr(torch.distributed, "isend", lambda *_, group: Mock())
    link.all_gather(payload, role="weights").wait()
    error = link.message_errors.first()
    assert error is not None, "the change was not noticed"
    assert (error.role, error.sender) == ("weights", 3)


def test_a_peer_that_has_died_is_named_by_its_global_rank(monkeypatch) -> None:
    link = communicator_of([1, 3], index=0)

    def dies(message: torch.Tensor, peer: int, *, group: object) -> None:
        raise RuntimeError(f"no connection to {peer}")

    monkeypatch.setattr(torch.distributed, "irecv", dies)
    with pytest.raises(RuntimeError, match="rank 3 does not answer.*no connection to 3"):
        link.all_gather(torch.zeros(8, dtype=torch.uint8), role="weights")


# ---- lossless messages ----


class Room(DeviceBytes):
    """The memory of one message in an outbox; views are recorded as the whole."""

    def __getitem__(self, _: slice) -> Room:
        return self


def test_messages_of_an_outbox_are_kept_for_the_stream_that_sends_them(monkeypatch) -> None:
    """The first sixteen are sent where they were made, the next when the first has arrived."""
    now = ["optimizer"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[0])
    outbox, rooms = object.__new__(LosslessGather), [Room() for _ in range(18)]
    outbox._made_on, outbox._payloads, outbox._lengths = "optimizer", rooms, np.full((2, 18), 16)
    monkeypatch.setattr(lossless_gather, "decode_lossless", lambda *_, backend: None)
    outbox._communicator = SimpleNamespace(
        hop="inter",
        size=2,
        ranks=[0, 1],
        decoding=nullcontext,
        message_errors=MessageErrors(),
        backend="auto",
    )
    arrived = Pending(lambda: torch.zeros(32, dtype=torch.uint8))
    outbox._transport = SimpleNamespace(node_size=None, all_gather=lambda *_, role: arrived)
    spread, rows = ChunkedExchange(), lambda: torch.zeros(2, 8)
    spread.begin(((place,), partial(outbox.post, place, rows)) for place in range(18))
    now[0] = "gathers"
    spread.finish([1])
    assert [room.streams for room in rooms] == [[]] * 16 + [["gathers"]] * 2
