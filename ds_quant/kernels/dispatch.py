"""Which kernels work on a tensor: CUDA kernels on CUDA tensors, the torch reference elsewhere.

The reference also serves codecs that the kernels do not cover, and CUDA tensors without a working
CuPy, which is reported once. Same signatures and same bytes either way.
May import torch, rng and its sister modules.
"""

from __future__ import annotations

import logging
from functools import cache

import torch

from ds_quant import rng
from ds_quant.kernels import cuda, launch, reference
from ds_quant.kernels.arguments import Own
from ds_quant.kernels.blocks import Format
from ds_quant.kernels.geometry import MAX_GROUP

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "torch")

_backend = "auto"


def use(backend: str) -> None:
    """Choose for this process: "auto" goes by the tensor's device, "torch" is the reference."""
    global _backend
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r}: allowed are {', '.join(map(repr, BACKENDS))}")
    _backend = backend


def runner_for(fmt: Format, device: torch.device) -> launch.Runner | None:
    """What launches kernels for a codec on a device; None where the reference works."""
    if device.type != "cuda" or _backend == "torch":
        return None
    if not launch.supports(fmt):
        _report_large_groups(fmt.group_size)
        return None
    return cuda.runner_of(device)


@cache
def _report_large_groups(group_size: int) -> None:
    logger.warning(
        "ds_quant: group_size = %d takes the slower torch path, CUDA kernels go up to %d",
        group_size,
        MAX_GROUP,
    )


def encode(
    x: torch.Tensor,  # (rows, numel) floating point
    out: torch.Tensor,  # (rows, nbytes) uint8
    fmt: Format,
    *,
    address: rng.Address | None,
    levels: torch.Tensor | None,  # (2^bits,) fp32, learned levels only
) -> None:
    """Write the wire bytes of every row, padding included."""
    run = runner_for(fmt, x.device)
    if run is None:
        reference.encode(x, out, fmt, address=address, levels=levels)
    else:
        launch.encode(x, out, fmt, address=address, levels=levels, run=run)


def decode(
    wire: torch.Tensor,  # (rows, nbytes) uint8
    out: torch.Tensor,  # (rows, numel) floating point
    fmt: Format,
    *,
    levels: torch.Tensor | None,  # (2^bits,) fp32, learned levels only
) -> None:
    """Decode every row and cast once to the dtype of `out`."""
    run = runner_for(fmt, wire.device)
    if run is None:
        reference.decode(wire, out, fmt, levels=levels)
    else:
        launch.decode(wire, out, fmt, levels=levels, run=run)


def decode_sum(
    wire: torch.Tensor,  # (rows, nbytes) uint8
    out: torch.Tensor,  # (numel,) fp32
    fmt: Format,
    *,
    scale: float,
    own: tuple[int, torch.Tensor] | None,  # a row and its values, (numel,) floating point
    levels: torch.Tensor | None,  # (2^bits,) fp32, learned levels only
) -> None:
    """out = scale * (row 0 + row 1 + ...), fp32 sums in row order, multiplied once at the end."""
    run = runner_for(fmt, wire.device)
    if run is None:
        reference.decode_sum(wire, out, fmt, scale=scale, own=own, levels=levels)
        return
    replaced = None if own is None else Own(*own)
    launch.decode_sum(wire, out, fmt, scale=scale, own=replaced, levels=levels, run=run)


def recode(
    wire: torch.Tensor,  # (sources, nbytes of source) uint8
    out: torch.Tensor,  # (nbytes of fmt,) uint8
    source: Format,
    fmt: Format,
    *,
    numel: int,
    own: tuple[int, torch.Tensor] | None,  # a source and its values, (numel,) floating point
    address: rng.Address | None,
    source_levels: torch.Tensor | None,  # learned levels only
    levels: torch.Tensor | None,
) -> None:
    """Decode, add up in fp32 in order and encode the sum, as one operation.

    On CUDA one kernel, whose sums never leave the registers.
    """
    runs = runner_for(source, wire.device), runner_for(fmt, wire.device)
    if None in runs:
        total = torch.empty(numel, dtype=torch.float32, device=wire.device)
        decode_sum(wire, total, source, scale=1.0, own=own, levels=source_levels)
        encode(total.view(1, -1), out.view(1, -1), fmt, address=address, levels=levels)
        return
    replaced = None if own is None else Own(*own)
    launch.recode(
        wire.unsqueeze(0), out.view(1, -1), source, fmt, numel=numel, address=address,
        run=runs[1], source_levels=source_levels, levels=levels, own=replaced,
    )  # fmt: skip
