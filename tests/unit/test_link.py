"""Links without a process group: what a posted collective keeps alive for the stream it ends on."""

from __future__ import annotations

import types
from contextlib import nullcontext

import pytest
import torch

from ds_quant.comm.transport import Link, Pending


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
        self.link = object.__new__(Link)
        self.link._findings, self.link._gloo, self.link.process_group = None, False, None
        self.link.size, self.link.rank, self.link._near, self.link._far = 2, 0, [], [1]
        self.link.empty = lambda numel, device: DeviceBytes()
        meter = types.SimpleNamespace(section=lambda name: nullcontext())
        count = lambda role, intra, inter: None  # noqa: E731
        self.link._traffic = types.SimpleNamespace(meter=meter, count=count)
        collective = lambda *args, **options: work  # noqa: E731
        self.link._dist = types.SimpleNamespace(
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
            return self.link.all_gather(payload, role="weights")
        return self.link.all_to_all(payload, sent=[4, 4], received=[4, 4], role="weights")


@pytest.mark.parametrize("collective", ("all_gather", "all_to_all"))
def test_buffers_are_kept_for_the_stream_that_waits(collective: str, monkeypatch) -> None:
    device = Device(monkeypatch)
    payload, received = device.received(collective, "waiting")
    assert device.waited == ["waiting"]
    assert payload.streams == received.streams == ["waiting"]


@pytest.mark.parametrize("collective", ("all_gather", "all_to_all"))
def test_on_the_posting_stream_nothing_is_recorded(collective: str, monkeypatch) -> None:
    payload, received = Device(monkeypatch).received(collective, "posting")
    assert payload.streams == received.streams == []
