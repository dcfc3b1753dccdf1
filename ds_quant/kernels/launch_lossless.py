"""Launches of the CUDA kernels of LosslessCodec: signatures and bytes of lossless.py.

Nothing is collected for shared launches: a message is three launches that read what the one before
wrote, and a decoded one is checked before anybody uses it.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from ds_quant.kernels.launch import DTYPES, Plan, Runner, aligned
from ds_quant.kernels.lossless import HEADER, PROBLEMS, blocks_of, error

THREADS = 256
PLAN, SCAN, WRITE, READ = range(4)  # DSQ_PHASE


def encode(
    values: torch.Tensor,  # (numel,) bf16 or fp16
    reference: torch.Tensor,  # (numel,) of the same dtype
    out: torch.Tensor,  # (max_bytes(numel),) uint8
    nbytes: torch.Tensor,  # (1,) int64, receives the bytes used
    *,
    run: Runner,
) -> None:
    """Write a message."""
    if values.numel() == 0:
        nbytes.zero_()
        return
    target = aligned(out, copy=False)
    target[:HEADER].zero_()  # the checksum is added up there
    fields = _fields(values, reference, target) | {"nbytes": nbytes.data_ptr()}
    for phase in (PLAN, SCAN, WRITE):
        plan = plan_of(phase, values.numel(), values.dtype)
        run(plan.launch(1, fields, values, reference, target, nbytes, at_once=True))
    if target is not out:
        out.copy_(target)


def decode(
    wire: torch.Tensor,  # (bytes used,) uint8
    reference: torch.Tensor,  # (numel,) bf16 or fp16
    out: torch.Tensor,  # (numel,) of the same dtype; may be the reference
    *,
    run: Runner,
    status: torch.Tensor | None = None,  # (2,) int32 zeros
) -> None:
    """Overwrite `out` with the values. ValueError for a message that cannot be: waits for the
    device, unless `status` is there to receive what ``check`` takes.
    """
    used, numel = wire.numel(), out.numel()
    if used % 16 or (used < HEADER if numel else used):
        raise error("length")
    if numel == 0:
        return
    wire = aligned(wire, copy=True)
    found = torch.zeros(2, dtype=torch.int32, device=wire.device) if status is None else status
    fields = _fields(out, reference, wire) | {"nbytes": used, "status": found.data_ptr()}
    plan = plan_of(READ, numel, out.dtype)
    run(plan.launch(1, fields, out, reference, wire, found, at_once=True))
    if status is None:
        check(*found.tolist())


def check(problem: int, difference: int) -> None:
    """ValueError for what ``decode`` has found."""
    if problem:
        raise error(PROBLEMS[problem - 1])
    if difference:
        raise error("checksum")


def _fields(values: torch.Tensor, reference: torch.Tensor, wire: torch.Tensor) -> dict[str, int]:
    tensors = {"values": values, "reference": reference, "wire": wire}
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


@lru_cache(maxsize=4096)
def plan_of(phase: int, numel: int, dtype: torch.dtype) -> Plan:
    """What all launches of a phase on so many elements have in common."""
    macros = {"DSQ_PHASE": phase, "DSQ_VALUES": DTYPES[dtype]}
    blocks = 1 if phase == SCAN else blocks_of(numel)
    return Plan("lossless", macros, blocks=blocks, threads=THREADS, fields={"numel": numel})
