"""The compiler's output, executed: cases of test_numbers.py on the PTX of every architecture.

``make test`` runs some of them for one architecture. The last tests change the kernels: each change
must be noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from ds_quant.codec.codec import GroupCodec
from ds_quant.kernels import cuda, dispatch
from ds_quant.kernels.batch import Decode, Encode, Sum
from ds_quant.kernels.launch import Stores
from tests.kernels import compiler
from tests.kernels.backends import Kernels, storing
from tests.kernels.inputs import GAUSSIAN, absmax
from tests.kernels.programs import (
    ARRIVED,
    OUT,
    OWN,
    SUMS,
    WIRE,
    Program,
    X,
    check,
    kinds_of,
    streams_of,
)
from tests.kernels.ptx.memory import MemoryFault
from tests.kernels.ptx.runner import Runner
from tests.kernels.test_numbers import *  # noqa: F403
from tests.lossless_inputs import DTYPES as LOSSLESS_DTYPES
from tests.lossless_inputs import SORTS, Damaged, decode, message_of, mixed
from tests.thin import thinned
from tests.torch_kernels import only_torch

pytestmark = pytest.mark.skipif(
    compiler.nvrtc_version() is None, reason="needs NVRTC: pip install ds_quant[nvrtc]"
)
CPU = torch.device("cpu")
# The other back ends run these two; they launch no kernel.
del test_pieces_at_equal_distances_become_rows  # noqa: F821
del test_threads_that_share_a_plan_do_not_mix_their_buffers  # noqa: F821

QUICK_ARCHITECTURE = "90"
# Of these, make test runs the cases that are not slow on other back ends.
QUICK = {
    "test_ties_of_the_scale_are_rounded_to_even",
    "test_halves_are_read_and_rounded_as_torch_does",
    "test_exact_values_keep_every_bit",
    "test_values_that_stay_are_made_beside_encoded_ones",
    "test_whole_blocks_are_encoded_without_checks_of_ends",
    "test_every_way_of_storing_writes_the_same_values",
    "test_lossless_messages_are_those_of_the_reference",
    "test_a_reciprocal_off_by_a_unit_changes_nothing",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "architecture" not in metafunc.fixturenames:
        return
    is_quick = metafunc.function.__name__ in QUICK
    params = []
    for architecture in compiler.ARCHITECTURES:
        quick = is_quick and architecture == QUICK_ARCHITECTURE
        params.append(pytest.param(architecture, marks=() if quick else pytest.mark.slow))
    metafunc.parametrize("architecture", params, scope="session")


@pytest.fixture(scope="session")
def runner(architecture: str) -> Runner:
    """Compiles every variant once."""
    return Runner(architecture)


def use_for_cuda(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Let the dispatcher run the tasks of CUDA on ``runner`` until the test ends."""
    kernels = Kernels("ptx", CPU, runner)
    monkeypatch.setattr(dispatch, "cuda_runner", kernels.runner)
    return kernels


@pytest.fixture
def cuda_kernels(runner, monkeypatch) -> Kernels:
    return use_for_cuda(runner, monkeypatch)


@pytest.fixture
def kernels(cuda_kernels) -> Kernels:
    return cuda_kernels


@pytest.fixture
def all_kernels(cuda_kernels, nothing_left) -> Kernels:
    return cuda_kernels


# ---- lossless differences ----


@pytest.mark.parametrize(
    "dtype", thinned(LOSSLESS_DTYPES, lambda dtype: dtype == torch.bfloat16), ids=str
)
@pytest.mark.parametrize("numel", (1, 2049, 9000))
def test_lossless_messages_are_those_of_the_reference(cuda_kernels, numel: int, dtype) -> None:
    """Blocks of every sort; decoded in place; one damaged byte is an error."""
    values, reference = mixed(list(SORTS), numel, dtype, seed=numel)
    message = message_of(values, reference)
    with only_torch():
        assert torch.equal(message, message_of(values, reference))
    received = reference.clone()
    decode(message, received, received)
    assert torch.equal(received.view(torch.int16), values.view(torch.int16))
    message[len(message) // 2] ^= 1
    with pytest.raises(Damaged):
        decode(message, reference, received)


# ---- changed kernels ----

INT4_STOCHASTIC = absmax(4, 128, "stochastic")
LEARNED_3 = GroupCodec(bits=3, group_size=32, levels="learned")


def encoding(*codecs: GroupCodec) -> Callable[[Kernels], None]:
    """Return a check of encoded bytes: rows with every kind of group."""

    def run(kernels: Kernels) -> None:
        for codec in codecs:
            sizes = (4096,) if codec.is_gaussian else (128, 5000, 4096)
            program = Program([Encode(codec, numel, X, WIRE, 0) for numel in sizes])
            check(kernels, program, streams_of([codec]), values=kinds_of(codec))

    return run


@pytest.mark.parametrize("shift", thinned((-1, 1), lambda shift: shift == 1))
def test_a_reciprocal_off_by_a_unit_changes_nothing(architecture, shift, monkeypatch) -> None:
    """rcp.approx may err by a unit in the last place: the kernels correct it."""
    kernels = use_for_cuda(Runner(architecture, reciprocal_shift=shift), monkeypatch)
    encoding(INT4_STOCHASTIC, absmax(8, 128), GroupCodec(bits=8, group_size=64))(kernels)


def decoding(kernels: Kernels) -> None:
    codec = absmax(8, 128)
    program = Program([Decode(codec, numel, ARRIVED, OUT, 0) for numel in (1000, 1003)])
    check(kernels, program, streams_of([codec]))


def staged(kernels: Kernels) -> None:
    codec = absmax(8, 2048)
    operation = Sum(codec, 1 << 14, ARRIVED, SUMS, 0, 3, 0, own_row=None, own=OWN)
    with storing(Stores(4, True)):
        check(kernels, Program([operation]), streams_of([codec]))


def lossless_message(kernels: Kernels) -> None:
    values, reference = mixed([3e-4, "few"], 5000, torch.bfloat16, seed=0)
    with only_torch():
        wanted = message_of(values, reference)
    assert torch.equal(message_of(values, reference), wanted)


class Change(NamedTuple):
    """A change of a kernel's source, the check that notices it, and how."""

    old: str
    new: str
    run: Callable[[Kernels], None]
    error: type[Exception]


CHANGES = {
    "a quotient that is rounded twice": Change(
        "return fma_rn(fma_rn(-(float)N, quotient, x), inverse, quotient);",
        "return quotient;",
        encoding(absmax(4, 128)),
        AssertionError,
    ),
    "a reciprocal without its correction": Change(
        "return fma_rn(r, fma_rn(negated(a), r, 1.0f), r);",
        "return float_of(bits_of(r) + 0x4000);",
        encoding(INT4_STOCHASTIC),
        AssertionError,
    ),
    "a product and a sum that are fused": Change(
        "u32 fixed = bits_of(add_rn(t, ",
        "u32 fixed = bits_of(fma_rn(x, range.inverse, ",
        encoding(absmax(4, 128), absmax(8, 128)),
        AssertionError,
    ),
    "comparisons that take denormals for zeros": Change(
        'asm("{.reg .pred p; setp." comparison ".f32 p',
        'asm("{.reg .pred p; setp." comparison ".ftz.f32 p',
        encoding(absmax(4, 128)),
        NotImplementedError,
    ),
    "a shuffle sum with a wrong distance": Change(
        "__shfl_xor_sync(DSQ_ALL_LANES, sum, 2)",
        "__shfl_xor_sync(DSQ_ALL_LANES, sum, 1)",
        encoding(GAUSSIAN[2]),
        AssertionError,
    ),
    "the end of a row one element early": Change(
        "i < DSQ_RUN * 8 && i < count;",
        "i < DSQ_RUN * 8 && i + 1 < count;",
        decoding,
        AssertionError,
    ),
    "a shuffle sum over warps without a barrier": Change(
        "shared.sums[warp][i] = x[i];\n    }\n    __syncthreads();",
        "shared.sums[warp][i] = x[i];\n    }",
        lossless_message,
        MemoryFault,
    ),
    "staged stores without a barrier": Change("__syncwarp();", "", staged, MemoryFault),
    "learned levels without a barrier": Change(
        ", 0.5f);\n    }\n    __syncthreads();",
        ", 0.5f);\n    }",
        encoding(LEARNED_3),
        MemoryFault,
    ),
    "a barrier that half of the threads reach": Change(
        "shared.sums[warp][i] = x[i];\n    }\n    __syncthreads();",
        "shared.sums[warp][i] = x[i];\n    }\n    if (threadIdx.x < 128) __syncthreads();",
        lossless_message,
        MemoryFault,
    ),
}


@pytest.fixture(scope="session")
def unchanged() -> Runner:
    return Runner(QUICK_ARCHITECTURE)


# An arithmetic, an instruction, an end and a barrier.
QUICK_CHANGES = (
    "a quotient that is rounded twice",
    "comparisons that take denormals for zeros",
    "the end of a row one element early",
    "a shuffle sum over warps without a barrier",
)


@pytest.mark.parametrize("name", thinned(CHANGES, lambda name: name in QUICK_CHANGES))
def test_a_changed_kernel_is_noticed(name: str, unchanged, nothing_left, monkeypatch) -> None:
    """The same check passes without the change."""
    change = CHANGES[name]
    texts = []

    def changed(kernel: str) -> str:
        text = cuda.source(kernel)
        texts.append(change.old in text)
        return text.replace(change.old, change.new)

    change.run(use_for_cuda(unchanged, monkeypatch))
    with pytest.raises(change.error):
        change.run(use_for_cuda(Runner(QUICK_ARCHITECTURE, source=changed), monkeypatch))
    assert any(texts), "the kernels no longer have this text"
