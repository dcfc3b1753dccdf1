"""Count what the collectives move, and sample their seconds and errors.

[Note: sampling] Outside a sampled step every method here returns at once: no clock is read, nothing
is decoded, nothing waits for the device.

[Note: sections] A section is charged with its own time, without that of the sections inside it. The
clock must count what was asked of the device, see ``zero.telemetry``. A kernel that decodes, sums
and encodes at once counts as encoding.

[Note: what is read back] Of every role and link ``CHECKED`` bytes of messages per sample, in whole
pieces, at least one piece. The window moves on from sample to sample, so that all parameters have
their turn. Errors stay on the device: nothing is waited for before the sample is over.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

# ---- sampled steps ----


CHECKED = 1 << 22  # bytes, see [Note: what is read back]
SECTIONS = ("encode", "wait", "decode")
_CHECKING = "check"  # reading back what was encoded: charged to no section that is reported

Place = tuple[str, str]  # (role, link), as in Traffic
Note = Callable[..., None]  # told of every piece of a message, as ``Tally.add`` is


@dataclass
class Tally:
    """Elements and bytes encoded for one role and link, and the error of what was read back.

    squares: sums of squared errors and squared norms, (2,) on the device; None if nothing was read
    back. window: where in the messages of a step reading back begins, in bytes.
    """

    window: int = 0
    numel: int = 0
    nbytes: int = 0
    checked: int = 0
    squares: Any = None

    @property
    def bits(self) -> float:
        """Bits on the wire per element, with scales and padding."""
        return 8 * self.nbytes / self.numel

    def add(
        self,
        error: Callable[..., Any],
        values: Any,
        wire: Any,
        *,
        numel: int | None = None,
        **how: Any,
    ) -> None:
        """Count a piece, and read it back if it is its turn.

        error: see ``codec.bound.BoundCodec.error``. values: what was encoded, or makes it, which
        has ``numel`` elements. wire: its bytes, uint8.
        """
        numel = values.numel() if numel is None else numel
        self.numel += numel
        self.nbytes += wire.numel()
        if self.nbytes <= self.window or self.checked >= CHECKED or not numel:
            return
        squares = error(values() if callable(values) else values, wire, **how)
        self.squares = squares if self.squares is None else self.squares + squares
        self.checked += wire.numel()

    def next_window(self) -> int:
        """Move the window for the next sample."""
        end = self.window + CHECKED
        return end if end < self.nbytes else 0


def normalised(error: float, norm: float) -> float:
    """Return squared error over squared norm; for zeros only, 0 if they stay zero."""
    if norm == 0:
        return 0.0 if error == 0 else float("inf")
    return error / norm


@dataclass
class Sample:
    """Measurements of a sampled step so far."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SECTIONS, 0.0))
    tallies: dict[Place, Tally] = field(default_factory=dict)


_OFF = nullcontext()


class Meter:
    """Measures while a sample is open."""

    def __init__(self) -> None:
        self._sample: Sample | None = None
        self._clock: Callable[[], float] = lambda: 0.0
        self._inside = 0.0  # seconds of sections within the current one
        self._windows: dict[Place, int] = {}

    @property
    def is_open(self) -> bool:
        """Whether a step is being sampled."""
        return self._sample is not None

    def open(self, clock: Callable[[], float]) -> None:
        """Start measuring; ``clock`` returns seconds."""
        self._sample, self._clock, self._inside = Sample(), clock, 0.0

    def close(self) -> Sample:
        """Stop measuring and return the sample."""
        sample, self._sample = self._sample, None
        assert sample is not None
        for place, tally in sample.tallies.items():
            self._windows[place] = tally.next_window()
        return sample

    def section(self, name: str) -> AbstractContextManager[Any]:
        """Charge the time inside to ``name``. See [Note: sections]."""
        return _OFF if self._sample is None else self._timed(name)

    def encoding(self, role: str, hop: str) -> AbstractContextManager[Note | None]:
        """Charge the encoding of a message, and read back some of what was noted at its end. None
        while no sample is open.
        """
        return _OFF if self._sample is None else self._checked((role, hop))

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        outer, self._inside = self._inside, 0.0
        start = self._clock()
        try:
            yield
        finally:
            spent = self._clock() - start
            if self._sample is not None:
                seconds = self._sample.seconds
                seconds[name] = seconds.get(name, 0.0) + spent - self._inside
            self._inside = outer + spent

    @contextmanager
    def _checked(self, place: Place) -> Iterator[Note]:
        noted: list[tuple[tuple, dict]] = []
        with self._timed("encode"):
            yield lambda *piece, **how: noted.append((piece, how))
        if self._sample is not None:
            with self._timed(_CHECKING):
                tallies = self._sample.tallies
                if place not in tallies:
                    tallies[place] = Tally(window=self._windows.get(place, 0))
                for piece, how in noted:
                    tallies[place].add(*piece, **how)


# ---- counters of all steps ----

_ROLES = ("weights", "gradients")


@dataclass
class LosslessDifferences:
    """Messages whose length the values decide, of all ranks of a gather: ``numel`` weights in
    ``used`` bytes; ``moved``: bytes including padding to the longest message.
    """

    numel: int = 0
    used: int = 0
    moved: int = 0

    @property
    def bits(self) -> float | None:
        """Bits per weight, without padding between messages; None before the first one."""
        return 8 * self.used / self.numel if self.numel else None

    @property
    def padding(self) -> float | None:
        """Padding between messages, as a share of what they use."""
        return self.moved / self.used - 1 if self.used else None


@dataclass
class Traffic:
    """Bytes this rank received and messages it posted, since the engine was built.

    ``received[role][link]`` is in bytes; role is ``weights`` or ``gradients``, link is ``intra``
    (from ranks of the same node) or ``inter`` (from other nodes). A rank's own payload never
    crosses a link and is not counted. ``collectives[role]`` counts collectives issued.
    ``meter`` measures the same collectives in sampled steps, ``lossless`` counts the bits and the
    padding of lossless differences.
    """

    received: dict[str, dict[str, int]] = field(
        default_factory=lambda: {role: {"intra": 0, "inter": 0} for role in _ROLES}
    )
    collectives: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_ROLES, 0))
    meter: Meter = field(default_factory=Meter)
    lossless: LosslessDifferences = field(default_factory=LosslessDifferences)

    def count(self, role: str, *, intra: int, inter: int) -> None:
        """Add one collective that brought ``intra`` + ``inter`` bytes to this rank."""
        self.received[role]["intra"] += intra
        self.received[role]["inter"] += inter
        self.collectives[role] += 1
