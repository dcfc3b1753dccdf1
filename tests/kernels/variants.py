"""Every variant of the kernels as a launch: the codecs of the tests and the ones with a bar."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch

from ds_quant.codec.codec import GroupCodec
from ds_quant.kernels import launch, launch_lossless
from ds_quant.kernels.geometry import Stores
from ds_quant.kernels.launch import Launch, merge
from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.reference import BlockRotation
from tests.kernels.inputs import CODECS, DTYPES, GAUSSIAN, table

_WHOLE, _RAGGED = 1 << 16, (1 << 16) + 5
_HADAMARD = BlockRotation(32)
_FLIPPED = BlockRotation(128, flips=(1 << 100) + 5)


def _one(call: Callable[[Callable], None]) -> Launch:
    found: list[Launch] = []
    call(found.append)
    return found[0]


def _aligned(rows: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows at multiples of 16 bytes, never read or written."""
    return torch.empty(rows, -(-numel // 16) * 16, dtype=dtype)[:, :numel]


def encode(codec, dtype, *, numel=_RAGGED, rotation=None, base=None) -> Launch:
    """The launch of an encode."""
    padded = -(-numel // rotation.block) * rotation.block if rotation else numel
    x = _aligned(1, numel, dtype)
    out = _aligned(1, codec.wire_bytes(padded), torch.uint8)
    options = {"levels": table(codec), "rotation": rotation}
    options |= {"address": Address(key=1, step=1)}
    options["base"] = None if base is None else _aligned(1, numel, base)
    return _one(lambda run: launch.encode(x, out, codec, run=run, **options))


def decode(codec, dtype, *, numel=_RAGGED, add=False, stores=None) -> Launch:
    """The launch of a decode of single rows."""
    wire = _aligned(1, codec.wire_bytes(numel), torch.uint8)
    out = _aligned(1, numel, dtype)
    options = {"levels": table(codec), "add": add, "stores": stores}
    return _one(lambda run: launch.decode(wire, out, codec, run=run, **options))


def decode_sum(
    codec, sources, dtype=torch.float32, *, numel=_WHOLE, scale=1.0, own=False, rotation=None,
    stores=None,
):  # fmt: skip
    """The launch of a sum."""
    padded = -(-numel // rotation.block) * rotation.block if rotation else numel
    wire = _aligned(sources - own, codec.wire_bytes(padded), torch.uint8)
    out = _aligned(1, numel, dtype)[0]
    replaced = (0, _aligned(1, padded, torch.float32)[0]) if own else None
    options = {"scale": scale, "levels": table(codec), "own": replaced, "rotation": rotation}
    options["stores"] = stores
    return _one(lambda run: launch.decode_sum(wire, out, codec, run=run, **options))


def recode(source, codec, sources, *, numel=_WHOLE, own=False) -> Launch:
    """The launch of a recode."""
    wire = _aligned(sources - own, source.wire_bytes(numel), torch.uint8)[None]
    out = _aligned(1, codec.wire_bytes(numel), torch.uint8)
    options = {"numel": numel, "address": Address(key=1, step=1)}
    options |= {"levels": table(codec), "source_levels": table(source)}
    options["own"] = (0, _aligned(1, numel, torch.float32)[0]) if own else None
    return _one(lambda run: launch.recode(wire, out, source, codec, run=run, **options))


def lossless(phase: int, dtype=torch.bfloat16) -> Launch:
    """A launch of lossless differences."""
    plan = launch_lossless.plan_of(phase, _WHOLE, dtype)
    return plan.launch(1, {})


def _absmax(bits: int, group_size: int, rounding: str = "nearest") -> GroupCodec:
    return GroupCodec(bits=bits, group_size=group_size, range="absmax", rounding=rounding)


def headline() -> dict[str, Launch]:
    """The variants whose instructions per element have a bar or are measured on a GPU."""
    bf16, fp32 = torch.bfloat16, torch.float32
    int4, int4_2048 = _absmax(4, 128, "stochastic"), _absmax(4, 2048, "stochastic")
    int8 = _absmax(8, 128)
    qsdp = GroupCodec(bits=8, group_size=1024, rounding="random_shift")
    coin = GroupCodec(bits=4, group_size=1024, rounding="stochastic")
    whole, gaussian = {"numel": _WHOLE}, GAUSSIAN[2]
    return {
        "encode int4 stochastic g128 bf16": encode(int4, bf16, **whole),
        "encode int4 stochastic g128 bf16, ragged": encode(int4, bf16),
        "encode int4 stochastic g128 fp32": encode(int4, fp32, **whole),
        "encode int4 stochastic g2048 bf16": encode(int4_2048, bf16, **whole),
        "encode int4 stochastic g2048 bf16, ragged": encode(int4_2048, bf16),
        "encode int4 nearest g128 bf16": encode(_absmax(4, 128), bf16, **whole),
        "encode Hadamard-32 int4 stochastic g128 bf16": encode(
            int4, bf16, rotation=_HADAMARD, **whole
        ),
        "encode Hadamard-32 int4 stochastic g128 fp32": encode(
            int4, fp32, rotation=_HADAMARD, **whole
        ),
        "encode difference int4 nearest g2048 fp32 - bf16": encode(
            _absmax(4, 2048), fp32, base=bf16, **whole
        ),
        "encode int8 random shift g1024 fp32": encode(qsdp, fp32, **whole),
        "encode int4 minmax stochastic g1024 bf16": encode(coin, bf16, **whole),
        "decode int4 g128 bf16": decode(int4, bf16, **whole),
        "decode int8 random shift g1024 bf16": decode(qsdp, bf16, **whole),
        "decode int4 g128 bf16, runs of 1": decode(int4, bf16, stores=Stores(1), **whole),
        "decode int4 g128 bf16, runs of 4 staged": decode(
            int4, bf16, stores=Stores(4, True), **whole
        ),
        "decode int4 g2048, added to bf16": decode(int4_2048, bf16, add=True, **whole),
        "decode_sum 8 x int4 g128 fp32": decode_sum(int4, 8),
        "decode_sum 8 x int4 g128 fp32, ragged": decode_sum(int4, 8, numel=_RAGGED),
        "decode_sum 8 x int4 g128 bf16": decode_sum(int4, 8, bf16),
        "decode_sum 8 x int4 g128 fp32, runs of 4 staged": decode_sum(
            int4, 8, stores=Stores(4, True)
        ),
        "decode_sum 8 x int4 g128 fp32, runs of 8 staged": decode_sum(
            int4, 8, stores=Stores(8, True)
        ),
        "decode_sum 8 x int4 g128 Hadamard-32 fp32": decode_sum(int4, 8, rotation=_HADAMARD),
        "decode_sum 8 x int8 g128 fp32": decode_sum(int8, 8),
        "recode 8 x int8 -> int4 nearest g128": recode(int8, _absmax(4, 128), 8),
        "recode 8 x int8 -> int4 stochastic g128": recode(int8, int4, 8),
        "recode 8 x int4 -> int4 stochastic g128": recode(int4, int4, 8),
        "lossless plan bf16": lossless(launch_lossless.PLAN),
        "lossless write bf16": lossless(launch_lossless.WRITE),
        "lossless read bf16": lossless(launch_lossless.READ),
        "encode Hadamard-128 with signs, 4 Gaussian bits, bf16": encode(
            gaussian, bf16, rotation=_FLIPPED, **whole
        ),
        "decode_sum 8 x 4 Gaussian bits, Hadamard-128 with signs": decode_sum(
            gaussian, 8, rotation=_FLIPPED
        ),
        "recode 8 x int8 -> 4 Gaussian bits": recode(int8, gaussian, 8),
    }


def others() -> dict[str, Launch]:
    """One variant per formula and bits, and the options of the kernels."""
    found = {}
    for index, codec in enumerate(CODECS):
        found[f"encode {codec.name} {DTYPES[index % 3]}"] = encode(codec, DTYPES[index % 3])
        if codec.rounding == "nearest":
            found[f"decode {codec.name}"] = decode(codec, DTYPES[codec.bits % 3])
    bf16 = torch.bfloat16
    for codec in GAUSSIAN:
        ragged = {"numel": _RAGGED, "rotation": _FLIPPED}
        for dtype in (bf16, torch.float32):
            found[f"encode {codec.name} Hadamard-128 {dtype}"] = encode(codec, dtype, **ragged)
        found[f"decode {codec.name}"] = decode(codec, bf16, numel=_WHOLE)
        found[f"decode_sum 3 x {codec.name}, own row"] = decode_sum(codec, 3, own=True, **ragged)
        found[f"recode 3 x {codec.name}, own row"] = recode(
            codec, codec, 3, numel=_WHOLE + 128, own=True
        )
    wide = GroupCodec(bits=7, group_size=8192, rounding="stochastic")
    found["encode Hadamard-128 with signs int8 g2048"] = encode(
        _absmax(8, 2048), bf16, rotation=_FLIPPED
    )
    found["encode difference Hadamard-64 int5 minmax g64"] = encode(
        GroupCodec(bits=5, group_size=64), bf16, rotation=BlockRotation(64), base=torch.float32
    )
    found["decode_sum 17 x int7 minmax, own row"] = decode_sum(wide, 17, own=True, scale=0.5)
    found["decode_sum 3 x int8 Hadamard-128 with signs"] = decode_sum(
        _absmax(8, 2048), 3, numel=_RAGGED, rotation=_FLIPPED
    )
    found["recode 9 x int5 -> int3 minmax, own row, ragged"] = recode(
        GroupCodec(bits=5, group_size=1024),
        GroupCodec(bits=3, group_size=288, rounding="stochastic"),
        9,
        numel=_RAGGED,
        own=True,
    )
    for phase in range(4):
        found[f"lossless phase {phase} fp16"] = lossless(phase, torch.float16)
    found["lossless read bf16, from a table"] = _tabled(lossless(launch_lossless.READ))
    for dtype, rotation in ((bf16, BlockRotation(32)), (torch.float32, _FLIPPED)):
        alone = launch.rotate_plan(_RAGGED, dtype, rotation).launch(1, {})
        found[f"rotate Hadamard-{rotation.block} {dtype}, from a table"] = _tabled(alone)
    for source, dtype in product(DTYPES, DTYPES):
        for how in ({}, {"sources": 8, "has_own": True, "scale": 0.125}):
            work = launch.cast_plan(source, dtype, _RAGGED, _RAGGED, **how).launch(1, {})
            what = "sum" if how else "cast"
            found[f"{what} {source} -> {dtype}"] = work
            found[f"{what} {source} -> {dtype}, from a table"] = _tabled(work)
    for run in (1, 2, 4, 8):
        for staged in (False, True):
            found[f"decode_sum 8 x int8 g2048 bf16, runs of {run}{' staged' * staged}"] = (
                decode_sum(_absmax(8, 2048), 8, bf16, stores=Stores(run, staged))
            )
    for name in ("encode int4 stochastic g128 bf16", "decode_sum 8 x int4 g128 fp32"):
        found[f"{name}, from a table"] = _tabled(headline()[name])
    return found


def _tabled(one: Launch) -> Launch:
    (table_of_one,) = merge([one])
    return one._replace(macros=table_of_one.macros)
