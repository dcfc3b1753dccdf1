"""A Chrome trace of one rank: what it does, which messages are on their way, where it waits.

Open the file at https://ui.perfetto.dev or chrome://tracing. A message is drawn from its posting
until its wait has returned; under "waits" is what no work has hidden. On CUDA waits only order
streams: use torch.profiler there, which shows the kernels of NCCL beside those of the model.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ds_quant.comm.transport import Link, Pending

_TRACKS = ("does", "waits")  # lines of the picture, besides the messages


class Timeline:
    """Collects events of what ``span`` and ``messages`` enclose."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._posted = 0
        for place, name in enumerate(_TRACKS):
            self._add("thread_name", "M", tid=place, args={"name": name})

    @contextmanager
    def span(self, name: str, track: str = "does") -> Iterator[None]:
        """The time inside, on the line ``track``."""
        start = _now()
        try:
            yield
        finally:
            self._add(name, "X", ts=start, dur=_now() - start, tid=_TRACKS.index(track))

    @contextmanager
    def messages(self) -> Iterator[None]:
        """Record every message of this process while it is open."""
        posted = Link._posted

        def post(link: Link, payload: Any, received: Any, work: Any) -> Pending[Any]:
            self._posted += 1
            name = f"{link._reach} {payload.numel()} B"
            self._add(name, "b", cat="messages", id=self._posted)
            work = _Traced(self, work, name, self._posted)
            return posted(link, payload, received, work)

        Link._posted = post
        try:
            yield
        finally:
            Link._posted = posted

    def arrived(self, name: str, number: int) -> None:
        self._add(name, "e", cat="messages", id=number)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"traceEvents": self._events}), "utf-8")

    def _add(self, name: str, phase: str, **more: Any) -> None:
        rank = int(os.environ.get("RANK", "0"))
        self._events.append({"name": name, "ph": phase, "pid": rank, "ts": _now(), **more})


class _Traced:
    """A work whose wait is recorded."""

    def __init__(self, timeline: Timeline, work: Any, name: str, number: int) -> None:
        self._timeline, self._work, self._name, self._number = timeline, work, name, number

    def wait(self) -> None:
        with self._timeline.span(self._name, "waits"):
            self._work.wait()
        self._timeline.arrived(self._name, self._number)


def _now() -> float:
    """Microseconds, as Chrome wants them."""
    return time.perf_counter() * 1e6
