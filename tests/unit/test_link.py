"""Links without a process group: what a posted collective keeps alive for the stream it ends on."""

from __future__ import annotations

import types
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch

from ds_quant.comm import lossless_gather
from ds_quant.comm.checksum import MessageErrors, seal
from ds_quant.comm.lossless_gather import LosslessGather
from ds_quant.comm.transport import Pending
from ds_quant.zero.chunked_exchange import ChunkedExchange
from tests.late import LateMessage
from tests.world import World


class DeviceBytes:
    """A CUDA tensor that notes the streams it was recorded on."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self) -> None:
        self.streams: list[str] = []

    def numel(self) -> int:
        return 8

    def record_stream(self, stream: str) -> None:
        self.streams.append(stream)


class Device:
    """The process group of a link and the streams of its device."""

    def __init__(self, monkeypatch) -> None:
        self.now, self.waited = "posting", []
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.now)
        work = types.SimpleNamespace(wait=lambda: self.waited.append(self.now))
        self.communicator = World(1, 2).communicator([0, 1], 0)
        self.communicator.empty = lambda numel, device: DeviceBytes()
        collective = lambda *args, **options: work  # noqa: E731
        self.communicator._dist = types.SimpleNamespace(
            all_gather_into_tensor=collective, all_to_all_single=collective
        )

    def received(self, collective: str, waiting: str) -> tuple[DeviceBytes, DeviceBytes]:
        """Post a collective, wait for it on a stream: what was sent and what has arrived."""
        payload = DeviceBytes()
        pending = self._post(collective, payload)
        self.now = waiting
        return payload, pending.wait()

    def _post(self, collective: str, payload: DeviceBytes) -> Pending[DeviceBytes]:
        if collective == "all_gather":
            return self.communicator.all_gather(payload, role="weights")
        return self.communicator.all_to_all(payload, sent=[4, 4], received=[4, 4], role="weights")


@pytest.mark.parametrize("collective", ("all_gather", "all_to_all"))
def test_buffers_are_kept_for_the_stream_that_waits(collective: str, monkeypatch) -> None:
    device = Device(monkeypatch)
    payload, received = device.received(collective, "waiting")
    assert device.waited == ["waiting"]
    assert payload.streams == received.streams == ["waiting"]


@pytest.mark.parametrize("collective", ("all_gather", "all_to_all"))
def test_messages_between_peers_are_awaited_sent_ones_too(collective: str, monkeypatch) -> None:
    """gloo on the CPU; three ranks that send the same."""
    link, payload, posted = World(1, 3).communicator([0, 1, 2], 1), torch.arange(32).byte(), []
    link.is_gloo = True

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


def test_peers_are_named_by_their_global_rank(monkeypatch) -> None:
    """Of a group of the global ranks 1 and 3: one whose message was changed, one that has died."""
    link = World(4, 1).communicator([1, 3], 0)
    sealed = torch.cat([seal(torch.zeros(32).byte(), [32], sender=r) for r in range(2)])
    sealed[-20] ^= 1
    link._open([32, 32], "weights", sealed)
    found = link.message_errors.first()
    assert (found.role, found.sender) == ("weights", 3)

    def dies(tensor: torch.Tensor, src: int, group: object) -> None:
        raise RuntimeError(f"no connection to {src}")

    monkeypatch.setattr(torch.distributed, "irecv", dies)
    with pytest.raises(RuntimeError, match="rank 3 does not answer.*no connection to 3"):
        link._peer_to_peer([torch.zeros(8)] * 2, [torch.zeros(8)] * 2)


class Room(DeviceBytes):
    """What an outbox has of one message; views are recorded as the whole."""

    def __getitem__(self, _: slice) -> Room:
        return self


def test_messages_of_an_outbox_are_kept_for_the_stream_that_sends_them(monkeypatch) -> None:
    """The first sixteen are sent where they were made, the next when the first has arrived."""
    now = ["optimizer"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[0])
    outbox, rooms = object.__new__(LosslessGather), [Room() for _ in range(18)]
    outbox._made_on, outbox._payloads, outbox._lengths = "optimizer", rooms, np.full((2, 18), 16)
    monkeypatch.setattr(lossless_gather, "decode_lossless", lambda *_, backend: None)
    outbox._communicator = types.SimpleNamespace(
        hop="inter",
        size=2,
        ranks=[0, 1],
        decoding=nullcontext,
        message_errors=MessageErrors(),
        backend="auto",
    )
    arrived = Pending(lambda: torch.zeros(32, dtype=torch.uint8))
    outbox._transport = types.SimpleNamespace(node_size=None, all_gather=lambda *_, role: arrived)
    spread, rows = ChunkedExchange(), lambda: torch.zeros(2, 8)
    spread.begin(((place,), partial(outbox.post, place, rows)) for place in range(18))
    now[0] = "gathers"
    spread.finish([1])
    assert [room.streams for room in rooms] == [[]] * 16 + [["gathers"]] * 2
