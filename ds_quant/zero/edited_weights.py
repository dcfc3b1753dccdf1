"""Find the parameters that user code has written since the last gather of ZeRO-1 and 2.

[Note: edited weights] An export leaves such a parameter as user code wrote it, as DeepSpeed does
without this plugin; the next step overwrites it. Torch does not record a write to
``parameter.data``. So after every gather 64 elements of each parameter are copied, spread evenly,
and the next export compares them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

_SAMPLE = 64  # elements of a parameter


class _SampledBuffer(NamedTuple):
    """A flat buffer, its parameters, and the offsets of their sampled elements.

    offsets: (parameters, _SAMPLE) int64.
    """

    flat: Tensor
    params: list[Tensor]
    offsets: Tensor

    def sample(self) -> Tensor:
        """Return (parameters, _SAMPLE) values."""
        return self.flat[self.offsets]


class EditDetector:
    """Samples of the parameters in flat buffers, see [Note: edited weights]."""

    def __init__(self, flats: Iterable[tuple[Tensor, list[tuple[Tensor, int]]]]) -> None:
        """flats: flat buffers, each with its parameters and the offset of each in the buffer."""
        self._buffers: list[_SampledBuffer] = []
        self._taken: list[Tensor] = []  # samples by buffer
        spread = torch.linspace(0, 1, _SAMPLE, dtype=torch.float64)
        for flat, params in flats:
            sampled = [(p, begin) for p, begin in params if p.numel()]
            offsets = [begin + (spread * (p.numel() - 1)).long() for p, begin in sampled]
            self._buffers.append(
                _SampledBuffer(
                    flat=flat,
                    params=[p for p, _ in sampled],
                    offsets=torch.stack(offsets).to(flat.device),
                )
            )

    def take(self) -> None:
        """Sample the current values, with one kernel per buffer."""
        self._taken = [buffer.sample() for buffer in self._buffers]

    def forget(self) -> None:
        """Drop the samples: no parameter counts as edited until the next ``take``."""
        self._taken = []

    def edited_params(self) -> list[Tensor]:
        """Return the parameters whose sample differs in any bit from the last one taken."""
        if not self._taken:
            return []
        edited: list[Tensor] = []
        for buffer, taken in zip(self._buffers, self._taken, strict=True):
            differs = (buffer.sample().view(torch.uint8) != taken.view(torch.uint8)).any(1)
            edited += [buffer.params[i] for i in differs.nonzero().view(-1).tolist()]
        return edited
