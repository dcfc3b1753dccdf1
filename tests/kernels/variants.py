"""Every variant of the kernels as a launch: the codecs of the tests and the ones with a bar."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ds_quant.codec.codec import GroupCodec
from ds_quant.kernels import launch, launch_batch
from ds_quant.kernels.batch import OWN_SIGNS, Decode, Encode, Operation, Recode, Sum
from ds_quant.kernels.launch import Launch, Plan, Stores, Table, fields_of, table_of
from tests.kernels.backends import storing, tables_of
from tests.kernels.inputs import CODECS, DTYPES, GAUSSIAN, STORES, absmax
from tests.kernels.programs import ARRIVED, BASE, OUT, OWN, SUMS, WIRE, Program, X

_WHOLE, _RAGGED = 1 << 16, (1 << 16) + 5
_BF16, _FP32 = torch.bfloat16, torch.float32
_FLIPPED = {"block": 128, "flips": True}
_OWN_SIGNS = {"block": 128, "flips": OWN_SIGNS}


def launch_of(operation: Operation, dtype: torch.dtype = _BF16, base: Any = None) -> Launch:
    """That of one task on aligned buffers, which are never read or written."""
    program = Program([operation], [0])
    dtypes = dtype, base or dtype, torch.uint8, _FP32, torch.uint8, dtype, _FP32
    buffers = [torch.empty(n, dtype=each) for n, each in zip(program.used, dtypes, strict=True)]
    return tables_of(program.tasks, buffers)[0].launches()[0]


def encode(codec: GroupCodec, numel: int = _WHOLE, **how: Any) -> Encode:
    return Encode(codec, numel, X, WIRE, 0, **how)


def decode(codec: GroupCodec, numel: int = _WHOLE, *, add: bool = False) -> Decode:
    return Decode(codec, numel, ARRIVED, OUT, 0, add)


def add_up(
    codec: GroupCodec, sources: int, numel: int = _WHOLE, *, values=SUMS, own_row=None, **how: Any
) -> Sum:
    """place: of values that do not travel."""
    there = sources - (own_row is not None)
    return Sum(codec, numel, ARRIVED, values, 0, there, 0, own_row, OWN, **how)


def recode(
    source: GroupCodec, codec: GroupCodec, sources: int, numel=_WHOLE, own_row=None
) -> Recode:
    there = sources - (own_row is not None)
    return Recode(source, codec, numel, ARRIVED, WIRE, 0, there, 0, own_row, OWN)


def stored(stores: Stores, operation: Operation) -> Launch:
    """The launch of a sum that writes in this way."""
    with storing(stores):
        return launch_of(operation)


def lossless(phase: int, dtype: torch.dtype = _BF16) -> Launch:
    """A launch of lossless differences."""
    return _planned(launch_batch.lossless_plan(phase, _WHOLE, dtype))


def headline() -> dict[str, Launch]:
    """The variants whose instructions per element have a bar or are measured on a GPU."""
    int4, int4_2048 = absmax(4, 128, "stochastic"), absmax(4, 2048, "stochastic")
    int8, gaussian, returned = absmax(8, 128), GAUSSIAN[2], GAUSSIAN[3]
    qsdp = GroupCodec(bits=8, group_size=1024, rounding="random_shift")
    coin = GroupCodec(bits=4, group_size=1024, rounding="stochastic")
    own = "decode_sum {} Gaussian bits, own signs, a source".format
    operations = {
        "encode int4 stochastic g128 bf16": encode(int4),
        "encode int4 stochastic g128 bf16, ragged": encode(int4, _RAGGED),
        "encode int4 stochastic g2048 bf16": encode(int4_2048),
        "encode Hadamard-32 int4 stochastic g128 bf16": encode(int4, block=32),
        "encode int4 minmax stochastic g1024 bf16": encode(coin),
        "decode int4 g128 bf16": decode(int4),
        "decode int8 random shift g1024 bf16": decode(qsdp),
        "decode int4 g2048, added to bf16": decode(int4_2048, add=True),
        "decode_sum 8 x int4 g128 fp32": add_up(int4, 8),
        "decode_sum 8 x int4 g128 fp32, ragged": add_up(int4, 8, _RAGGED),
        "decode_sum 8 x int4 g128 Hadamard-32 fp32": add_up(int4, 8, block=32),
        "decode_sum 8 x int8 g128 fp32": add_up(int8, 8),
        "recode 8 x int8 -> int4 nearest g128": recode(int8, absmax(4, 128), 8),
        "recode 8 x int4 -> int4 stochastic g128": recode(int4, int4, 8),
        "encode Hadamard-128 with signs, 4 Gaussian bits, bf16": encode(gaussian, **_FLIPPED),
        "decode_sum 8 x 4 Gaussian bits, Hadamard-128 with signs": add_up(gaussian, 8, **_FLIPPED),
        own(3): add_up(GAUSSIAN[1], 8, **_OWN_SIGNS),
        own(2): add_up(GAUSSIAN[0], 8, **_OWN_SIGNS),
        "recode 8 x int8 -> 4 Gaussian bits": recode(int8, gaussian, 8),
        "decode_sum 5 Gaussian bits, Hadamard-128 with signs": add_up(returned, 1, **_FLIPPED),
    }
    difference = encode(absmax(4, 2048), base=BASE)
    return {name: launch_of(operation) for name, operation in operations.items()} | {
        "encode difference int4 nearest g2048 fp32 - bf16": launch_of(difference, _FP32, _BF16),
        "encode int8 random shift g1024 fp32": launch_of(encode(qsdp), _FP32),
        "encode Hadamard-128 with signs, 5 Gaussian bits, fp32": launch_of(
            encode(returned, **_FLIPPED), _FP32
        ),
        "decode_sum 8 x int4 g128 fp32, runs of 8 staged": stored(Stores(8, True), add_up(int4, 8)),
        "lossless plan bf16": lossless(launch_batch.PLAN),
        "lossless write bf16": lossless(launch_batch.WRITE),
        "lossless read bf16": lossless(launch_batch.READ),
    }


def others() -> dict[str, Launch]:
    """One variant per formula and bits, and the options of the kernels."""
    found: dict[str, Launch] = {}
    for index, codec in enumerate(CODECS):
        dtype = DTYPES[index % 3]
        found[f"encode {codec.name} {dtype}"] = launch_of(encode(codec, _RAGGED), dtype)
        if codec.rounding == "nearest":
            dtype = DTYPES[codec.bits % 3]
            found[f"decode {codec.name}"] = launch_of(decode(codec, _RAGGED), dtype)
    own = {"own_row": 0}
    operations: dict[str, Operation] = {}
    for codec in GAUSSIAN:
        turned = encode(codec, _RAGGED, **_FLIPPED)
        found[f"encode {codec.name} Hadamard-128 fp32"] = launch_of(turned, _FP32)
        operations |= {
            f"encode {codec.name} Hadamard-128 bf16": turned,
            f"decode {codec.name}": decode(codec),
            f"decode_sum 3 x {codec.name}, own row": add_up(codec, 3, _RAGGED, **own, **_FLIPPED),
            f"decode_sum 3 x {codec.name}, own row, own signs": add_up(
                codec, 3, _RAGGED, **own, **_OWN_SIGNS
            ),
            f"recode 3 x {codec.name}, own row": recode(codec, codec, 3, _WHOLE + 128, own_row=0),
        }
    wide, large = GroupCodec(bits=7, group_size=8192, rounding="stochastic"), absmax(8, 2048)
    narrow, odd = GroupCodec(bits=5, group_size=1024), GroupCodec(
        bits=3, group_size=288, rounding="stochastic"
    )  # fmt: skip
    operations |= {
        "encode Hadamard-128 with signs int8 g2048": encode(large, _RAGGED, **_FLIPPED),
        "decode_sum 17 x int7 minmax, own row": add_up(wide, 17, **own, scale=0.5),
        "decode_sum 3 x int8 Hadamard-128 with signs": add_up(large, 3, _RAGGED, **_FLIPPED),
        "recode 9 x int5 -> int3 minmax, own row, ragged": recode(
            narrow, odd, 9, _RAGGED, own_row=0
        ),
    }
    found |= {name: launch_of(operation) for name, operation in operations.items()}
    turned = encode(GroupCodec(bits=5, group_size=64), _RAGGED, block=64, base=BASE)
    found["encode difference Hadamard-64 int5 minmax g64"] = launch_of(turned, _BF16, _FP32)
    for phase in range(4):
        found[f"lossless phase {phase} fp16"] = lossless(phase, torch.float16)
    found["cast"] = _planned(launch.cast_plan(_BF16, _BF16, _RAGGED, _RAGGED))
    for stores in STORES:
        name = f"decode_sum 8 x int8 g2048 bf16, runs of {stores.run}{' staged' * stores.staged}"
        found[name] = stored(stores, add_up(large, 8, values=OUT))
    variants = headline() | found
    return found | {f"{name}, from a table": _tabled(one) for name, one in variants.items()}


def _tabled(one: Launch) -> Launch:
    blocks, jobs = math.prod(one.grid), np.frombuffer(one.job, fields_of(one.kernel)).repeat(2)
    jobs["first_block"] = 0, blocks
    return Table(one.kernel, one.macros, 2 * blocks, one.threads, jobs).launches()[0]


def _planned(plan: Plan) -> Launch:
    return table_of([plan], [1], np.zeros(1, fields_of(plan.kernel))).launches()[0]
