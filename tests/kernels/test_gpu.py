"""The kernels on a GPU: bytes, streams, CUDA graphs, threads.

Cases of test_numbers.py, and what only a GPU shows. Needs CuPy: without it every test fails, none
is skipped.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ds_quant.codec.bound import decode, encode
from ds_quant.codec.codec import GroupCodec
from ds_quant.comm.topology import Topology
from ds_quant.comm.traffic import Traffic
from ds_quant.comm.transport import Communicator
from ds_quant.kernels import cuda, dispatch, launch_batch, lossless, reference
from ds_quant.kernels.cuda import source
from tests.kernels.backends import Kernels, skewed
from tests.kernels.inputs import (
    CODECS,
    DTYPES,
    GAUSSIAN,
    KINDS,
    awkward,
    id_of,
    large_rows,
    learned,
    table,
)
from tests.kernels.programs import ADDRESS, assert_values, decoded, expected
from tests.kernels.test_numbers import *  # noqa: F403
from tests.kernels.test_numbers import INT4
from tests.lossless_inputs import DTYPES as LOSSLESS_DTYPES
from tests.lossless_inputs import LARGE_NUMELS as LOSSLESS_NUMELS
from tests.lossless_inputs import SORTS, decode_rows, message_of, mixed

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def runner() -> cuda.Runner:
    found = cuda.runner_of(DEVICE)
    assert found is not None, "CuPy does not work here; the warning above says why"
    return found


@pytest.fixture
def cuda_kernels(runner, monkeypatch) -> Kernels:
    found = Kernels("gpu", DEVICE, runner)
    monkeypatch.setattr(dispatch, "cuda_runner", found.runner)
    return found


@pytest.fixture
def kernels(cuda_kernels) -> Kernels:
    return cuda_kernels


@pytest.fixture
def all_kernels(cuda_kernels, nothing_left) -> Kernels:
    return cuda_kernels


def on_gpu(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(DEVICE)


def encode_now(x: torch.Tensor) -> torch.Tensor:
    """On the current stream."""
    out = torch.empty(len(x), INT4.wire_bytes(x.shape[1]), dtype=torch.uint8, device=DEVICE)
    encode(INT4, x, out, address=ADDRESS)
    return out


@pytest.mark.parametrize("index", range(len(CODECS)), ids=lambda i: id_of(CODECS[i]))
def test_large_rows_equal_the_reference(kernels, index: int) -> None:
    codec, dtype = CODECS[index], DTYPES[index % 3]
    for numel, skew in large_rows(codec):
        x = awkward(2 * numel, codec.group_size, sorted(KINDS), seed=index).view(2, numel).to(dtype)
        wanted, levels = expected(codec, x), on_gpu(learned(codec))
        out = torch.full(wanted.shape, 0x55, dtype=torch.uint8, device=DEVICE)
        encode(codec, skewed(x, skew, DEVICE), out, address=ADDRESS, levels=levels)
        assert torch.equal(out.cpu(), wanted)
        values = skewed(torch.zeros(2, numel, dtype=dtype), skew, DEVICE)
        decode(codec, out, values, levels=levels)
        assert_values(values, decoded(codec, wanted, numel))


def lossless_wire(values: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """A message by the reference, on the CPU."""
    out = torch.empty(lossless.max_bytes(values.numel()), dtype=torch.uint8)
    used = torch.zeros(1, dtype=torch.int64)
    lossless.encode(values, before, out, used)
    return out[: used.item()]


@pytest.mark.parametrize("skew", (0, 3))
@pytest.mark.parametrize("dtype", LOSSLESS_DTYPES, ids=str)
@pytest.mark.parametrize("numel", LOSSLESS_NUMELS)
def test_lossless_differences(runner, numel: int, dtype: torch.dtype, skew: int) -> None:
    values, before = mixed(list(SORTS), numel, dtype, seed=numel)
    wanted = lossless_wire(values, before)
    gpu, old = (skewed(x[None], skew, DEVICE)[0] for x in (values, before))
    out = torch.full((lossless.max_bytes(numel),), 0x55, dtype=torch.uint8, device=DEVICE)
    used = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    launch_batch.encode_lossless([(gpu, old, out)], used, run_tables=runner.run_tables)
    message = out[: used.item()].clone()
    assert torch.equal(message.cpu(), wanted)
    for into in (torch.empty_like(old), old):  # the second one in place
        decode_rows(message, [0], [len(message)], old[None], into[None])
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
    decode_rows(wire, starts, lengths, old, out)
    assert torch.equal(out.cpu().view(torch.int16), values.view(torch.int16))
    wire[int(starts[3]) + 20] ^= 0x40
    with pytest.raises(ValueError, match="lossless message"):
        decode_rows(wire, starts, lengths, old, out)


def test_torch_path_on_the_gpu_gives_the_same_lossless_messages() -> None:
    values, before = mixed(list(SORTS), 70_001, torch.bfloat16, seed=0)
    old = on_gpu(before)
    message = message_of(on_gpu(values), old, "torch")
    assert torch.equal(message.cpu(), lossless_wire(values, before))
    decode_rows(message, [0], [len(message)], old[None], old[None], "torch")
    assert torch.equal(old.cpu().view(torch.int16), values.view(torch.int16))


def test_torch_path_on_the_gpu_gives_the_same_bytes() -> None:
    for codec in (*CODECS, *GAUSSIAN):
        numel = 79 * 128 if codec.is_gaussian else 10_001
        x = torch.randn(2, numel).bfloat16()
        out = torch.empty(2, codec.wire_bytes(numel), dtype=torch.uint8, device=DEVICE)
        levels = on_gpu(table(codec))
        reference.encode(on_gpu(x), out, codec, address=ADDRESS, levels=levels)
        assert torch.equal(out.cpu(), expected(codec, x)), codec.name


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


def test_side_streams_and_threads(kernels) -> None:
    """Threads that launch at once, each on a stream of its own behind a sleep of its own."""
    x = torch.randn(1, 1 << 20)
    wanted, found, errors = expected(INT4, x), {}, []
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
                outs = [encode_now(values) for _ in range(20)]
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
    assert torch.equal(out.cpu(), expected(INT4, x.cpu()))


def test_groups_of_a_world_bound_to_its_device_carry_gathers_on_three_streams(monkeypatch) -> None:
    """Three splits of one communicator, each with options of its own, and 16 gathers on them."""
    from ds_quant.runtime.groups import level_groups

    dist = torch.distributed
    monkeypatch.setattr("ds_quant.runtime.groups._level_groups", {})
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=DEVICE)
    try:
        topology = Topology(world=1, node_size=1)
        groups = level_groups(
            topology, device=DEVICE, has_streams=True, least=lambda numbers: numbers
        )
        options = [group._get_backend(DEVICE).options for group in groups]
        assert len({id(one) for one in options}) == len(set(map(id, groups))) == 3
        how = {"topology": topology, "traffic": Traffic(), "dist": dist}
        links = [Communicator(group, **how) for group in groups]
        streams, waiting, read = [torch.cuda.Stream() for _ in links], torch.cuda.Stream(), []
        for turn in range(16):
            with torch.cuda.stream(streams[turn % 3]):
                payload = torch.full((1 << 20,), turn, dtype=torch.uint8, device=DEVICE)
                exchange = links[turn % 3].all_gather(payload, role="weights")
                del payload
            with torch.cuda.stream(waiting):
                torch.cuda._sleep(1_000_000)
                read.append(exchange.wait().clone())
            del exchange
        torch.cuda.synchronize()
        assert all(bool((found == turn).all()) for turn, found in enumerate(read))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def link() -> Iterator[Communicator]:
    """Over a process group of this process alone, without DeepSpeed."""
    dist = torch.distributed
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Communicator(
            None, topology=Topology(world=1, node_size=1), traffic=Traffic(), dist=dist
        )
    finally:
        dist.destroy_process_group()


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


def test_more_than_2_to_the_31_elements(kernels) -> None:
    numel = (1 << 31) + 4099
    if torch.cuda.get_device_properties(DEVICE).total_memory < 12 * numel:
        pytest.skip("needs 26 GB of GPU memory")
    x = torch.zeros(1, numel, dtype=torch.bfloat16, device=DEVICE)
    x[0, -4099:] = on_gpu(torch.randn(4099).bfloat16())
    codec = GroupCodec(bits=8, group_size=4096, range="absmax")
    wire = torch.empty(1, codec.wire_bytes(numel), dtype=torch.uint8, device=DEVICE)
    encode(codec, x, wire)
    out = torch.empty_like(x)
    decode(codec, wire, out)
    start = numel // 4096 * 4096 - 4096
    small = decoded(codec, expected(codec, x[:, start:].cpu()), numel - start)
    assert_values(out[:, start:], small)
    assert not out[0, : numel - 4099].any()
