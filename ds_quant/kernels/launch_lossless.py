"""Launches of the CUDA kernels of LosslessCodec: signatures and bytes of lossless.py.

Messages are three launches that read what the one before wrote; decoded ones are checked before
anybody uses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from ds_quant.kernels.launch import DTYPES, FIELDS, Plan, Table, merge
from ds_quant.kernels.launch_batch import RunTables
from ds_quant.kernels.lossless import HEADER, PROBLEMS, Damaged, blocks_of
from ds_quant.kernels.wire import ALIGNMENT

THREADS = 256
PLAN, SCAN, WRITE, READ = range(4)  # DSQ_PHASE
LENGTH, CHECKSUM = (PROBLEMS.index(what) + 1 for what in ("length", "checksum"))
Task = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # see ``dispatch.encode_lossless``
_FIELDS = np.dtype([(name, "<u8") for name in FIELDS["lossless"]])


def encode(messages: Sequence[Task], nbytes: torch.Tensor, *, run_tables: RunTables) -> None:
    """Write messages of values of one dtype; nbytes, (messages,) int64, receives the bytes of each.
    Three launches for all of them.
    """
    nbytes.zero_()  # a checksum is added up there first
    jobs, copied = [], []
    for place, (values, reference, out) in enumerate(messages):
        target = _aligned(out, copy=False)
        copied += [(out, target)] if target is not out else []
        fields = {"values": values.data_ptr(), "reference": reference.data_ptr()}
        fields |= {"wire": target.data_ptr(), "nbytes": nbytes[place].data_ptr()}
        jobs += [(values, fields)] if values.numel() else []
    for phase in (PLAN, SCAN, WRITE):
        plans = [plan_of(phase, values.numel(), values.dtype) for values, _ in jobs]
        run_tables(merge(plan.launch(1, job[1]) for plan, job in zip(plans, jobs, strict=True)))
    for out, target in copied:
        out.copy_(target)


def decode_rows(
    wire: torch.Tensor,  # (bytes,) uint8: the messages, each at a multiple of 16 bytes
    starts: np.ndarray,  # (rows,) int64, first byte of each
    lengths: np.ndarray,  # (rows,) int64, its bytes
    reference: torch.Tensor,  # (rows, numel) bf16 or fp16
    out: torch.Tensor,  # (rows, numel) of the same dtype; may be the reference
    *,
    run_tables: RunTables,
    status: torch.Tensor | None = None,  # (rows, 2) int32, zeros
) -> None:
    """Decode a message into every row of `out`, in one launch. What is wrong with a row goes into
    its `status`; without one Damaged tells, which waits for the device.
    """
    rows, numel = out.shape
    wrong = (lengths % ALIGNMENT != 0) | (lengths < HEADER if numel else lengths > 0)
    _check(wrong * LENGTH)
    if not numel:
        return
    wire, waits = _aligned(wire, copy=True), status is None
    if status is None:
        status = torch.zeros(rows, 2, dtype=torch.int32, device=wire.device)
    jobs = np.zeros(rows, dtype=_FIELDS)
    for name, tensor in (("values", out), ("reference", reference), ("status", status)):
        nbytes = np.uint64(tensor.stride(0) * tensor.element_size())
        jobs[name] = tensor.data_ptr() + np.arange(rows, dtype=np.uint64) * nbytes
    jobs["wire"] = wire.data_ptr() + starts.astype(np.uint64)
    jobs["nbytes"], jobs["numel"] = lengths, numel
    run_tables([_table(jobs, plan_of(READ, numel, out.dtype))])
    if waits:
        problem, difference = status.cpu().numpy().T
        _check(np.where(problem, problem, (difference != 0) * CHECKSUM))


def _aligned(wire: torch.Tensor, *, copy: bool) -> torch.Tensor:
    """`wire`, or a buffer of its size at a multiple of 16 bytes; `copy`: with the same content."""
    if wire.data_ptr() % ALIGNMENT == 0:
        return wire
    return wire.clone() if copy else torch.empty_like(wire)


def _check(problems: np.ndarray) -> None:
    """Raise for the first row that has one, by its number."""
    wrong = problems.nonzero()[0]
    if wrong.size:
        raise Damaged(PROBLEMS[int(problems[wrong[0]]) - 1], int(wrong[0]))


def _table(jobs: np.ndarray, plan: Plan) -> Table:
    """One launch for all jobs, each of as many blocks."""
    rows, count = len(jobs), plan.blocks
    jobs["first_block"], jobs["row_blocks"] = np.arange(rows) * count, count
    return Table("lossless", plan.macros, rows * count, plan.threads, jobs.tobytes(), rows)


@lru_cache(maxsize=4096)
def plan_of(phase: int, numel: int, dtype: torch.dtype) -> Plan:
    """What all launches of a phase on so many elements have in common."""
    macros = {"DSQ_PHASE": phase, "DSQ_VALUES": DTYPES[dtype]}
    blocks = 1 if phase == SCAN else blocks_of(numel)
    return Plan("lossless", macros, blocks=blocks, threads=THREADS, fields={"numel": numel})
