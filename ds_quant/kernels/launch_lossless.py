"""Launches of the CUDA kernels of lossless differences: signatures and bytes of lossless.py.

Messages are three launches that read what the one before wrote; decoded ones are checked before
anybody uses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from ds_quant.kernels.launch import DTYPES, Plan, fields_of, table_of
from ds_quant.kernels.launch_batch import RunTables
from ds_quant.kernels.lossless import HEADER, PROBLEMS, blocks_of
from ds_quant.kernels.wire import ALIGNMENT

THREADS = 256
PLAN, SCAN, WRITE, READ = range(4)  # DSQ_PHASE
LENGTH = PROBLEMS.index("length") + 1
Task = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # see ``dispatch.encode_lossless``
_FIELDS = fields_of("lossless")


def encode(messages: Sequence[Task], nbytes: torch.Tensor, *, run_tables: RunTables) -> None:
    """Write messages of values of one dtype; nbytes, (messages,) int64, receives the bytes of each.
    Three launches for all of them.
    """
    nbytes.zero_()  # a checksum is added up there first
    jobs, numels = np.zeros(len(messages), dtype=_FIELDS), [len(m[0]) for m in messages]
    for column, name in enumerate(("values", "reference", "wire")):
        jobs[name] = [message[column].data_ptr() for message in messages]
    jobs["nbytes"] = nbytes.data_ptr() + 8 * np.arange(len(messages), dtype=np.uint64)
    jobs["numel"], dtype = numels, messages[0][0].dtype
    jobs = jobs[jobs["numel"] > 0]
    for phase in (PLAN, SCAN, WRITE) if len(jobs) else ():
        plans = [plan_of(phase, numel, dtype) for numel in filter(None, numels)]
        run_tables([table_of(plans, [1] * len(jobs), jobs)])


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
        jobs, plan = jobs[sound], plan_of(READ, numel, out.dtype)
        run_tables([table_of([plan] * len(jobs), [1] * len(jobs), jobs)])


@lru_cache(maxsize=4096)
def plan_of(phase: int, numel: int, dtype: torch.dtype) -> Plan:
    """What all launches of a phase on so many elements have in common."""
    macros = ("DSQ_PHASE", phase), ("DSQ_VALUES", DTYPES[dtype])
    blocks = 1 if phase == SCAN else blocks_of(numel)
    return Plan("lossless", macros, blocks, THREADS, {"numel": numel})
