"""Counters of the bytes that collectives receive, and samples of their time and error.

sample   the measurements of one sampled step
section  a part of the step that is timed: encode, wait or decode
tally    the encoded bytes and the error of one role and link in a sample
traffic  counters of all steps

[Note: sampling] Outside a sampled step every method here returns at once: no clock is read, nothing
is decoded, nothing waits for the device.

[Note: sections] Times are exclusive of nested sections. The clock must synchronize the device, see
``runtime.telemetry``. A kernel that decodes, sums and encodes at once counts as encoding.

[Note: read back] To measure the error, ``CHECKED`` bytes of messages per role, link and sample are
decoded again, in whole pieces, at least one piece. The window of these bytes moves from sample to
sample, so all parameters are measured in turn. Errors stay on the device until the sample is over.

Only types are imported from torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

# ---- sampled steps ----


CHECKED = 1 << 22  # bytes, see [Note: read back]
SECTIONS = ("encode", "wait", "decode")
_CHECKING = "check"  # reading back: a section that is not reported

RoleAndLink = tuple[str, str]  # as in Traffic
Note = Callable[..., None]  # called with the arguments of ``Tally.add`` for each piece of a message


@dataclass
class Tally:
    """Elements and bytes encoded for one role and link, and the error of those read back.

    window: first byte in the messages of a step that is read back.
    checked: bytes read back.
    squares: sums of squared errors and squared norms, (2,) on the device; None if nothing was read
        back.
    """

    window: int = 0
    numel: int = 0
    nbytes: int = 0
    checked: int = 0
    squares: Tensor | None = None

    @property
    def bits(self) -> float:
        """Bits on the wire per element, with scales and padding."""
        return 8 * self.nbytes / self.numel

    def add(
        self,
        error: Callable[..., Tensor],
        values: Tensor | Callable[[], Tensor],
        wire: Tensor,
        *,
        numel: int | None = None,
        **error_options: Any,
    ) -> None:
        """Count a piece of a message, and read it back if the window has reached it.

        error: see ``codec.bound.BoundCodec.error``; called with the other options.
        values: the encoded values, or a function that returns them; then ``numel`` is given.
        wire: their bytes, uint8.
        """
        if numel is None:
            assert not callable(values)
            numel = values.numel()
        self.numel += numel
        self.nbytes += wire.numel()
        if self.nbytes <= self.window or self.checked >= CHECKED or not numel:
            return
        squares = error(values() if callable(values) else values, wire, **error_options)
        self.squares = squares if self.squares is None else self.squares + squares
        self.checked += wire.numel()

    def next_window(self) -> int:
        """Return the window of the next sample."""
        end = self.window + CHECKED
        return end if end < self.nbytes else 0


def normalised(error: float, norm: float) -> float:
    """Return squared error over squared norm; for a norm of 0, 0.0 without an error, else inf."""
    if norm == 0:
        return 0.0 if error == 0 else float("inf")
    return error / norm


@dataclass
class Sample:
    """Measurements of a sampled step so far.

    seconds: by section.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SECTIONS, 0.0))
    tallies: dict[RoleAndLink, Tally] = field(default_factory=dict)


class _Piece(NamedTuple):
    """The arguments of one call of ``Tally.add``."""

    args: tuple[Any, ...]
    options: dict[str, Any]


_OFF = nullcontext()


class Meter:
    """Measures while a sample is open."""

    def __init__(self) -> None:
        self._sample: Sample | None = None
        self._clock: Callable[[], float] = lambda: 0.0
        self._nested_seconds = 0.0  # of sections within the current one
        self._windows: dict[RoleAndLink, int] = {}

    @property
    def is_open(self) -> bool:
        """Return True if a step is being sampled."""
        return self._sample is not None

    def open(self, clock: Callable[[], float]) -> None:
        """Start measuring; ``clock`` returns seconds."""
        self._sample = Sample()
        self._clock = clock
        self._nested_seconds = 0.0

    def close(self) -> Sample:
        """Stop measuring and return the sample."""
        sample = self._sample
        assert sample is not None
        self._sample = None
        for role_and_link, tally in sample.tallies.items():
            self._windows[role_and_link] = tally.next_window()
        return sample

    def section(self, name: str) -> AbstractContextManager[Any]:
        """Add the time inside to the section ``name``. See [Note: sections]."""
        return _OFF if self._sample is None else self._timed(name)

    def encoding(self, role: str, hop: str) -> AbstractContextManager[Note | None]:
        """Time the encoding of a message; the context's value notes each piece of the message.

        At the end noted pieces are counted, and some are read back. The value is None while no
        sample is open.
        """
        return _OFF if self._sample is None else self._checked((role, hop))

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Time a section. Called while a sample is open; adds nothing if it was closed inside."""
        outer_nested_seconds = self._nested_seconds
        self._nested_seconds = 0.0
        start = self._clock()
        try:
            yield
        finally:
            elapsed = self._clock() - start
            if self._sample is not None:
                seconds = self._sample.seconds
                seconds[name] = seconds.get(name, 0.0) + elapsed - self._nested_seconds
            self._nested_seconds = outer_nested_seconds + elapsed

    @contextmanager
    def _checked(self, role_and_link: RoleAndLink) -> Iterator[Note]:
        pieces: list[_Piece] = []
        with self._timed("encode"):
            yield lambda *args, **options: pieces.append(_Piece(args, options))
        if self._sample is None:
            return
        with self._timed(_CHECKING):
            tally = self._sample.tallies.get(role_and_link)
            if tally is None:
                tally = Tally(window=self._windows.get(role_and_link, 0))
                self._sample.tallies[role_and_link] = tally
            for piece in pieces:
                tally.add(*piece.args, **piece.options)


# ---- counters of all steps ----

_ROLES = ("weights", "gradients")
_LINKS = ("intra", "inter")


@dataclass
class LosslessDifferences:
    """Counters of lossless messages, whose length depends on the values.

    Of all ranks of a gather:
    numel: weights. used: bytes of their messages. moved: bytes with the padding of each message to
        the longest of any rank.

    Of quantized steps, by link as in ``Traffic``:
    received_numel: weights that this rank received. received: bytes of them, with padding and the
        lengths of the messages.
    """

    numel: int = 0
    used: int = 0
    moved: int = 0
    received_numel: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_LINKS, 0))
    received: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_LINKS, 0))

    @property
    def bits(self) -> float | None:
        """Bits per weight, without padding; None before the first message."""
        return 8 * self.used / self.numel if self.numel else None

    @property
    def padding(self) -> float | None:
        """Padding, as a share of the used bytes; None before the first message."""
        return self.moved / self.used - 1 if self.used else None


def _no_bytes() -> dict[str, dict[str, int]]:
    return {role: dict.fromkeys(_LINKS, 0) for role in _ROLES}


@dataclass
class Traffic:
    """Bytes that this rank received and collectives that it posted, since the engine was built.

    received: bytes by role (``weights`` or ``gradients``) and link: ``intra`` from ranks of the
        same node, ``inter`` from other nodes. A rank's own payload is not counted.
    exact: the part of ``received`` that came while ``is_exact``, or else saved nothing.
    is_exact: True while everything is sent in full precision.
    added: the part that a run in full precision would not receive.
    collectives: collectives posted, by role.
    meter: measures the same collectives in sampled steps.
    lossless: bits and padding of lossless differences.
    whole: counts these bytes and collectives, too, among others.
    """

    received: dict[str, dict[str, int]] = field(default_factory=_no_bytes)
    exact: dict[str, dict[str, int]] = field(default_factory=_no_bytes)
    is_exact: bool = False
    added: dict[str, dict[str, int]] = field(default_factory=_no_bytes)
    collectives: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_ROLES, 0))
    meter: Meter = field(default_factory=Meter)
    lossless: LosslessDifferences = field(default_factory=LosslessDifferences)
    whole: Traffic | None = None

    def part(self) -> Traffic:
        """Return counters of some of the collectives, which these count, too."""
        return Traffic(meter=self.meter, lossless=self.lossless, whole=self)

    def count(self, role: str, *, intra: int, inter: int, saves_nothing: bool = False) -> None:
        """Count one collective in which this rank received ``intra`` + ``inter`` bytes.

        saves_nothing: the collective is the same in full precision.
        """
        self.received[role]["intra"] += intra
        self.received[role]["inter"] += inter
        self.collectives[role] += 1
        whole = self.whole
        if whole is not None:
            whole.received[role]["intra"] += intra
            whole.received[role]["inter"] += inter
            whole.collectives[role] += 1
        total = self if whole is None else whole
        if total.is_exact or saves_nothing:
            total.exact[role]["intra"] += intra
            total.exact[role]["inter"] += inter

    def count_lossless(self, counted: LosslessDifferences) -> None:
        """Add the counters of a gather, whose bytes ``count`` counts."""
        lossless = self.lossless
        lossless.numel += counted.numel
        lossless.used += counted.used
        lossless.moved += counted.moved
        total = self if self.whole is None else self.whole
        if total.is_exact:
            return
        for link in _LINKS:
            lossless.received_numel[link] += counted.received_numel[link]
            lossless.received[link] += counted.received[link]

    def quantized(self) -> dict[str, dict[str, float]]:
        """Return the received bytes of quantized messages, by role and link."""
        return {
            role: {
                link: float(nbytes - self.exact[role][link] - self.added[role][link])
                for link, nbytes in links.items()
            }
            for role, links in self.received.items()
        }

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Count the messages inside as ``added``."""
        was_exact = self.is_exact
        self.is_exact = False
        before = {role: dict(links) for role, links in self.received.items()}
        try:
            yield
        finally:
            self.is_exact = was_exact
            for role, links in self.received.items():
                for link, nbytes in links.items():
                    self.added[role][link] += nbytes - before[role][link]
