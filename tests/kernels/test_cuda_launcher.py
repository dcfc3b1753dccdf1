"""The CuPy launcher without a GPU: CuPy and torch.cuda are stand-ins, the shim runs the kernels."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import tempfile
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from ds_quant.codec.bound import encode
from ds_quant.codec.codec import GroupCodec
from ds_quant.kernels import cuda, dispatch, launch
from ds_quant.kernels.batch import Encode, Offsets, records_of
from ds_quant.kernels.cuda import source
from ds_quant.kernels.launch import FIELDS, Launch, fields_of, table_of
from tests.kernels.backends import tables_of
from tests.kernels.inputs import absmax
from tests.kernels.programs import (
    ADDRESS,
    WIRE,
    Program,
    X,
    check,
    expected,
    kinds_of,
    streams_of,
)

CODEC = absmax(4, 128, "stochastic")

CPU = torch.device("cpu")


class FakeCupy(types.ModuleType):
    """The part of CuPy that ds_quant uses. Launches go to the shim, as bytes behind pointers."""

    def __init__(self, shim, version: int = 13020) -> None:
        super().__init__("cupy")
        self.shim, self.streams, self.compiled, self.devices = shim, [], 0, []
        self.driver, self.compiler = 13000, (13, 2)
        runtime = types.SimpleNamespace(
            runtimeGetVersion=lambda: version, driverGetVersion=lambda: self.driver
        )
        nvrtc = types.SimpleNamespace(getVersion=lambda: self.compiler)
        device = lambda index: types.SimpleNamespace(use=lambda: self.devices.append(index))  # noqa: E731
        self.cuda = types.SimpleNamespace(runtime=runtime, nvrtc=nvrtc, Device=device)

    def RawKernel(self, code: str, name: str, options: tuple[str, ...]):  # noqa: N802
        assert code == source(name)
        assert options[: len(cuda.OPTIONS)] == cuda.OPTIONS
        assert all(option.startswith("-D") for option in options[len(cuda.OPTIONS) :])
        self.compiled += 1
        pairs = (o[2:].split("=") for o in options if o.startswith("-D"))
        macros = tuple((key, int(value)) for key, value in pairs)

        def function(grid, block, arguments, shared_mem, stream) -> None:
            self.streams.append(stream.ptr)
            (job,) = arguments
            assert job.size == 1  # CuPy's condition for an array passed by value
            pointer = job.__array_interface__["data"][0]
            data = ctypes.string_at(pointer, job.dtype.itemsize)
            self.shim(Launch(name, macros, grid, block[0], data))

        return types.SimpleNamespace(kernel=function)


@pytest.fixture
def cupy(shim, monkeypatch) -> FakeCupy:
    fake = FakeCupy(shim)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    stream = types.SimpleNamespace(cuda_stream=77)
    # A CUDA build of torch without a GPU would ask the driver.
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", None, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: stream)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    return fake


@pytest.fixture
def runner(cupy) -> cuda.Runner:
    found = cuda.Runner(torch.device("cuda", 0))
    found.device = CPU  # where the tensors of these tests are
    return found


@pytest.fixture
def launched(runner, monkeypatch) -> cuda.Runner:
    """The runner that tasks take."""
    monkeypatch.setattr(dispatch, "cuda_runner", lambda *_: runner)
    return runner


def encode_now(x: torch.Tensor) -> torch.Tensor:
    wire = torch.zeros(len(x), CODEC.wire_bytes(x.shape[1]), dtype=torch.uint8)
    encode(CODEC, x, wire, address=ADDRESS)
    return wire


def test_every_launch_of_a_kernel_asks_for_the_stream(cupy, launched, monkeypatch) -> None:
    """DeepSpeed reduces on a stream of its own, and a graph capture records on another one."""
    for current in (5, 6, 5):
        stream = types.SimpleNamespace(cuda_stream=current)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda index, stream=stream: stream)
        x = torch.randn(2, 130)
        assert torch.equal(encode_now(x), expected(CODEC, x))
    assert cupy.streams == [5, 6, 5]
    assert cupy.compiled == 1 and cupy.devices == [0]


def test_a_launch_switches_to_the_runners_device_and_back(cupy, monkeypatch) -> None:
    """CuPy launches on the current device, whatever stream it is given."""
    current, launched = [0], []

    @contextmanager
    def on(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", on)
    compiled = lambda kernel, macros: lambda *work: launched.append(current[-1])  # noqa: E731
    monkeypatch.setattr(cuda, "compiled", compiled)
    second = cuda.Runner(torch.device("cuda", 1))
    monkeypatch.setattr(dispatch, "cuda_runner", lambda *_: second)
    encode_now(torch.randn(1, 128))
    assert launched == [1] and current == [0]


@pytest.mark.parametrize("what", ["values", "base"])
@pytest.mark.parametrize("skewed", ["nothing", "address", "stride"])
def test_rows_that_are_not_aligned_take_the_careful_variant(what: str, skewed: str) -> None:
    """The other one loads 16 bytes at once, which a GPU refuses elsewhere."""
    numel = launch.whole_numel([CODEC])
    tensors = {"values": torch.zeros(2, numel), "base": torch.zeros(2, numel)}
    odd = torch.zeros(2, numel + 1) if skewed == "stride" else torch.zeros(2, numel + 4)
    tensors[what] = {"address": odd[:, 1:-3], "stride": odd[:, :-1], "nothing": odd[:, 4:]}[skewed]
    values, base = tensors.values()
    out = torch.empty(2, CODEC.wire_bytes(numel), dtype=torch.uint8)
    operation = Encode(CODEC, numel, 0, 1, 0, base=2)
    step = Offsets(values=values.stride(0), base=base.stride(0), wire=out.stride(0))
    tasks = [(operation, step.times(row)) for row in range(2)]
    (table,) = tables_of(tasks, [values, out, base])
    assert dict(table.macros)["DSQ_WHOLE"] == (skewed == "nothing")


@pytest.mark.parametrize("changed", ["dtype", "alignment"])
def test_tables_are_compiled_anew_for_other_buffers(changed: str) -> None:
    device = torch.device("cuda", 0)

    def buffers(dtype: torch.dtype, address: int) -> list[types.SimpleNamespace]:
        first = types.SimpleNamespace(device=device, dtype=dtype, data_ptr=lambda: address)
        return [first, types.SimpleNamespace(dtype=torch.uint8, data_ptr=lambda: 64)]

    usual = dispatch.variant_of(buffers(torch.float32, 32))
    assert usual == dispatch.variant_of(buffers(torch.float32, 96))
    other = (torch.bfloat16, 32) if changed == "dtype" else (torch.float32, 40)
    assert usual != dispatch.variant_of(buffers(*other))


@pytest.mark.parametrize("group_size", (8192, 288, 96))
def test_order_of_warps_does_not_matter(cuda_kernels, shim, monkeypatch, group_size: int) -> None:
    """A race between warps of a block would show as a difference from the page.

    The shim runs the warps of a block from the last to the first. On a GPU a race would make
    messages differ from run to run.
    """
    monkeypatch.setattr(shim, "reversed_warps", True)
    for formula in ({"rounding": "random_shift"}, {"levels": "learned"}, {"range": "absmax"}):
        codec = GroupCodec(bits=5, group_size=group_size, **formula)
        program = Program([Encode(codec, 3 * group_size + 5, X, WIRE, 0)] * 2)
        check(cuda_kernels, program, streams_of([codec]), values=kinds_of(codec))


def test_no_option_lets_the_compiler_round_differently() -> None:
    """Kernels equal the reference bit for bit; --use_fast_math would fuse, flush and approximate.
    test_compile.py takes the same options.
    """
    assert cuda.OPTIONS == ("--std=c++17", "-fmad=false")


def test_threads_launch_on_their_own_streams(cupy, launched, monkeypatch) -> None:
    """Both have said which stream they want before either launch looks."""
    mine, met, streams = threading.local(), threading.Barrier(2, timeout=30), {}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: mine)

    def function(grid, block, arguments, shared_mem, stream) -> None:
        met.wait()
        streams[threading.get_ident()] = stream.ptr

    def work(address: int) -> tuple[int, int]:
        mine.cuda_stream = address
        encode_now(torch.randn(1, 128))
        return address, streams[threading.get_ident()]

    monkeypatch.setattr(cuda, "compiled", lambda kernel, macros: function)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(work, (100, 200))) == [(100, 100), (200, 200)]


@pytest.mark.parametrize(
    ("driver", "compiler", "room"),
    [
        (12010, (12, 1), launch.ROOM),
        (13000, (12, 0), 4096),
        (12000, (13, 2), 4096),
        (13010, (13, 0), launch.ROOM),
    ],
)
def test_more_jobs_than_arguments_may_hold_take_several_launches(
    cupy, runner, driver: int, compiler: tuple[int, int], room: int
) -> None:
    """Jobs have one or several blocks, and some have two rows."""
    cupy.driver, cupy.compiler = driver, compiler
    numels = [(3000, 40, 2048, 5)[i % 4] for i in range(600)]
    x, works = torch.randn(sum(numels)), []
    out = torch.zeros(len(x), dtype=torch.bfloat16)
    for place, (start, numel) in enumerate(
        zip(accumulate(numels, initial=0), numels, strict=False)
    ):
        rows = 1 + (place % 100 == 50)
        plan = launch.cast_plan(torch.float32, torch.bfloat16, numel // rows, numel // rows)
        fields = {"source": x[start:].data_ptr(), "values": out[start:].data_ptr()}
        if rows > 1:
            fields |= {"source_row": 4 * numel // rows, "values_stride": 2 * numel // rows}
        works.append((plan, rows, plan.fields | fields))
    plans, rows, jobs = zip(*works, strict=True)
    runner.run_tables([table_of(plans, rows, records_of(fields_of("cast"), jobs))])
    assert torch.equal(out, x.bfloat16())
    most = (room - 16) // (8 * len(FIELDS["cast"]))
    assert len(cupy.streams) == -(-len(works) // most)


def test_the_probe_of_a_device_accepts_right_numbers_and_no_others(cuda_kernels) -> None:
    cuda._probe(cuda_kernels)
    cuda_kernels.run_tables = lambda tables: None
    with pytest.raises(RuntimeError, match="wrong numbers"):
        cuda._probe(cuda_kernels)


def broken(*_args) -> None:
    raise RuntimeError("no NVRTC\nsecond line")


@pytest.mark.parametrize("fault", ("missing", "other version", "compiler"))
def test_broken_cupy_gives_one_line_and_the_torch_path(
    fault, cupy, shim, monkeypatch, caplog
) -> None:
    if fault == "missing":
        monkeypatch.setitem(sys.modules, "cupy", None)
    elif fault == "other version":
        monkeypatch.setitem(sys.modules, "cupy", FakeCupy(shim, version=12090))
    monkeypatch.setattr(cuda, "_probe", broken)
    cuda.runner_of.cache_clear()
    cuda._failures.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert dispatch.cuda_runner(torch.device("cuda", 0), "auto") is None
    found = cuda.failure_of(torch.device("cuda", 0))
    assert "Traceback" in found.traceback
    assert ("second line" in found.traceback) == (fault == "compiler")
    cuda.runner_of.cache_clear()
    (record,) = caplog.records
    message = record.getMessage()
    assert "\n" not in message and "torch path" in message and "ds_quant[cuda13]" in message
    wanted = {"missing": "cupy", "other version": "CUDA 12", "compiler": "no NVRTC"}[fault]
    assert wanted in message
    shown = logging.Formatter().format(record)
    assert ("in broken" in shown and "second line" in shown) == (fault == "compiler")


def test_an_old_device_is_named_and_nothing_is_to_be_installed(cupy, monkeypatch, caplog) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(cuda, "_probe", broken)  # is not reached
    cuda.runner_of.cache_clear()
    with caplog.at_level(logging.WARNING):
        found = cuda.failure_of(device)
    cuda.runner_of.cache_clear()
    assert found.reason == "the kernels need sm_80 (A100) or newer, this GPU is sm_75"
    assert "newer GPU" in found.fix and found.traceback == ""
    (record,) = caplog.records
    assert found.reason in record.getMessage() and "pip" not in record.getMessage()
    assert record.exc_info is None


def test_torch_backend_is_never_asked_about_cupy(monkeypatch) -> None:
    monkeypatch.setattr(cuda, "runner_of", broken)
    device = torch.device("cuda", 0)
    assert dispatch.cuda_runner(device, "torch") is None


def test_unwritable_home_moves_the_cache(cupy, monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    monkeypatch.setattr(cuda.os, "access", lambda path, mode: False)
    cuda._import_cupy()
    assert "ds_quant_cupy" in os.environ.pop("CUPY_CACHE_DIR")


@pytest.mark.parametrize("prepared", ["nothing", "own", "open to others", "link", "other user"])
def test_a_cache_that_somebody_else_may_have_filled_is_not_used(
    prepared: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    user = os.getuid()
    path = tmp_path / f"ds_quant_cupy_{user}"
    if prepared == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "elsewhere")
    elif prepared != "nothing":
        path.mkdir()
        path.chmod(0o777 if prepared == "open to others" else 0o700)
    monkeypatch.setattr(cuda.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if prepared == "other user":
        stranger = tmp_path / f"ds_quant_cupy_{user + 1}"
        path.rename(stranger)
        monkeypatch.setattr(cuda.os, "getuid", lambda: user + 1)
    folder = Path(cuda._own_folder())
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder == path) is (prepared in ("nothing", "own"))
    assert folder != tmp_path / f"ds_quant_cupy_{user + 1}"


def test_groups_beyond_the_kernels_are_reported_once(launched, caplog) -> None:
    dispatch._warn_of_group_size.cache_clear()
    codec = GroupCodec(group_size=65536)
    assert launch.supports(GroupCodec(group_size=8192)) and not launch.supports(codec)
    assert not launch.supports(GroupCodec(group_size=96), 64)
    x, wire = torch.zeros(1, 9), torch.empty(1, codec.wire_bytes(9), dtype=torch.uint8)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            encode(codec, x, wire)
    (record,) = caplog.records
    assert "group_size = 65536" in record.getMessage()
