"""Every variant of the kernels as a launch: the codecs of the tests and the ones with a bar."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ds_quant.codec.codec import GroupCodec
from ds_quant.kernels import launch, launch_batch
from ds_quant.kernels.batch import OWN_SIGNS, Decode, Encode, Operation, Recode, Sum
from ds_quant.kernels.launch import Launch, Plan, Stores, Table, fields_of, table_of
from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.wire import round_up
from tests.kernels.backends import storing, tables_of
from tests.kernels.inputs import CODECS, DTYPES, GAUSSIAN, STORES, FixedRotation, absmax

_WHOLE, _RAGGED = 1 << 16, (1 << 16) + 5
_HADAMARD = FixedRotation(32)
_FLIPPED = FixedRotation(128, flips=(1 << 100) + 5)
_OWN_SIGNS = _FLIPPED._replace(signs=Address(7, 3))


def _launch(operation: Operation, *buffers: torch.Tensor) -> Launch:
    """That of one task on aligned buffers, which are never read or written."""
    places = (0,) * (2 if isinstance(operation, Decode) else 4)
    return tables_of([(operation, places)], buffers)[0].launches()[0]


def _wire(codec: GroupCodec, numel: int) -> torch.Tensor:
    return torch.empty(codec.wire_bytes(round_up(numel, 128)), dtype=torch.uint8)


def _turn(rotation: FixedRotation | None) -> dict[str, Any]:
    if rotation is None:
        return {}
    return {"block": rotation.block, "flips": OWN_SIGNS if rotation.signs else bool(rotation.flips)}


def encode(codec, dtype, *, numel=_RAGGED, rotation=None, base=None) -> Launch:
    """The launch of an encode."""
    place = None if base is None else 2
    operation = Encode(codec, numel, 0, 1, 0, base=place, **_turn(rotation))
    buffers = [torch.empty(numel, dtype=dtype), _wire(codec, numel)]
    return _launch(operation, *buffers, torch.empty(numel, dtype=base or dtype))


def decode(codec, dtype, *, numel=_RAGGED, add=False) -> Launch:
    """The launch of a decode of single rows."""
    operation = Decode(codec, numel, 0, 1, 0, add)
    return _launch(operation, _wire(codec, numel), torch.empty(numel, dtype=dtype))


def decode_sum(
    codec, sources, dtype=torch.float32, *, numel=_WHOLE, scale=1.0, own=False, rotation=None
):  # fmt: skip
    """The launch of a sum."""
    operation = Sum(
        codec, numel, wire_in=0, values=1, stream=0, sources=sources - own, stride=0,
        place=0 if own else None, own=2, scale=scale, **_turn(rotation),
    )  # fmt: skip
    return _launch(operation, _wire(codec, numel), torch.empty(numel, dtype=dtype), torch.empty(0))


def recode(source, codec, sources, *, numel=_WHOLE, own=False) -> Launch:
    """The launch of a recode."""
    operation = Recode(
        source, codec, numel, wire_in=0, wire=1, stream=0, sources=sources - own, stride=0,
        place=0 if own else None, own=2,
    )  # fmt: skip
    return _launch(operation, _wire(source, numel), _wire(codec, numel), torch.empty(0))


def stored(stores: Stores, make: Callable[..., Launch], *args: Any, **options: Any) -> Launch:
    """The launch of a sum or decode that writes in this way."""
    with storing(stores):
        return make(*args, **options)


def lossless(phase: int, dtype=torch.bfloat16) -> Launch:
    """A launch of lossless differences."""
    return _planned(launch_batch.lossless_plan(phase, _WHOLE, dtype))


def headline() -> dict[str, Launch]:
    """The variants whose instructions per element have a bar or are measured on a GPU."""
    bf16, fp32 = torch.bfloat16, torch.float32
    int4, int4_2048 = absmax(4, 128, "stochastic"), absmax(4, 2048, "stochastic")
    int8 = absmax(8, 128)
    qsdp = GroupCodec(bits=8, group_size=1024, rounding="random_shift")
    coin = GroupCodec(bits=4, group_size=1024, rounding="stochastic")
    whole, gaussian = {"numel": _WHOLE}, GAUSSIAN[2]
    return {
        "encode int4 stochastic g128 bf16": encode(int4, bf16, **whole),
        "encode int4 stochastic g128 bf16, ragged": encode(int4, bf16),
        "encode int4 stochastic g2048 bf16": encode(int4_2048, bf16, **whole),
        "encode Hadamard-32 int4 stochastic g128 bf16": encode(
            int4, bf16, rotation=_HADAMARD, **whole
        ),
        "encode difference int4 nearest g2048 fp32 - bf16": encode(
            absmax(4, 2048), fp32, base=bf16, **whole
        ),
        "encode int8 random shift g1024 fp32": encode(qsdp, fp32, **whole),
        "encode int4 minmax stochastic g1024 bf16": encode(coin, bf16, **whole),
        "decode int4 g128 bf16": decode(int4, bf16, **whole),
        "decode int8 random shift g1024 bf16": decode(qsdp, bf16, **whole),
        "decode int4 g2048, added to bf16": decode(int4_2048, bf16, add=True, **whole),
        "decode_sum 8 x int4 g128 fp32": decode_sum(int4, 8),
        "decode_sum 8 x int4 g128 fp32, ragged": decode_sum(int4, 8, numel=_RAGGED),
        "decode_sum 8 x int4 g128 fp32, runs of 8 staged": stored(
            Stores(8, True), decode_sum, int4, 8
        ),
        "decode_sum 8 x int4 g128 Hadamard-32 fp32": decode_sum(int4, 8, rotation=_HADAMARD),
        "decode_sum 8 x int8 g128 fp32": decode_sum(int8, 8),
        "recode 8 x int8 -> int4 nearest g128": recode(int8, absmax(4, 128), 8),
        "recode 8 x int4 -> int4 stochastic g128": recode(int4, int4, 8),
        "lossless plan bf16": lossless(launch_batch.PLAN),
        "lossless write bf16": lossless(launch_batch.WRITE),
        "lossless read bf16": lossless(launch_batch.READ),
        "encode Hadamard-128 with signs, 4 Gaussian bits, bf16": encode(
            gaussian, bf16, rotation=_FLIPPED, **whole
        ),
        "decode_sum 8 x 4 Gaussian bits, Hadamard-128 with signs": decode_sum(
            gaussian, 8, rotation=_FLIPPED
        ),
        "decode_sum 3 Gaussian bits, own signs, a source": decode_sum(
            GAUSSIAN[1], 8, rotation=_OWN_SIGNS
        ),
        "decode_sum 2 Gaussian bits, own signs, a source": decode_sum(
            GAUSSIAN[0], 8, rotation=_OWN_SIGNS
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
        found[f"decode_sum 3 x {codec.name}, own row, own signs"] = decode_sum(
            codec, 3, own=True, numel=_RAGGED, rotation=_OWN_SIGNS
        )
        found[f"recode 3 x {codec.name}, own row"] = recode(
            codec, codec, 3, numel=_WHOLE + 128, own=True
        )
    wide = GroupCodec(bits=7, group_size=8192, rounding="stochastic")
    found["encode Hadamard-128 with signs int8 g2048"] = encode(
        absmax(8, 2048), bf16, rotation=_FLIPPED
    )
    found["encode difference Hadamard-64 int5 minmax g64"] = encode(
        GroupCodec(bits=5, group_size=64), bf16, rotation=FixedRotation(64), base=torch.float32
    )
    found["decode_sum 17 x int7 minmax, own row"] = decode_sum(wide, 17, own=True, scale=0.5)
    found["decode_sum 3 x int8 Hadamard-128 with signs"] = decode_sum(
        absmax(8, 2048), 3, numel=_RAGGED, rotation=_FLIPPED
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
    found["cast"] = _planned(launch.cast_plan(bf16, bf16, _RAGGED, _RAGGED))
    for stores in STORES:
        name = f"decode_sum 8 x int8 g2048 bf16, runs of {stores.run}{' staged' * stores.staged}"
        found[name] = stored(stores, decode_sum, absmax(8, 2048), 8, bf16)
    variants = headline() | found
    return found | {f"{name}, from a table": _tabled(one) for name, one in variants.items()}


def _tabled(one: Launch) -> Launch:
    blocks, jobs = math.prod(one.grid), np.frombuffer(one.job, fields_of(one.kernel)).repeat(2)
    jobs["first_block"] = 0, blocks
    return Table(one.kernel, one.macros, 2 * blocks, one.threads, jobs).launches()[0]


def _planned(plan: Plan) -> Launch:
    return table_of([plan], [1], np.zeros(1, fields_of(plan.kernel))).launches()[0]
