"""Launches of the CUDA kernels of lossless differences: signatures and bytes of lossless.py.

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
from ds_quant.kernels.lossless import HEADER, PROBLEMS, blocks_of
from ds_quant.kernels.wire import ALIGNMENT

THREADS = 256
PLAN, SCAN, WRITE, READ = range(4)  # DSQ_PHASE
LENGTH = PROBLEMS.index("length") + 1
Task = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # see ``dispatch.encode_lossless``
_FIELDS = np.dtype([(name, "<u8") for name in FIELDS["lossless"]])


def encode(messages: Sequence[Task], nbytes: torch.Tensor, *, run_tables: RunTables) -> None:
    """Write messages of values of one dtype; nbytes, (messages,) int64, receives the bytes of each.
    Three launches for all of them.
    """
    nbytes.zero_()  # a checksum is added up there first
    jobs = []
    for place, (values, reference, out) in enumerate(messages):
        fields = {"values": values.data_ptr(), "reference": reference.data_ptr()}
        fields |= {"wire": out.data_ptr(), "nbytes": nbytes[place].data_ptr()}
        jobs += [(values, fields)] if values.numel() else []
    for phase in (PLAN, SCAN, WRITE):
        plans = [plan_of(phase, values.numel(), values.dtype) for values, _ in jobs]
        run_tables(merge(plan.launch(1, job[1]) for plan, job in zip(plans, jobs, strict=True)))


def decode_rows(
    wire: torch.Tensor,  # (bytes,) uint8: the messages, each at a multiple of 16 bytes
    starts: np.ndarray,  # (rows,) int64, first byte of each
    lengths: np.ndarray,  # (rows,) int64, its bytes
    reference: torch.Tensor,  # (rows, numel) bf16 or fp16
    out: torch.Tensor,  # (rows, numel) of the same dtype; may be the reference
    status: torch.Tensor,  # (rows, 2) int32, zeros
    *,
    run_tables: RunTables,
) -> None:
    """Decode a message into every row of `out`, in one launch; `status` tells which cannot be."""
    rows, numel = out.shape
    sound = (lengths % ALIGNMENT == 0) & (lengths >= HEADER if numel else lengths == 0)
    if not sound.all():
        status[torch.from_numpy(~sound).to(status.device), 0] = LENGTH
    jobs = np.zeros(rows, dtype=_FIELDS)
    for name, tensor in (("values", out), ("reference", reference), ("status", status)):
        nbytes = np.uint64(tensor.stride(0) * tensor.element_size())
        jobs[name] = tensor.data_ptr() + np.arange(rows, dtype=np.uint64) * nbytes
    jobs["wire"] = wire.data_ptr() + starts.astype(np.uint64)
    jobs["nbytes"], jobs["numel"] = lengths, numel
    if numel and sound.any():
        run_tables([_table(jobs[sound], plan_of(READ, numel, out.dtype))])


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
