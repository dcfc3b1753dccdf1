"""What benchmarks/kernels.py measures: operations, their bytes, and rival ways to do them.

An operation at one size has several rotating sets of tensors, so that no run finds its input in a
cache, and one function of the set number per way of doing it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ds_quant.codec.bound import encode
from ds_quant.codec.codec import CAST_NAMES, GroupCodec
from ds_quant.codec.lossless import LosslessCodec
from ds_quant.kernels import dispatch, launch, lossless, reference
from ds_quant.kernels.geometry import Stores
from ds_quant.kernels.random_bits import Address

SOURCES = 8  # rows of decode_sum and recode
UNIT = 1 << 14  # sizes are multiples of it: whole blocks for everyone
_ADDRESS = Address(key=1, step=1)


@dataclass
class Operation:
    """One operation on one size; `nbytes` are the bytes it must read and write."""

    name: str
    codec: str
    dtype: str
    numel: int
    nbytes: int
    num_sets: int
    ways: dict[str, Callable[[int], object]] = field(default_factory=dict)
    why_not: dict[str, str] = field(default_factory=dict)  # ways that do not work here

    def offer(self, way: str, make: Callable[[], Callable[[int], object] | None]) -> None:
        """Add a way if it can be made and runs once."""
        try:
            work = make()
            if work is None:
                return
            work(0)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ways[way] = work
        except Exception as error:  # a rival that is missing or does not compile
            self.why_not[way] = f"{type(error).__name__}: {error}".splitlines()[0][:200]


def absmax(bits: int, group_size: int, rounding: str = "nearest") -> GroupCodec:
    return GroupCodec(bits=bits, group_size=group_size, range="absmax", rounding=rounding)


CODECS = (
    absmax(4, 128, "stochastic"),
    absmax(4, 2048, "stochastic"),
    absmax(8, 128),
    absmax(4, 2048),
    GroupCodec(bits=8, group_size=1024, rounding="random_shift"),
    GroupCodec(bits=4, group_size=1024, rounding="stochastic"),
    GroupCodec(bits=4, group_size=1024, levels="learned"),
    GroupCodec(bits=3, group_size=128, range="gaussian"),
)
LOSSLESS = LosslessCodec()


def sets_for(nbytes: int, cache_bytes: int) -> int:
    """How many sets of tensors exceed the cache twice, at most 64."""
    return min(64, max(1, 2 * cache_bytes // max(nbytes, 1) + 1))


class Bench:
    """Makes operations on one device."""

    def __init__(self, device: torch.device, cache_bytes: int, rivals: tuple[str, ...]) -> None:
        self.device, self.cache_bytes, self.rivals = device, cache_bytes, rivals

    def _random(self, sets: int, rows: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (sets, rows, numel)
        return torch.randn(shape, generator=generator, device=self.device, dtype=dtype)

    def _bytes(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=self.device)

    def encode(self, codec: GroupCodec, numel: int, dtype: torch.dtype, rotate: bool = False):
        """numel values -> wire bytes; rotate: Hadamard first (CUDA kernel only)."""
        wire_bytes = codec.wire_bytes(numel)
        nbytes = numel * dtype.itemsize + wire_bytes
        sets = sets_for(nbytes, self.cache_bytes)
        name = "rotate and encode" if rotate else "encode"
        found = Operation(name, codec.name, CAST_NAMES[dtype], numel, nbytes, sets)
        x, wire = self._random(sets, 1, numel, dtype), self._bytes(sets, 1, wire_bytes)
        options = {"address": _ADDRESS, "levels": codec.table(None, self.device)}
        run = dispatch.cuda_runner(self.device, "auto")
        if run is not None:
            rotation = launch.BlockRotation(128 if codec.is_gaussian else 32) if rotate else None
            found.offer(
                "cuda",
                lambda: (
                    lambda i: launch.encode(
                        x[i], wire[i], codec, run=run, rotation=rotation, **options
                    )
                ),
            )
        if rotate:
            return found
        if "torch" in self.rivals:
            found.offer(
                "torch", lambda: lambda i: reference.encode(x[i], wire[i], codec, **options)
            )
        if "compile" in self.rivals and codec.range == "absmax":
            found.offer("compile", lambda: _compiled_encode(codec, x))
        if "triton" in self.rivals and codec.range == "absmax":
            found.offer("triton", lambda: self._triton_encode(codec, x, wire))
        if "deepspeed" in self.rivals and codec.range == "absmax" and dtype == torch.float16:
            found.offer("deepspeed", lambda: _deepspeed_encode(codec, x))
        return found

    def decode(self, codec: GroupCodec, numel: int, dtype: torch.dtype, sources: int = 1):
        """`sources` rows -> numel values, their sum."""
        row_bytes = codec.wire_bytes(numel)
        nbytes = numel * dtype.itemsize + sources * row_bytes
        sets = sets_for(nbytes, self.cache_bytes)
        name = "decode" if sources == 1 else f"decode_sum of {sources}"
        found = Operation(name, codec.name, CAST_NAMES[dtype], numel, nbytes, sets)
        wire = self._wire(codec, sets, sources, numel)
        out = torch.empty(sets, numel, dtype=dtype, device=self.device)
        options = {"scale": 1.0, "levels": codec.table(None, self.device)}
        run = dispatch.cuda_runner(self.device, "auto")
        if run is not None:
            found.offer(
                "cuda",
                lambda: lambda i: launch.decode_sum(wire[i], out[i], codec, run=run, **options),
            )
        if "torch" in self.rivals and dtype == torch.float32:
            found.offer(
                "torch",
                lambda: lambda i: reference.decode_sum(wire[i], out[i], codec, own=None, **options),
            )
        if "compile" in self.rivals and codec.range == "absmax":
            found.offer("compile", lambda: self._compiled_sum(codec, wire, out))
        if "triton" in self.rivals and codec.range == "absmax":
            found.offer("triton", lambda: self._triton_sum(codec, wire, out))
        return found

    def stores(
        self, codec: GroupCodec, numel: int, dtype: torch.dtype, sources: int, ways: list[Stores]
    ) -> Operation:
        """`sources` rows -> numel values, once per way of writing them."""
        found = self.decode(codec, numel, dtype, sources)
        run = dispatch.cuda_runner(self.device, "auto")
        if run is None:
            found.why_not["cuda"] = "no CUDA kernels here"
            return found
        wire = self._wire(codec, found.num_sets, sources, numel)
        out = torch.empty(found.num_sets, numel, dtype=dtype, device=self.device)
        options = {"scale": 1.0, "levels": codec.table(None, self.device), "run": run}
        for stores in ways:
            found.offer(
                f"run {stores.run}{' staged' * stores.staged}",
                lambda stores=stores: (
                    lambda i: launch.decode_sum(wire[i], out[i], codec, stores=stores, **options)
                ),
            )
        return found

    def recode(self, source: GroupCodec, codec: GroupCodec, numel: int, sources: int = SOURCES):
        """`sources` rows -> wire bytes of their sum."""
        row_bytes, wire_bytes = source.wire_bytes(numel), codec.wire_bytes(numel)
        nbytes = sources * row_bytes + wire_bytes
        sets = sets_for(nbytes, self.cache_bytes)
        label = f"{source.name} -> {codec.name}"
        found = Operation(f"recode of {sources}", label, "-", numel, nbytes, sets)
        wire = self._wire(source, sets, sources, numel)
        out = self._bytes(sets, 1, wire_bytes)
        total = torch.empty(numel, device=self.device)
        run = dispatch.cuda_runner(self.device, "auto")
        levels = {"levels": codec.table(None, self.device)}
        source_levels = source.table(None, self.device)
        options = {"numel": numel, "address": _ADDRESS, "source_levels": source_levels, **levels}
        if run is not None:
            found.offer(
                "cuda",
                lambda: (
                    lambda i: launch.recode(
                        wire[i][None], out[i], source, codec, run=run, **options
                    )
                ),
            )

        def with_torch(i: int) -> None:
            reference.decode_sum(wire[i], total, source, scale=1.0, own=None, levels=source_levels)
            reference.encode(total[None], out[i], codec, address=_ADDRESS, **levels)

        if "torch" in self.rivals:
            found.offer("torch", lambda: with_torch)
        if "deepspeed" in self.rivals:
            found.offer("deepspeed", lambda: _deepspeed_recode(source, codec, wire, numel))
        return found

    def lossless(self, name: str, numel: int, dtype: torch.dtype) -> Operation:
        """encode: weights against those before a step at 3e-4 -> a message; decode: back, which
        waits for the device.
        """
        before = self._random(1, 1, numel, torch.float32)[0, 0] * 0.02
        values = before + 0.3 * 3e-4 * torch.randn(numel, device=self.device)
        values, before = values.to(dtype), before.to(dtype)
        room, used = self._bytes(lossless.max_bytes(numel)), self._bytes(8).view(torch.int64)
        LOSSLESS.encode(values, before, room, used)
        message = room[: used.item()].clone()
        nbytes = 2 * numel * dtype.itemsize + message.numel()
        sets = sets_for(nbytes, self.cache_bytes)
        found = Operation(name, LOSSLESS.name, CAST_NAMES[dtype], numel, nbytes, sets)
        olds, news, wires = (
            x.expand(sets, -1).clone()
            for x in (before, values, room if name == "encode" else message)
        )

        def way(codec: LosslessCodec) -> Callable[[int], object]:
            if name == "encode":
                return lambda i: codec.encode(news[i], olds[i], wires[i], used)
            return lambda i: codec.decode(wires[i], olds[i], news[i])

        if dispatch.cuda_runner(self.device, "auto") is not None:
            found.offer("cuda", lambda: way(LOSSLESS))
        if "torch" in self.rivals:
            found.offer("torch", lambda: way(LosslessCodec(backend="torch")))
        return found

    def copy(self, nbytes: int) -> Operation:
        """A plain copy that reads and writes `nbytes` bytes together."""
        half = max(nbytes // 2, 16)
        sets = sets_for(nbytes, self.cache_bytes)
        pool = self._bytes(2, sets, half)
        found = Operation("copy", "-", "-", half, 2 * half, sets)
        found.offer("copy", lambda: lambda i: pool[1, i].copy_(pool[0, i]))
        return found

    def _wire(self, codec: GroupCodec, sets: int, rows: int, numel: int) -> torch.Tensor:
        """(sets, rows, wire bytes) of random values."""
        wire = self._bytes(sets, rows, codec.wire_bytes(numel))
        x = self._random(1, 1, numel, torch.float32)[0]
        for one in wire.view(sets * rows, 1, -1):
            encode(codec, x, one, address=_ADDRESS)
        return wire

    def _triton_encode(self, codec, x, wire) -> Callable[[int], object]:
        import triton_kernels

        sets, _, numel = x.shape
        codes = self._bytes(sets, numel * codec.bits // 8)
        scales = torch.empty(sets, numel // codec.group_size, device=self.device)
        options = {"group_size": codec.group_size, "bits": codec.bits}
        options["stochastic"] = codec.rounding == "stochastic"
        return lambda i: triton_kernels.encode(x[i, 0], codes[i], scales[i], **options)

    def _codes_and_scales(self, codec, wire, out) -> tuple[torch.Tensor, torch.Tensor]:
        """(sets, sources, ...) of a rival, which keeps them in two tensors."""
        sets, sources = wire.shape[:2]
        codes = self._bytes(sets, sources, out.shape[1] * codec.bits // 8).random_()
        groups = out.shape[1] // codec.group_size
        return codes, torch.ones(sets, sources, groups, device=self.device)

    def _compiled_sum(self, codec, wire, out) -> Callable[[int], object]:
        import compiled

        codes, scales = self._codes_and_scales(codec, wire, out)
        work, options = compiled.decode_sum(), (codec.group_size, codec.bits, out.dtype)
        return lambda i: work(codes[i], scales[i], *options)

    def _triton_sum(self, codec, wire, out) -> Callable[[int], object]:
        import triton_kernels

        codes, scales = self._codes_and_scales(codec, wire, out)
        options = {"group_size": codec.group_size, "bits": codec.bits}
        return lambda i: triton_kernels.decode_sum(codes[i], scales[i], out[i], **options)


def _compiled_encode(codec: GroupCodec, x: torch.Tensor) -> Callable[[int], object]:
    import compiled

    work = compiled.encode()
    options = codec.group_size, codec.bits, codec.rounding == "stochastic"
    return lambda i: work(x[i, 0], *options)


def _deepspeed_kernels():
    from deepspeed.ops.op_builder import QuantizerBuilder

    return QuantizerBuilder().load(verbose=False)


def _deepspeed_encode(codec: GroupCodec, x: torch.Tensor) -> Callable[[int], object]:
    """Its fp16 quantizer, nearest rounding: it has no stochastic one of its own here."""
    kernels = _deepspeed_kernels()
    groups = x.shape[2] // codec.group_size
    return lambda i: kernels.quantize(x[i, 0], groups, codec.bits, kernels.Symmetric)


def _deepspeed_recode(source, codec, wire, numel: int) -> Callable[[int], object]:
    """Its fused decode, sum and encode; codes and scales of 1."""
    kernels = _deepspeed_kernels()
    sets, sources = wire.shape[:2]
    rows = torch.zeros(sets, sources * numel * source.bits // 8, dtype=torch.int8)
    rows = rows.to(wire.device)
    in_groups, out_groups = sources * numel // source.group_size, numel // codec.group_size
    scales = torch.ones(sets, in_groups, device=wire.device)
    if source.bits != codec.bits:
        return None  # one number of bits for both sides
    return lambda i: kernels.quantized_reduction(
        rows[i], scales[i], in_groups, out_groups, codec.bits, kernels.Symmetric, sources
    )
