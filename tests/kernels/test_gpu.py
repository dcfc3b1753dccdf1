"""The kernels on a GPU: the bytes of the reference, streams, CUDA graphs, threads.

The reference is computed on the CPU. Needs CuPy: without it every test fails, none is skipped.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ds_quant.codec.codec import GroupCodec
from ds_quant.codec.lossless import LosslessCodec
from ds_quant.comm.transport import Link
from ds_quant.kernels import cuda, launch, launch_lossless, lossless, reference
from ds_quant.kernels.cuda import source
from ds_quant.kernels.geometry import Stores
from ds_quant.kernels.launch import FIELDS, merge
from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.reference import BlockRotation
from tests.kernels import tables
from tests.kernels.inputs import (
    CODECS,
    DTYPES,
    GAUSSIAN,
    KINDS,
    awkward,
    id_of,
    rotated,
    rotated_back,
    table,
)
from tests.kernels.links import alone
from tests.lossless_inputs import DTYPES as LOSSLESS_DTYPES
from tests.lossless_inputs import SORTS, mixed

pytestmark = pytest.mark.gpu

ADDRESS = Address(key=0x0123456789ABCDEF, step=(1 << 33) + 1, first_vector=(1 << 32) - 5)
INT4 = GroupCodec(bits=4, group_size=128, range="absmax", rounding="stochastic")
DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def runner() -> cuda.Runner:
    found = cuda.runner_of(DEVICE)
    assert found is not None, "CuPy does not work here; the warning above says why"
    return found


def on_gpu(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(DEVICE)


def skewed(x: torch.Tensor, skew: int) -> torch.Tensor:
    """A copy of x (rows, numel) on the GPU whose rows start `skew` elements off an allocation."""
    buffer = torch.empty(x.shape[0], x.shape[1] + skew, dtype=x.dtype, device=DEVICE)
    return buffer[:, skew:].copy_(x)


def wire_of(codec, x: torch.Tensor) -> torch.Tensor:
    """By the reference, on the CPU."""
    out = torch.empty(x.shape[0], codec.wire_bytes(x.shape[1]), dtype=torch.uint8)
    reference.encode(x, out, codec, address=ADDRESS, levels=table(codec))
    return out


def encoded(runner, codec, x: torch.Tensor, on_wire: int = 0, **options) -> torch.Tensor:
    nbytes = codec.wire_bytes(on_wire or x.shape[1])
    out = torch.full((x.shape[0], nbytes), 0x55, dtype=torch.uint8, device=DEVICE)
    levels = on_gpu(table(codec))
    launch.encode(x, out, codec, address=ADDRESS, levels=levels, run=runner, **options)
    return out.cpu()


def assert_values(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal bits; a NaN may have any sign and payload."""
    found, wanted = found.cpu(), wanted.to(found.dtype)
    kind = {2: torch.int16, 4: torch.int32}[found.element_size()]
    same = found.contiguous().view(kind) == wanted.contiguous().view(kind)
    assert torch.all(same | (found.isnan() & wanted.isnan()))


@pytest.mark.parametrize("numel_of", ("whole", "ragged"))
@pytest.mark.parametrize("index", range(len(CODECS)), ids=lambda i: id_of(CODECS[i]))
def test_bytes_and_values_equal_the_reference(runner, index: int, numel_of: str) -> None:
    codec, dtype = CODECS[index], DTYPES[index % 3]
    numel = 1 << 18 if codec.group_size & (codec.group_size - 1) == 0 else 256 * codec.group_size
    skew = 0
    if numel_of == "ragged":
        numel, skew = numel - 77, 3
    x = awkward(2 * numel, codec.group_size, sorted(KINDS), seed=index).view(2, numel).to(dtype)
    wanted = wire_of(codec, x)
    assert torch.equal(encoded(runner, codec, skewed(x, skew)), wanted)
    values = torch.empty(2, numel)
    reference.decode(wanted, values, codec, levels=table(codec))
    out = skewed(torch.zeros(2, numel, dtype=dtype), skew)
    launch.decode(on_gpu(wanted), out, codec, levels=on_gpu(table(codec)), run=runner)
    assert_values(out, values)


@pytest.mark.parametrize("block, flips", [(32, None), (64, 0xF00D), (128, (5 << 96) | 77)], ids=str)
def test_rotation_difference_and_own_rows(runner, block: int, flips: int | None) -> None:
    rotation, numel = BlockRotation(block, flips), 50_001
    x, base = torch.randn(8, numel).bfloat16(), torch.randn(8, numel)
    turned = rotated(x.float() - base, block, flips)
    wanted = wire_of(INT4, turned)
    options = {"base": on_gpu(base), "rotation": rotation, "on_wire": turned.shape[1]}
    assert torch.equal(encoded(runner, INT4, on_gpu(x), **options), wanted)

    rows = torch.empty(8, turned.shape[1])
    reference.decode(wanted, rows, INT4, levels=None)
    rows[3] = turned[3]
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    out = torch.empty(numel, device=DEVICE)
    own = (3, on_gpu(turned[3]))
    options = {"scale": 0.125, "levels": None, "own": own, "rotation": rotation}
    others = torch.cat([wanted[:3], wanted[4:]])
    launch.decode_sum(on_gpu(others), out, INT4, run=runner, **options)
    assert_values(out, rotated_back(total, block, flips, 0.125)[:numel])


@pytest.mark.parametrize("codec", GAUSSIAN, ids=id_of)
def test_gaussian_levels(runner, codec: GroupCodec) -> None:
    flips, numel, levels = (5 << 96) | 77, 50_001, on_gpu(table(codec))
    rotation = BlockRotation(128, flips)
    x = awkward(4 * numel, 128, sorted(KINDS), seed=codec.bits).view(4, numel).bfloat16()
    turned = rotated(x.float(), 128, flips)
    wire, total = wire_of(codec, turned), torch.empty(turned.shape[1])
    options = {"rotation": rotation, "on_wire": turned.shape[1]}
    assert torch.equal(encoded(runner, codec, on_gpu(x), **options), wire)

    reference.decode_sum(wire, total, codec, scale=1.0, own=None, levels=table(codec))
    out, anew = torch.empty(numel, device=DEVICE), on_gpu(torch.empty_like(wire[:1]))
    options = {"scale": 0.25, "levels": levels, "rotation": rotation, "run": runner}
    launch.decode_sum(on_gpu(wire), out, codec, **options)
    assert_values(out, rotated_back(total, 128, flips, 0.25)[:numel])
    options = {"numel": total.numel(), "address": None, "levels": levels, "source_levels": levels}
    launch.recode(on_gpu(wire)[None], anew, codec, codec, run=runner, **options)
    assert torch.equal(anew.cpu(), wire_of(codec, total[None]))


def test_recode_equals_decode_sum_encode(runner) -> None:
    source_codec = GroupCodec(bits=8, group_size=128, range="absmax")
    numel = 100_003
    wire = wire_of(source_codec, torch.randn(8, numel))
    total = torch.empty(numel)
    reference.decode_sum(wire, total, source_codec, scale=1.0, own=None, levels=None)
    out = torch.empty(1, INT4.wire_bytes(numel), dtype=torch.uint8, device=DEVICE)
    options = {"numel": numel, "address": ADDRESS, "run": runner}
    launch.recode(on_gpu(wire)[None], out, source_codec, INT4, **options)
    assert torch.equal(out.cpu(), wire_of(INT4, total[None]))


def lossless_wire(values: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """A message by the reference, on the CPU."""
    out = torch.empty(lossless.max_bytes(values.numel()), dtype=torch.uint8)
    used = torch.zeros(1, dtype=torch.int64)
    lossless.encode(values, before, out, used)
    return out[: used.item()]


@pytest.mark.parametrize("skew", (0, 3))
@pytest.mark.parametrize("dtype", LOSSLESS_DTYPES, ids=str)
@pytest.mark.parametrize("numel", (1, 2048, 70_001, 2048 * 2048 + 3000))  # a second turn of a scan
def test_lossless_differences(runner, numel: int, dtype: torch.dtype, skew: int) -> None:
    values, before = mixed(list(SORTS), numel, dtype, seed=numel)
    wanted = lossless_wire(values, before)
    gpu, old = (skewed(x[None], skew)[0] for x in (values, before))
    out = torch.full((lossless.max_bytes(numel),), 0x55, dtype=torch.uint8, device=DEVICE)
    used = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    launch_lossless.encode(gpu, old, out, used, run=runner)
    message = out[: used.item()].clone()
    assert torch.equal(message.cpu(), wanted)
    for into in (torch.empty_like(old), old):  # the second one in place
        rows = np.array([0]), np.array([message.numel()]), old[None], into[None]
        launch_lossless.decode_rows(message, *rows, run_tables=runner.run_tables)
        assert torch.equal(into.cpu().view(torch.int16), values.view(torch.int16))


def test_lossless_rows_of_one_message_and_damage(runner) -> None:
    """As gathered: a message per rank, of lengths of their own, into the rows of a parameter."""
    rows, numel = 8, 10_007
    pairs = [mixed([SORTS[row % len(SORTS)]], numel, torch.bfloat16, row) for row in range(rows)]
    values, before = (torch.stack(each) for each in zip(*pairs, strict=True))
    messages = [lossless_wire(*each) for each in pairs]
    lengths = np.array([message.numel() for message in messages])
    starts, wire = lengths.cumsum() - lengths, on_gpu(torch.cat(messages))
    out, old = on_gpu(torch.zeros_like(before)), on_gpu(before)
    codec = LosslessCodec()
    codec.decode_rows(wire, starts, lengths, old, out)
    assert torch.equal(out.cpu().view(torch.int16), values.view(torch.int16))
    wire[int(starts[3]) + 20] ^= 0x40
    with pytest.raises(ValueError, match="lossless message"):
        codec.decode_rows(wire, starts, lengths, old, out)


def test_torch_path_on_the_gpu_gives_the_same_lossless_messages() -> None:
    values, before = mixed(list(SORTS), 70_001, torch.bfloat16, seed=0)
    codec, gpu, old = LosslessCodec(backend="torch"), on_gpu(values), on_gpu(before)
    out = torch.zeros(codec.max_bytes(values.numel()), dtype=torch.uint8, device=DEVICE)
    used = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    codec.encode(gpu, old, out, used)
    message = out[: used.item()].clone()
    assert torch.equal(message.cpu(), lossless_wire(values, before))
    codec.decode(message, old, old)
    assert torch.equal(old.cpu().view(torch.int16), values.view(torch.int16))


def test_torch_path_on_the_gpu_gives_the_same_bytes() -> None:
    for codec in (*CODECS, *GAUSSIAN):
        numel = 79 * 128 if codec.is_gaussian else 10_001
        x = torch.randn(2, numel).bfloat16()
        out = torch.empty(2, codec.wire_bytes(numel), dtype=torch.uint8, device=DEVICE)
        levels = on_gpu(table(codec))
        reference.encode(on_gpu(x), out, codec, address=ADDRESS, levels=levels)
        assert torch.equal(out.cpu(), wire_of(codec, x)), codec.name


RECIPROCALS = """
extern "C" __global__ void reciprocals(u64 out, u32 exponent) {
    const u32 mantissa = blockIdx.x * 256 + threadIdx.x;
    ((float*)out)[mantissa] = reciprocal(float_of(exponent << 23 | mantissa));
}
"""


def test_reciprocal_is_correctly_rounded_for_every_mantissa(runner) -> None:
    import cupy

    text = source("encode").split('extern "C"')[0] + RECIPROCALS
    kernel = cupy.RawKernel(text, "reciprocals", options=cuda.OPTIONS)
    out = torch.empty(1 << 23, device=DEVICE)
    for exponent in (20, 28, 127, 252):  # 2^-107 to below 2^126
        kernel(((1 << 23) // 256,), (256,), (out.data_ptr(), cupy.uint32(exponent)))
        torch.cuda.synchronize()
        bits = (exponent << 23) + torch.arange(1 << 23, dtype=torch.int32)
        assert torch.equal(out.cpu(), 1.0 / bits.view(torch.float32)), exponent


def test_side_streams_and_threads(runner) -> None:
    """Threads that launch at once, each on a stream of its own behind a sleep of its own."""
    x = torch.randn(1, 1 << 20)
    wanted, found, errors = wire_of(INT4, x), {}, []
    met = threading.Barrier(4, timeout=60)

    def work(number: int) -> None:
        try:
            torch.cuda.set_device(DEVICE)
            stream = torch.cuda.Stream(DEVICE)
            with torch.cuda.stream(stream):
                values = torch.zeros(1, 1 << 20, device=DEVICE)
                met.wait()
                torch.cuda._sleep(2_000_000 * (1 + number))
                values.copy_(on_gpu(x))  # a launch on another stream would read zeros
                outs = []
                for _ in range(20):
                    outs.append(torch.empty(wanted.shape, dtype=torch.uint8, device=DEVICE))
                    launch.encode(values, outs[-1], INT4, address=ADDRESS, levels=None, run=runner)
                stream.synchronize()
            found[number] = [out.cpu() for out in outs]
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for outs in found.values():
        assert all(torch.equal(out, wanted) for out in outs)


@pytest.mark.parametrize("codec", CODECS[::5], ids=id_of)
def test_torch_path_on_two_streams_at_once(codec) -> None:
    """One thread, the first stream asleep while the second one is given its work."""
    inputs = [torch.randn(1, 300_001), torch.randn(1, 400_001)]
    wanted = [wire_of(codec, x) for x in inputs]
    gpu, levels = [on_gpu(x) for x in inputs], on_gpu(table(codec))
    outs = [torch.empty(wire.shape, dtype=torch.uint8, device=DEVICE) for wire in wanted]
    torch.cuda.synchronize()
    for x, out in zip(gpu, outs, strict=True):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(50_000_000)
            reference.encode(x, out, codec, address=ADDRESS, levels=levels)
    torch.cuda.synchronize()
    for out, wire in zip(outs, wanted, strict=True):
        assert torch.equal(out.cpu(), wire)


def test_torch_path_does_not_wait_for_its_stream() -> None:
    x = on_gpu(torch.randn(1, 100_000))
    out = torch.empty(1, INT4.wire_bytes(100_000), dtype=torch.uint8, device=DEVICE)
    for _ in range(2):  # the first one loads torch's kernels
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # about a second
        end = torch.cuda.Event()
        reference.encode(x, out, INT4, address=ADDRESS, levels=None)
        end.record()
        asleep = not end.query()
    assert asleep, "the host has waited for the device"
    torch.cuda.synchronize()
    assert torch.equal(out.cpu(), wire_of(INT4, x.cpu()))


@pytest.fixture
def link() -> Iterator[Link]:
    with alone("nccl") as made:
        yield made


def test_an_exchange_waited_for_on_another_stream_keeps_its_buffers(link) -> None:
    numel = 1 << 22
    posting, waiting = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for turn in range(4):
        with torch.cuda.stream(posting):
            payload = torch.full((numel,), turn, dtype=torch.uint8, device=DEVICE)
            exchange = link.all_gather(payload, role="weights")
            del payload
        with torch.cuda.stream(waiting):
            received = exchange.wait()
            torch.cuda._sleep(20_000_000)
            read = received.clone()
        del exchange, received
        with torch.cuda.stream(posting):  # takes freed memory of its stream at once
            others = [torch.full((numel,), 0x55, dtype=torch.uint8, device=DEVICE) for _ in "abc"]
        torch.cuda.synchronize()
        assert bool((read == turn).all())
        del others


@pytest.mark.parametrize("kind", tables.KINDS)
def test_tables_of_every_kernel(kind: str, runner) -> None:
    cases, launches = list(tables.KINDS[kind](DEVICE)), []
    for case in cases:
        case.call(launches.append)
    runner.run_many(launches)
    for case in cases:
        assert torch.equal(case.found.cpu(), case.wanted)


@pytest.mark.parametrize("staged", (False, True), ids=("by lane", "through shared_memory"))
@pytest.mark.parametrize("run", (1, 2, 4, 8))
def test_every_way_of_storing_writes_the_same_values(runner, run: int, staged: bool) -> None:
    for numel, dtype in ((1 << 16, torch.float32), (70_001, torch.bfloat16)):
        wire = wire_of(INT4, torch.randn(4, numel))
        wanted = torch.empty(numel)
        reference.decode_sum(wire, wanted, INT4, scale=0.25, own=None, levels=None)
        out = torch.zeros(numel, dtype=dtype, device=DEVICE)
        options = {"scale": 0.25, "levels": None, "stores": Stores(run, staged)}
        launch.decode_sum(on_gpu(wire), out, INT4, run=runner, **options)
        assert_values(out, wanted)


def test_replayed_graph_takes_the_step_from_its_buffer(runner) -> None:
    x, launches = on_gpu(torch.randn(1, 100_000)), []
    out = torch.empty(1, INT4.wire_bytes(100_000), dtype=torch.uint8, device=DEVICE)
    zero = Address(key=ADDRESS.key, step=0, first_vector=ADDRESS.first_vector)
    launch.encode(x, out, INT4, address=zero, levels=None, run=launches.append)
    (work,) = merge(launches)
    buffer = torch.frombuffer(bytearray(work.written), dtype=torch.uint8).to(DEVICE)
    step = buffer.view(torch.int64)[FIELDS["encode"].index("step")]
    runner.run_table(work, buffer)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runner.run_table(work, buffer)
    for number in (1, ADDRESS.step):
        step.fill_(number)
        graph.replay()
    assert torch.equal(out.cpu(), wire_of(INT4, x.cpu()))


def test_many_tensors_take_one_launch(runner) -> None:
    tensors = [torch.randn(1 + i % 3, 1 + 997 * i) for i in range(40)]
    launches, outs = [], []
    for x in tensors:
        outs.append(torch.empty(x.shape[0], INT4.wire_bytes(x.shape[1]), dtype=torch.uint8))
        outs[-1] = on_gpu(outs[-1])
    gpu = [on_gpu(x) for x in tensors]
    for x, out in zip(gpu, outs, strict=True):
        launch.encode(x, out, INT4, address=ADDRESS, levels=None, run=launches.append)
    runner.run_many(launches)
    for x, out in zip(tensors, outs, strict=True):
        assert torch.equal(out.cpu(), wire_of(INT4, x))


def test_more_than_2_to_the_31_elements(runner) -> None:
    numel = (1 << 31) + 4099
    if torch.cuda.get_device_properties(DEVICE).total_memory < 12 * numel:
        pytest.skip("needs 26 GB of GPU memory")
    x = torch.zeros(1, numel, dtype=torch.bfloat16, device=DEVICE)
    x[0, -4099:] = on_gpu(torch.randn(4099).bfloat16())
    codec = GroupCodec(bits=8, group_size=4096, range="absmax")
    wire = torch.empty(1, codec.wire_bytes(numel), dtype=torch.uint8, device=DEVICE)
    launch.encode(x, wire, codec, address=None, levels=None, run=runner)
    out = torch.empty_like(x)
    launch.decode(wire, out, codec, levels=None, run=runner)
    start = numel // 4096 * 4096 - 4096
    small = torch.empty(1, numel - start)
    reference.decode(wire_of(codec, x[:, start:].cpu()), small, codec, levels=None)
    assert_values(out[:, start:], small)
    assert not out[0, : numel - 4099].any()
