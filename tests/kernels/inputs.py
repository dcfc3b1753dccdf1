"""Inputs of the kernel tests: awkward groups, guarded memory, codecs, rotations."""

from __future__ import annotations

import ctypes
import mmap

import torch

from ds_quant.codec.codec import GroupCodec
from ds_quant.kernels.launch import Stores
from ds_quant.kernels.wire import round_up

PAGE = mmap.PAGESIZE
FLT_MAX = torch.finfo(torch.float32).max
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

FORMULAS = (
    {"range": "absmax", "rounding": "nearest"},
    {"range": "absmax", "rounding": "stochastic"},
    {"range": "minmax", "rounding": "nearest"},
    {"range": "minmax", "rounding": "stochastic"},
    {"range": "minmax", "rounding": "random_shift"},
    {"range": "minmax", "rounding": "nearest", "levels": "learned"},
)
# Powers of two and not, fewer and more than the lanes of a warp can hold.
GROUPS = (32, 128, 2048, 96, 512, 8192, 64, 288, 1024, 256, 4096, 1120)
CODECS = tuple(
    GroupCodec(bits=bits, group_size=GROUPS[(5 * index + bits) % len(GROUPS)], **formula)
    for bits in range(2, 9)
    for index, formula in enumerate(FORMULAS)
)
# What make test takes: every width and every formula.
ONE_OF_EACH = tuple(CODECS[6 * place + place % 6] for place in range(7))
STORES = [Stores(run, staged) for run in (1, 2, 4, 8) for staged in (False, True)]
GAUSSIAN = tuple(GroupCodec(bits=bits, group_size=128, range="gaussian") for bits in (2, 3, 4, 5))


def large_rows(codec: GroupCodec) -> tuple[tuple[int, int], ...]:
    """(numel, skew) of rows with many groups: whole blocks at a multiple of 16 bytes, and an end
    inside a vector of rows that begin ``skew`` elements behind one.
    """
    is_power_of_two = codec.group_size & (codec.group_size - 1) == 0
    numel = 1 << 18 if is_power_of_two else 256 * codec.group_size
    return (numel, 0), (numel - 77, 3)


# What a group may hold. Values below fp16's range become zeros there, those above Inf.
KINDS = {
    "normal": lambda n: torch.randn(n),
    "outlier": lambda n: torch.randn(n) ** 7,
    "offset": lambda n: 1000 + torch.randn(n),
    "constant": lambda n: torch.full((n,), -1.625),
    "zero": lambda n: torch.zeros(n),
    "negative zero": lambda n: torch.full((n,), -0.0),
    "denormal": lambda n: torch.randn(n) * 2.0**-130,
    "below tiny": lambda n: torch.rand(n) * 2.0**-99.5,
    "above tiny": lambda n: torch.linspace(2.0**-100, 2.0**-98, n),
    "tiny with sign": lambda n: torch.randn(n) * 2.0**-99,
    "huge": lambda n: torch.linspace(-FLT_MAX, FLT_MAX, n),
    "half huge": lambda n: torch.linspace(-FLT_MAX / 2, FLT_MAX / 3, n),
    "one huge": lambda n: torch.cat([torch.tensor([FLT_MAX]), torch.randn(n - 1)]),
    "inf": lambda n: torch.cat([torch.randn(n - 1), torch.tensor([torch.inf])]),
    "negative inf": lambda n: torch.cat([torch.tensor([-torch.inf]), torch.randn(n - 1)]),
    "nan": lambda n: torch.cat([torch.randn(n - 1), torch.tensor([torch.nan])]),
    "tiny": lambda n: torch.linspace(-1, 1, n) * 2.0**-99,
    "span of tiny": lambda n: 1e-30 + torch.linspace(0, 1, n) * 2.0**-99,
    "zeros of both signs": lambda n: torch.arange(n) % 3 * 1e-45 - torch.arange(n) % 2 * 0.0,
    "offset of one denormal": lambda n: torch.arange(n) - 1e-44,
    "fine": lambda n: 1 + torch.arange(n) * 2.0**-23,
    "largest scale": lambda n: torch.linspace(0, 3 * 2.0**126, n),
    "largest": lambda n: torch.full((n,), FLT_MAX),
}


def absmax(bits: int, group_size: int, rounding: str = "nearest") -> GroupCodec:
    return GroupCodec(bits=bits, group_size=group_size, range="absmax", rounding=rounding)


def awkward(numel: int, group_size: int, kinds: list[str], seed: int) -> torch.Tensor:
    """(numel,) fp32: the groups hold the kinds in turn."""
    torch.manual_seed(seed)
    count = -(-numel // group_size)
    groups = [KINDS[kinds[i % len(kinds)]](group_size) for i in range(count)]
    return torch.cat(groups)[:numel] if groups else torch.empty(0)


def table(codec: GroupCodec) -> torch.Tensor | None:
    """Uneven levels for learned codecs, those of Gaussian ones."""
    if codec.levels != "learned":
        return codec.table(None, torch.device("cpu"))
    generator = torch.Generator().manual_seed(codec.bits)
    steps = torch.rand(1 << codec.bits, generator=generator) + 0.5
    return steps.cumsum(0) - steps[0]


def learned(codec: GroupCodec) -> torch.Tensor | None:
    """The levels that a codec is given; Gaussian ones are its own."""
    return table(codec) if codec.levels == "learned" else None


def id_of(value) -> str:
    """Return the id of a test parameter."""
    return getattr(value, "name", str(value)).replace(" ", "-")


_libc = ctypes.CDLL(None, use_errno=True)


def guarded(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory for `numel` elements that ends at an inaccessible page: one byte more is a fault."""
    nbytes = numel * dtype.itemsize
    size = round_up(nbytes, PAGE) + PAGE
    pages = mmap.mmap(-1, size)
    anchor = (ctypes.c_char * size).from_buffer(pages)
    start = ctypes.addressof(anchor)
    if _libc.mprotect(ctypes.c_void_p(start + size - PAGE), PAGE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    if nbytes == 0:
        return torch.empty(0, dtype=dtype)
    first = size - PAGE - nbytes
    return torch.frombuffer(anchor, dtype=torch.uint8)[first : size - PAGE].view(dtype)
