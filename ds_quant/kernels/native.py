"""The C++ kernels for CPU tensors: native.cpp, built with the wheel where a compiler exists.

Signatures are those of reference.py and hadamard.py, and so are the bytes. Without the library, or
with one of another version, the torch reference does the work; ``unavailable_reason()`` says why.
"""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from importlib.util import find_spec

import torch

from ds_quant.kernels import random_bits
from ds_quant.kernels.hadamard import BlockRotation
from ds_quant.kernels.packing import Format, layout_of
from ds_quant.kernels.wire import round_up

VERSION = 5  # of the jobs, as dsq_version() of native.cpp

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_ROUNDINGS = {"nearest": 0, "stochastic": 1, "random_shift": 2}
_LEARNED, _GAUSSIAN = 3, 4
_NUMEL_PER_THREAD = 1 << 18  # starting a thread costs as much as a tenth of this work
_WORD = (1 << 64) - 1


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Job(ctypes.Structure):
    """Arguments of a kernel; the fields of Job in native.cpp."""

    _fields_ = (
        _fields(ctypes.c_uint64, "values wire base")
        + _fields(ctypes.c_int64, "values_stride wire_stride base_stride rows numel valid")
        + _fields(ctypes.c_int64, "dtype base_dtype add bits group has_offset rounding rotation")
        + _fields(ctypes.c_int64 * 3, "planes")
        + _fields(ctypes.c_int64, "scales offsets nbytes")
        + _fields(ctypes.c_uint64, "key step first_vector row_vectors")
        + _fields(ctypes.c_uint64, "flips_low flips_high levels own_values")
        + _fields(ctypes.c_int64, "own")
        + _fields(ctypes.c_float, "factor unused")
    )


@cache
def unavailable_reason() -> str | None:
    """Say why the kernels cannot be used, as the rest of a sentence; None if they can."""
    spec = find_spec("ds_quant.kernels._native")
    if spec is None or spec.origin is None:
        return "are not built: install ds_quant where there is a C++ compiler"
    try:
        version = ctypes.CDLL(spec.origin).dsq_version()
    except (OSError, AttributeError) as error:
        return f"cannot be loaded: {error}"
    if version != VERSION:
        return f"have version {version}, needed is {VERSION}: install ds_quant again"
    return None


@cache
def function(name: str) -> ctypes._CFuncPtr:
    """A kernel: takes the address of jobs, their number, and how many threads may work on them."""
    library = ctypes.CDLL(find_spec("ds_quant.kernels._native").origin)
    found = getattr(library, name)
    found.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    found.restype = None
    return found


def _call(name: str, job: Job, numel: int) -> None:
    function(name)(ctypes.addressof(job), 1, threads_for(numel))


def encode(
    x: torch.Tensor,  # (rows, numel) floating point
    out: torch.Tensor,  # (rows, nbytes) uint8
    fmt: Format,
    *,
    address: random_bits.Address | None,
    levels: torch.Tensor | None,  # (2^bits,) fp32, learned and Gaussian levels only
    base: torch.Tensor | None = None,  # (rows, numel) floating point, subtracted from x in fp32
    rotation: BlockRotation | None = None,  # of x, or x - base; the wire holds whole blocks
) -> None:
    """Write the wire bytes of every row, padding included."""
    rows, numel = x.shape
    if rows == 0 or numel == 0:
        return
    x, target = _dense(x), out if out.stride(1) == 1 else torch.empty_like(out)
    job = job_of(fmt, rows, numel, x.dtype, rotation.block if rotation else 0)
    _set_flips(job, rotation)
    job.values, job.values_stride = x.data_ptr(), x.stride(0) * x.element_size()
    job.wire, job.wire_stride = target.data_ptr(), target.stride(0)
    if base is not None:
        base = _dense(base)
        job.base, job.base_stride = base.data_ptr(), base.stride(0) * base.element_size()
        job.base_dtype = DTYPES[base.dtype]
    if address is not None:
        job.key, job.step = address.key, address.step
        job.first_vector = address.first_vector & _WORD
        job.row_vectors = address.vectors_per_row(job.numel)
    job.levels = _pointer(levels)
    _call("dsq_encode", job, rows * numel)
    if target is not out:
        out.copy_(target)


def decode(
    wire: torch.Tensor,  # (rows, nbytes) uint8
    out: torch.Tensor,  # (rows, numel) floating point
    fmt: Format,
    *,
    levels: torch.Tensor | None,  # (2^bits,) fp32, learned and Gaussian levels only
    add: bool = False,  # in fp32 to what `out` holds
) -> None:
    """Decode every row and cast once to the dtype of `out`."""
    rows, numel = out.shape
    if rows == 0 or numel == 0:
        return
    target = _dense(out)
    job = _source_job(wire, fmt, numel, target.dtype, levels)
    job.add = add
    job.values, job.values_stride = target.data_ptr(), target.stride(0) * target.element_size()
    _call("dsq_decode", job, rows * numel)
    if target.data_ptr() != out.data_ptr():
        out.copy_(target)


def decode_sum(
    wire: torch.Tensor,  # (rows, nbytes) uint8
    out: torch.Tensor,  # (numel,) fp32
    fmt: Format,
    *,
    scale: float,
    own: tuple[int, torch.Tensor] | None,  # place and values, (numel on the wire,) floating point
    levels: torch.Tensor | None,  # (2^bits,) fp32, learned and Gaussian levels only
    rotation: BlockRotation | None = None,  # to undo; the wire holds whole blocks
) -> None:
    """out = scale * (row 0 + row 1 + ...), fp32 sums in row order, multiplied once at the end.

    ``own[1]`` is added as row ``own[0]``, which the wire leaves out. With a rotation the sum is
    rotated back before it is multiplied.
    """
    if out.shape[0] == 0 or (wire.shape[0] == 0 and own is None):
        out.zero_()
        return
    target = out if out.is_contiguous() else torch.empty_like(out)
    job = _source_job(wire, fmt, out.shape[0], torch.float32, levels, rotation)
    _set_flips(job, rotation)
    job.values, job.factor = target.data_ptr(), scale / rotation.block if rotation else scale
    if own is not None:
        own_values = own[1].detach().to(torch.float32).contiguous()
        job.own, job.own_values, job.rows = own[0], own_values.data_ptr(), wire.shape[0] + 1
    _call("dsq_decode_sum", job, wire.shape[0] * out.shape[0])
    if target is not out:
        out.copy_(target)


def rotate(
    x: torch.Tensor,  # (numel,) floating point
    out: torch.Tensor,  # (blocks * block,) fp32 contiguous
    rotation: BlockRotation,
) -> None:
    """out = H (signs * x) block by block, x filled up with zeros to whole blocks."""
    x = _dense(x)
    job = Job(values=x.data_ptr(), wire=out.data_ptr())
    _set_flips(job, rotation)
    job.group = job.rotation = rotation.block
    job.dtype, job.valid = DTYPES[x.dtype], x.numel()
    _call("dsq_rotate", job, x.numel())


def unrotate_(
    x: torch.Tensor,  # (blocks * block,) fp32 contiguous
    rotation: BlockRotation,
    *,
    scale: float = 1.0,
) -> None:
    """x = signs * (H x * (scale / block)), in place: the inverse of ``rotate``, times scale."""
    job = Job(values=x.data_ptr(), factor=scale / rotation.block)
    _set_flips(job, rotation)
    job.group = job.rotation = rotation.block
    job.valid = x.numel()
    _call("dsq_rotate", job, x.numel())


def _dense(x: torch.Tensor) -> torch.Tensor:
    """x with a dtype that the kernels know and rows without holes, copied if need be."""
    x = x.detach()
    if x.dtype not in DTYPES:
        x = x.to(torch.float32)
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _set_flips(job: Job, rotation: BlockRotation | None) -> None:
    if rotation is not None and rotation.flips is not None:
        job.flips_low, job.flips_high = rotation.flips & _WORD, rotation.flips >> 64 & _WORD


def _source_job(
    wire: torch.Tensor,
    fmt: Format,
    numel: int,
    dtype: torch.dtype,
    levels: torch.Tensor | None,
    rotation: BlockRotation | None = None,
) -> Job:
    """Job that reads `wire`, which the caller keeps alive. Rows with holes cannot be passed."""
    if wire.stride(1) != 1:
        raise ValueError("wire: the bytes of a row must follow each other")
    job = job_of(fmt, wire.shape[0], numel, dtype, rotation.block if rotation else 0)
    job.wire, job.wire_stride = wire.data_ptr(), wire.stride(0)
    job.levels = _pointer(levels)
    return job


def job_of(fmt: Format, rows: int, numel: int, dtype: torch.dtype, block: int) -> Job:
    """A job without addresses; ``block``: of a rotation, 0 for none."""
    return Job.from_buffer_copy(_template(fmt, rows, numel, dtype, block))


@lru_cache(maxsize=4096)
def _template(fmt: Format, rows: int, numel: int, dtype: torch.dtype, block: int) -> bytes:
    """Build the part of a job that codec and shape decide, cached: a run repeats few."""
    layout = layout_of(fmt, round_up(numel, block) if block else numel)
    job = Job(rows=rows, numel=layout.numel, valid=numel, dtype=DTYPES[dtype])
    job.rotation = block
    job.bits, job.group, job.has_offset = fmt.bits, fmt.group_size, fmt.has_offset
    job.rounding = _LEARNED if fmt.levels == "learned" else _ROUNDINGS[fmt.rounding]
    if fmt.is_gaussian:
        job.rounding = _GAUSSIAN
    job.planes[: len(layout.plane_offsets)] = layout.plane_offsets
    job.scales, job.offsets = layout.scale_offset, layout.offset_offset or 0
    job.nbytes, job.own, job.factor = layout.nbytes, -1, 1.0
    return bytes(job)


def threads_for(numel: int) -> int:
    """Threads for work on so many elements."""
    return max(1, min(torch.get_num_threads(), numel // _NUMEL_PER_THREAD))
