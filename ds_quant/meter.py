"""Seconds and errors of the messages of a sampled step.

[Note: sampling] Outside a sampled step every method here returns at once: no clock is read, nothing
is decoded, nothing waits for the device.

[Note: sections] A section is charged with its own time, without that of the sections inside it. The
clock must count what was asked of the device, see ``zero.telemetry``. A kernel that decodes, sums
and encodes at once counts as encoding.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

SECTIONS = ("encode", "wait", "decode")
_CHECKING = "check"  # reading back what was encoded: charged to no section that is reported

Place = tuple[str, str]  # (role, link), as in Traffic


class Measures(Protocol):
    """What ``coding.Coding`` offers."""

    def error(self, values: Any, wire: Any, **how: Any) -> tuple[float, float]:
        """Squared error and squared norm of values on the wire."""


@dataclass
class Tally:
    """What was encoded for one role and link: squared error, squared norm, elements, bytes."""

    error: float = 0.0
    norm: float = 0.0
    numel: int = 0
    nbytes: int = 0

    @property
    def normalised_error(self) -> float:
        """Squared error over squared norm; of zeros only, 0 if they stay zero."""
        if self.norm == 0:
            return 0.0 if self.error == 0 else float("inf")
        return self.error / self.norm

    @property
    def bits(self) -> float:
        """Bits on the wire per element, with scales and padding."""
        return 8 * self.nbytes / self.numel


@dataclass
class Sample:
    """What a sampled step has shown so far."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SECTIONS, 0.0))
    tallies: dict[Place, Tally] = field(default_factory=dict)


class Notes:
    """The tensors of one message while it is encoded."""

    are_read = True

    def __init__(self) -> None:
        self._noted: list[tuple[Measures, Any, Any, dict[str, Any]]] = []

    def note(self, coding: Measures, values: Any, wire: Any, **how: Any) -> None:
        """``values``, or a function that makes them, was encoded into ``wire`` (uint8)."""
        self._noted.append((coding, values, wire, how))

    def add_to(self, tally: Tally) -> None:
        """Read everything back."""
        for coding, values, wire, how in self._noted:
            values = values() if callable(values) else values
            error, norm = coding.error(values, wire, **how)
            tally.error += error
            tally.norm += norm
            tally.numel += values.numel()
            tally.nbytes += wire.numel()


class _NoNotes(Notes):
    """Between samples."""

    are_read = False

    def note(self, coding: Measures, values: Any, wire: Any, **how: Any) -> None:
        pass


_OFF = nullcontext(_NoNotes())


class Meter:
    """Measures while a sample is open."""

    def __init__(self) -> None:
        self._sample: Sample | None = None
        self._clock: Callable[[], float] = lambda: 0.0
        self._inside = 0.0  # seconds of sections within the current one

    @property
    def is_open(self) -> bool:
        """Whether a step is being sampled."""
        return self._sample is not None

    def open(self, clock: Callable[[], float]) -> None:
        """Measure from now on; ``clock`` gives seconds."""
        self._sample, self._clock, self._inside = Sample(), clock, 0.0

    def close(self) -> Sample:
        """What was measured since ``open``."""
        sample, self._sample = self._sample, None
        assert sample is not None
        return sample

    def section(self, name: str) -> AbstractContextManager[Any]:
        """Around what counts as ``name``. See [Note: sections]."""
        return _OFF if self._sample is None else self._timed(name)

    def encoding(self, role: str, link: str) -> AbstractContextManager[Notes]:
        """Around the encoding of a message; what is noted is read back when it is over.

        It must enclose ``together()``, whose block writes nothing before its end.
        """
        return _OFF if self._sample is None else self._checked((role, link))

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
    def _checked(self, place: Place) -> Iterator[Notes]:
        notes = Notes()
        with self._timed("encode"):
            yield notes
        if self._sample is not None:
            with self._timed(_CHECKING):
                notes.add_to(self._sample.tallies.setdefault(place, Tally()))
