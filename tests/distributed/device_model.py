"""A model of a device with streams, for CPU tensors. Finds missing waits between streams.

Operations run immediately. Each belongs to the current stream and advances its clock. A stream also
has the clocks of the other streams as of the last event or wait (vector clocks); the host has them
too. A fault is an access that no event orders after an earlier one:

- a read or write of memory that another stream may still write, or a write of memory that it may
  still read
- an allocation that may get memory which another stream still uses: it was freed on its own stream
  and was not recorded on the other one, nor on one that had waited for the other one by then

Collectives run on a stream of their process group, as NCCL's do.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import fake_world
import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ds_quant

PACKAGE = f"{Path(ds_quant.__file__).parent}/"
COLLECTIVES = (*fake_world.RECEIVING, "all_reduce", "broadcast")
Clock = dict[str, int]  # by stream: the number of its operations that are done


def merged(clock: Clock, other: Clock) -> None:
    """Advance a clock to another one."""
    for name, count in other.items():
        clock[name] = max(clock.get(name, 0), count)


class Event:
    """Replaces torch.cuda.Event."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.clock = Clock()

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or self._model.now).clock)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        merged(self._model.host, self.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._model.now).wait_event(self)


class Stream:
    """Replaces torch.cuda.Stream."""

    def __init__(self, model: Model, name: str) -> None:
        self._model = model
        self.name = name
        self.clock = Clock()
        # Accesses of other streams to memory that was freed on this one, and the line of the free.
        self.freed: list[tuple[Access, str]] = []

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._model)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        merged(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        merged(self.clock, other.clock)

    def synchronize(self) -> None:
        merged(self._model.host, self.clock)

    def query(self) -> bool:
        return True


class Access(NamedTuple):
    """A read or write of the bytes [start, stop) of an allocation."""

    start: int
    stop: int
    stream: str
    count: int  # number of the operation in its stream
    writes: bool
    where: str  # file and line


class Memory:
    """The accesses to one allocation. owner: stream of the allocation."""

    def __init__(self, owner: Stream) -> None:
        self.owner = owner
        self.recorded: set[str] = set()
        self.accesses: list[Access] = []


class Model(TorchDispatchMode):
    """The device. Active inside a ``with`` block."""

    def __init__(self) -> None:
        super().__init__()
        self.host: Clock = {}
        self.default = self.now = Stream(self, "default")
        self.streams = {"default": self.default}
        self.faults: list[str] = []
        self.records = 0  # of the plugin, also those that are lost on purpose
        self._memory: dict[int, Memory] = {}

    def stream(self, name: str) -> Stream:
        if name not in self.streams:
            self.streams[name] = Stream(self, name)
        return self.streams[name]

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        before, self.now = self.now, stream or self.now
        try:
            yield
        finally:
            self.now = before

    def synchronize(self) -> None:
        for stream in self.streams.values():
            merged(self.host, stream.clock)

    # ---- operations ----

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            self.touch(args[:1], ())
            if _caller() != "?":  # reads of the tests themselves must not order anything
                merged(self.host, self.now.clock)
        elif func is torch.ops.aten.lift_fresh.default:
            self._allocate(args)
        elif func.namespace != "prim" and not _is_view(func, args, result):
            read, written = [], []
            given = {**dict(zip((a.name for a in func._schema.arguments), args)), **kwargs}  # noqa: B905
            for argument in func._schema.arguments:
                writes = argument.alias_info is not None and argument.alias_info.is_write
                (written if writes else read).extend(_tensors(given.get(argument.name)))
            made = [t for t in _tensors(result) if not any(t is w for w in written)]
            self._allocate(made)
            if "empty" not in func._opname:
                self.touch(read, [*written, *made])
        return result

    def _allocate(self, made: Iterable[Tensor]) -> None:
        """Allocate new tensors. They may get any memory that is free on the current stream."""
        now = self.now
        merged(now.clock, self.host)
        if any(tensor.numel() for tensor in made):
            for seen, where in now.freed:
                if now.clock.get(seen.stream, 0) < seen.count:
                    self._fault(f"memory of {now.name}, free in {where}, is taken again", seen)
            now.freed.clear()
        for tensor in made:
            self._memory_of(tensor, now)

    def touch(self, read: Iterable[Tensor], written: Iterable[Tensor]) -> None:
        """Run an operation on the current stream."""
        now = self.now
        merged(now.clock, self.host)  # the host has waited for these before it queued the operation
        now.clock[now.name] = now.clock.get(now.name, 0) + 1
        for tensors, writes in ((read, False), (written, True)):
            for tensor in tensors:
                if tensor.numel() and tensor.device.type == "cpu":
                    self._access(tensor, writes)

    def _memory_of(self, tensor: Tensor, made_on: Stream | None = None) -> Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory:  # made_on None: allocated before the model was active
            memory = self._memory[key] = Memory(made_on or self.default)
            weakref.finalize(storage, self._freed, key, memory)
        return self._memory[key]

    def _access(self, tensor: Tensor, writes: bool) -> None:
        memory = self._memory_of(tensor)
        now = self.now
        extent = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.storage_offset() * tensor.element_size()
        stop = start + (extent + 1) * tensor.element_size()
        kept = []
        for seen in memory.accesses:
            overlaps = seen.start < stop and start < seen.stop
            known = now.clock.get(seen.stream, 0) >= seen.count
            if overlaps and not known and (writes or seen.writes):
                self._fault(f"{'write' if writes else 'read'} on {now.name}", seen)
            covered = known and start <= seen.start and seen.stop <= stop and writes >= seen.writes
            if not covered:
                kept.append(seen)
        mine = Access(start, stop, now.name, now.clock[now.name], writes, _caller())
        memory.accesses = [*kept, mine]

    def _freed(self, key: int, memory: Memory) -> None:
        if self._memory.pop(key, None) is None:
            return
        where = _caller()
        # The allocator keeps memory until all that is queued on a recorded stream is done.
        recorded = [self.streams[name].clock for name in memory.recorded]
        memory.owner.freed += [
            (seen, where)
            for seen in memory.accesses
            if not any(clock.get(seen.stream, 0) >= seen.count for clock in recorded)
        ]

    def _fault(self, access: str, seen: Access) -> None:
        action = "writes" if seen.writes else "reads"
        self.faults.append(f"{access} in {_caller()}, while {seen.stream} {action} in {seen.where}")

    def record(self, tensor: Tensor, stream: Stream) -> None:
        self._memory_of(tensor).recorded.add(stream.name)

    # ---- collectives ----

    def collective(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a collective of torch.distributed to run on a stream of its process group."""

        def posted(*args: Any, **kwargs: Any) -> Any:
            waits = not kwargs.pop("async_op", False)
            stream = self.stream(f"group {id(kwargs.get('group'))}")
            tensors = _tensors([*args, *kwargs.values()])
            stream.wait_stream(self.now)
            with self.on(stream):
                original(*args, **kwargs)
                self.touch(tensors[1:], tensors[:1])
            work = _Work(self, stream, tensors)
            return work.wait() if waits else work

        return posted


class _Work:
    """A posted collective. Keeps its tensors until the wait, as torch does since 2.8."""

    def __init__(self, model: Model, stream: Stream, tensors: list[Tensor]) -> None:
        self._model = model
        self._tensors = tensors
        self._done = Event(model)
        self._done.record(stream)

    def wait(self) -> None:
        self._model.now.wait_event(self._done)
        self._tensors = []


def is_ours(depth: int) -> bool:
    """Return True if a function of the plugin is ``depth`` calls above the caller."""
    return sys._getframe(1 + depth).f_code.co_filename.startswith(PACKAGE)


def _receiving_evenly(all_to_all: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``all_to_all_single`` of a fake group, which brings nothing to a rank that sends
    nothing.
    """

    def send_as_much_as_arrives(*tensors: Tensor, **options: Any) -> Any:
        received = tensors[0] if tensors else options.pop("output")
        options.pop("input", None)
        options["input_split_sizes"] = options.get("output_split_sizes")
        zeros = torch.zeros_like(received)  # the fake group brings zeros whatever is sent
        return all_to_all(received, zeros, **options)

    return send_as_much_as_arrives


# ---- this process as one with the device ----

# What is replaced here stays replaced until the process ends.


def become_a_device(model: Model, *, keeps_records: bool = True) -> None:
    """From here on torch and the plugin take this process, of a fake world, for one with the
    model's streams.

    keeps_records: False to lose every ``record_stream`` of the plugin.
    """
    from ds_quant.policy import timing

    def clock() -> float:
        model.synchronize()
        return time.perf_counter()

    for name in COLLECTIVES:
        original = getattr(torch.distributed, name)
        if name == "all_to_all_single":
            original = _receiving_evenly(original)
        setattr(torch.distributed, name, model.collective(original))
    torch.cuda.current_stream = lambda device=None: model.now
    torch.Tensor.is_cuda = property(lambda _: is_ours(1))
    record_streams(model, keeps_records=keeps_records)
    timing.device_clock = lambda _: clock
    _accept_messages_of_zeros()


def record_streams(model: Model, *, keeps_records: bool = True) -> None:
    """Let ``record_stream`` of torch and of the plugin reach the model."""

    def record(tensor: Tensor, stream: Stream) -> None:
        of_the_plugin = is_ours(1)
        model.records += of_the_plugin
        if keeps_records or not of_the_plugin:
            model.record(tensor, stream)

    torch.Tensor.record_stream = record


def _accept_messages_of_zeros() -> None:
    """Accept the messages of a fake world, which are zeros, as sealed and as lossless ones.

    The operations on them stay the same.
    """
    from ds_quant.comm import checksum, lossless_gather

    checksums = checksum._checksums
    checksum._checksums = lambda *args: checksums(*args) * 0

    def touch(
        wire: Any, starts: Any, lengths: Any, reference: Any, out: Any, status: Any, *, backend: str
    ) -> None:
        out.add_(wire.sum() * 0)
        status.add_(0)

    lossless_gather.decode_lossless = touch
    gather = lossless_gather.LosslessGather
    gather._agree = fake_world._at_full_length(gather._agree)


def become_deepspeeds_device(model: Model) -> None:
    """From here on DeepSpeed and its front work on the model. No kernel is compiled."""
    from deepspeed.accelerator import real_accelerator

    from ds_quant.zero import accelerator, attach

    real_accelerator.ds_accelerator = Accelerator(model)
    as_on_cuda = {"device": lambda: torch.device("cuda")}
    attach.accelerator = SimpleNamespace(**vars(accelerator) | as_on_cuda)
    attach.warm_up = lambda *_: None


class Accelerator(CPU_Accelerator):
    """DeepSpeed's accelerator for the device."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = model

    def is_synchronized_device(self) -> bool:
        return False

    def synchronize(self, device_index: Any = None) -> None:
        self._model.synchronize()

    @property
    def Stream(self) -> Callable[..., Stream]:  # noqa: N802
        return lambda *_, **__: self._model.stream(f"stream {len(self._model.streams)}")

    @property
    def Event(self) -> Callable[..., Event]:  # noqa: N802
        return lambda *_, **__: Event(self._model)

    def stream(self, stream: Stream | None) -> Any:
        return self._model.on(stream)

    def current_stream(self, device_index: Any = None) -> Stream:
        return self._model.now

    def default_stream(self, device_index: Any = None) -> Stream:
        return self._model.default


def _is_view(func: Any, args: Any, result: Any) -> bool:
    """Return True if the result is memory of an argument. In inference mode operators such as
    ``to`` and ``flatten``, which copy where they must, are not taken apart.
    """
    if not func.is_view:
        return False
    given = {tensor.untyped_storage()._cdata for tensor in _tensors(args)}
    return all(tensor.untyped_storage()._cdata in given for tensor in _tensors(result))


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [getattr(values, "_local_tensor", values)]  # of a DTensor
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in _tensors(value)]
    return []


def _caller() -> str:
    """Return the line of the plugin, of DeepSpeed or of FSDP2 that called the operation."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE):
            return f"ds_quant/{path.removeprefix(PACKAGE)}:{frame.f_lineno}"
        if "/deepspeed/runtime/" in path or "/fsdp/_fully_shard/" in path:
            return f"{path.rpartition('/site-packages/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
