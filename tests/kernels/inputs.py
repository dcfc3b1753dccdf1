"""What the kernel tests feed: awkward groups, guarded memory, codecs, rotations."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from ds_quant.codec.codec import GroupCodec
from ds_quant.kernels.launch import Stores
from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.wire import round_up
from tests.unit import wire_oracle as oracle

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
STORES = [Stores(run, staged) for run in (1, 2, 4, 8) for staged in (False, True)]
GAUSSIAN = tuple(GroupCodec(bits=bits, group_size=128, range="gaussian") for bits in (2, 3, 4))

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
    """Of a test parameter."""
    return getattr(value, "name", str(value)).replace(" ", "-")


@dataclass(frozen=True)
class Case:
    """Rows of values at some address."""

    rows: int
    numel: int
    kinds: list[str]
    seed: int
    skew: int  # elements before the first row; 0: 16-byte aligned rows
    address: Address

    def values(self, group_size: int, dtype: torch.dtype) -> torch.Tensor:
        """(rows, numel), ending where readable memory ends."""
        rows = [
            awkward(self.numel, group_size, self.kinds, self.seed + r) for r in range(self.rows)
        ]
        padding = self.skew if self.skew else -self.numel % 16
        flat = guarded(self.rows * (self.numel + padding), dtype)
        out = flat.view(self.rows, self.numel + padding)[:, padding:]
        return out.copy_(torch.stack(rows)) if self.numel else out


@st.composite
def cases(draw: st.DrawFn, group_size: int, max_groups: int = 3) -> Case:
    """Whole groups, ragged ones and less than a vector; addresses beyond 32 bits."""
    groups = max_groups if group_size > 1000 else 4 * max_groups
    numel = draw(st.one_of(st.integers(1, group_size * groups), st.just(group_size * groups)))
    words = st.integers(0, (1 << 64) - 1)
    first = draw(st.sampled_from((0, 5, (1 << 32) - 3, 1 << 40)))
    return Case(
        rows=draw(st.integers(1, 2)),
        numel=numel,
        kinds=draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=6)),
        seed=draw(st.integers(0, 1 << 30)),
        skew=draw(st.sampled_from((0, 0, 1, 3, 8))),
        address=Address(key=draw(words), step=draw(words), first_vector=first),
    )


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


class FixedRotation(NamedTuple):
    """Stands in for a rotation whose flips are drawn."""

    block: int
    flips: int | None = None
    signs: Address | None = None


def signs_of(block: int, flips: int | None, numel: int) -> np.ndarray:
    """(numel,) fp32 of +-1: those of every block."""
    signs = [1 - 2 * ((flips or 0) >> place & 1) for place in range(block)]
    return np.resize(np.array(signs, np.float32), numel)


def rotated(x: torch.Tensor, block: int, flips: int | None) -> torch.Tensor:
    """(rows, whole blocks) fp32 of (rows, numel): H (signs * x), filled up with zeros."""
    with np.errstate(all="ignore"):
        rows = [oracle.rotate(row * signs_of(block, flips, len(row)), block) for row in x.numpy()]
    return torch.from_numpy(np.stack(rows))


def rotated_back(x: torch.Tensor, block: int, flips: int | None, scale: float) -> torch.Tensor:
    """signs * ((H x) * fp32(scale / block)) of (whole blocks,) fp32."""
    with np.errstate(all="ignore"):
        back = oracle.unrotate(x.numpy(), block, scale)
    return torch.from_numpy(back * signs_of(block, flips, len(back)))
