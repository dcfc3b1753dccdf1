"""How fast the codecs of a scheme work on a device, measured in a few milliseconds each.

May import torch, clock, codec, coding, rng, rotation, scheme.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from ds_quant.clock import device_clock
from ds_quant.codec import CastCodec, Codec
from ds_quant.coding import Coding
from ds_quant.rng import Address
from ds_quant.rotation import Rotation
from ds_quant.scheme import Scheme

NUMEL_CPU, NUMEL_GPU = 1 << 18, 1 << 22  # a GPU needs more to be busy at all
REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Seconds per element."""

    encode: float
    decode: float


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Of every codec of a scheme; where it has none, of the cast to the dtype that travels."""

    weights: Speed
    weights_intra: Speed
    gradients: Speed
    gradients_intra: Speed


def speeds_of(
    scheme: Scheme, *, weights: torch.dtype, gradients: torch.dtype, device: torch.device
) -> Speeds:
    """Measure the codecs of a scheme; ``weights`` and ``gradients`` are what is encoded."""
    rotation = Rotation(block=scheme.rotation) if scheme.rotation else None
    inner = scheme.gradients_intra or scheme.gradients
    return Speeds(
        weights=_weights(scheme.weights, weights, device, difference=scheme.difference),
        weights_intra=_weights(scheme.weights_intra, weights, device),
        gradients=_gradients(scheme.gradients, gradients, device, rotation),
        gradients_intra=_gradients(inner, gradients, device, rotation),
    )


def _weights(
    codec: Codec | None, dtype: torch.dtype, device: torch.device, *, difference: bool = False
) -> Speed:
    if codec is None:
        codec, difference = CastCodec(dtype), False
    coding = Coding(codec=codec, address=Address(key=0, step=0), difference=difference)
    values = _values(dtype, device)
    held = torch.zeros_like(values)
    wire = torch.empty(codec.wire_bytes(held.numel()), dtype=torch.uint8, device=device)
    return Speed(
        encode=_per_element(values, lambda: coding.encode(values, wire, held=held)),
        decode=_per_element(values, lambda: coding.decode(wire, held)),
    )


def _gradients(
    codec: Codec | None, dtype: torch.dtype, device: torch.device, rotation: Rotation | None
) -> Speed:
    if codec is None:
        codec, rotation = CastCodec(dtype), None
    coding = Coding(codec=codec, address=Address(key=0, step=0))
    values = _values(dtype, device)
    total = torch.empty_like(values, dtype=torch.float32)
    wire = torch.empty(codec.wire_bytes(total.numel()), dtype=torch.uint8, device=device)
    row, how = wire.view(1, -1), {"rotation": rotation}
    return Speed(
        encode=_per_element(values, lambda: coding.encode(values, wire, **how)),
        decode=_per_element(values, lambda: coding.decode_sum(row, total, own=None, **how)),
    )


def _per_element(values: torch.Tensor, operation: Callable[[], None]) -> float:
    """Median seconds of an operation on values; the first run compiles kernels, uncounted."""
    clock, seconds = device_clock(values.device), []
    for _ in range(REPEATS + 1):
        start = clock()
        operation()
        seconds.append(clock() - start)
    return median(seconds[1:]) / values.numel()


def _values(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Not random: drawing would change the random numbers that the user's program draws."""
    numel = NUMEL_CPU if device.type == "cpu" else NUMEL_GPU
    return torch.linspace(-1, 1, numel, device=device).to(dtype)
