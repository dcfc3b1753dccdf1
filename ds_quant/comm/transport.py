"""Byte transport of the collectives: process groups and their nodes, asynchronous, counted.

Flat uint8 through ``all_gather_into_tensor`` and ``all_to_all_single``, which take any world size.

[Note: gloo] CPU tensors go from peer to peer instead, all receives posted before the first send.
gloo's all-to-all posts sends first; a send whose peer is ready fills the socket before the note
that lets the peer send, so two ranks take turns and use half of a slow link (its all-gather two
thirds). Peer-to-peer reaches 93 to 98 % of the link.

[Note: sealed messages] With ``payload_checksum`` every message carries a checksum behind it. It is
put on and taken off here, so that codecs and collectives never see it; on two levels each hop has
its own, because its messages are its own.

[Note: why a pool] A steady step asks for the same few large buffers as the one before. glibc hands
blocks of that size back to the system when they are freed, and every page of the next one is then
faulted in and cleared anew: decoding and adding two int8 rows of 2^24 elements takes 22 ms on one
core of a loaded x86-64 machine, 73 ms into fresh memory (medians of 7 pairs). On CUDA torch's
caching allocator does what is done here, so the pool leaves it alone.

[Note: when a buffer is free] A tensor made on a buffer keeps it alive, as does every view of that
tensor, and so does whoever holds one: a message in flight, or DeepSpeed with a gradient that it was
given. So a buffer that nothing but the pool refers to is free, and there is nothing to give back.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from ds_quant.comm.checksum import MessageErrors, describe_changed, seal, sealed_bytes, unseal
from ds_quant.comm.profiling import profiler_range
from ds_quant.comm.topology import Topology
from ds_quant.comm.traffic import Traffic

T = TypeVar("T")
U = TypeVar("U")


# ---- the pool ----


MIN_BYTES = 1 << 20  # below, the allocator keeps freed blocks by itself


def _references(arrays: list[np.ndarray]) -> list[int]:
    return [sys.getrefcount(array) for array in arrays]


_UNUSED = _references([np.empty(0)])[0]  # what a list alone comes to; versions of Python differ


class Buffers:
    """Grows until a step finds all it needs; then its size is constant."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []
        self._lock = threading.Lock()  # autograd may call from a thread of its own

    @property
    def nbytes(self) -> int:
        """Bytes in the pool, used or free."""
        return sum(array.nbytes for array in self._arrays)

    def empty(
        self, *shape: int, dtype: torch.dtype = torch.uint8, device: torch.device
    ) -> torch.Tensor:
        """Return an uninitialised contiguous tensor, as ``torch.empty`` does."""
        nbytes = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or nbytes < MIN_BYTES:
            return torch.empty(shape, dtype=dtype, device=device)
        with self._lock, torch.inference_mode(False):
            numbers = torch.frombuffer(self._take(nbytes), dtype=dtype, count=math.prod(shape))
            return numbers if len(shape) == 1 else numbers.view(shape)

    def _take(self, nbytes: int) -> np.ndarray:
        """Take the smallest free array that is large enough, else replace a free one."""
        counts = _references(self._arrays)
        free = [a for a, n in zip(self._arrays, counts, strict=True) if n == _UNUSED]
        fitting = [a for a in free if a.nbytes >= nbytes]
        if fitting:
            return min(fitting, key=len)
        if free:  # too small for this: its place is taken, so that no more are held than are used
            replaced = max(free, key=len)
            self._arrays = [a for a in self._arrays if a is not replaced]
        self._arrays.append(np.empty(nbytes, dtype=np.uint8))
        return self._arrays[-1]


# ---- links ----


class Pending(Generic[T]):
    """The result of a collective, to wait for. ``finish`` makes it and is called once."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._result: T | None = None

    def wait(self) -> T:
        """Return the result, the same object at every call."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None  # and the buffers that only it keeps
        return self._result

    def then(self, change: Callable[[T], U]) -> Pending[U]:
        """Return what ``change`` makes of the result, when that is waited for."""
        return Pending(lambda: change(self.wait()))


def _lost(rank: int, error: RuntimeError) -> RuntimeError:
    """Return gloo's error, which names only an address, with the rank."""
    return RuntimeError(
        f"quantized_comm: rank {rank} does not answer: it, or a rank it waits for, has died or "
        "stalled, or the network is cut. See its log, and resume from the last checkpoint "
        f"({error})"
    )


def _wait_for(works: Sequence[tuple[int, Any]]) -> None:
    """Wait for collectives of torch.distributed, one per peer rank."""
    for rank, work in works:
        try:
            work.wait()
        except RuntimeError as error:
            raise _lost(rank, error) from error


class Communicator:
    """Byte collectives over one process group, counted. Holds no algorithm.

    ``findings``: learns of messages that cannot be used. ``sealed``: see [Note: sealed messages].
    ``dist``: the module of collectives, DeepSpeed's if None.
    ``backend``: the kernels that make and read its messages, one of ``dispatch.BACKENDS``.
    ``empty``: as that of ``Buffers``, for messages and what is made of them.
    """

    backend = "auto"
    node_size: int | None = (
        None  # what a gather brings is rows of ranks in order, see ``HierarchicalCommunicator``
    )

    def __init__(
        self,
        process_group: object,
        *,
        topology: Topology,
        traffic: Traffic,
        message_errors: MessageErrors | None = None,
        sealed: bool = False,
        buffers: Buffers | None = None,
        backend: str = "auto",
        dist: Any = None,
    ) -> None:
        if dist is None:
            from deepspeed import comm as dist
        self._dist = dist
        self.process_group = process_group
        self._traffic, self._sealed, self.backend = traffic, sealed, backend
        self.message_errors = message_errors or MessageErrors()
        self.empty = (buffers or Buffers()).empty
        self.size: int = dist.get_world_size(group=process_group)
        self.rank: int = dist.get_rank(group=process_group)
        self.ranks: list[int] = [self._global_rank(r) for r in range(self.size)]
        nodes = [topology.node_of(r) for r in self.ranks]
        near = [r for r, node in enumerate(nodes) if node == nodes[self.rank]]
        self._near = [r for r in near if r != self.rank]
        self._far = [r for r in range(self.size) if r not in near]
        # Contexts that charge the making of messages for this link, and their decoding.
        self.hop = "inter" if self._far else "intra"
        self.encoding = partial(traffic.meter.encoding, hop=self.hop)
        self.decoding = partial(traffic.meter.section, "decode")
        self.is_gloo = "gloo" in str(torch.distributed.get_backend(process_group))

    def _global_rank(self, rank: int) -> int:
        if self.process_group is None:
            return rank
        return self._dist.get_global_rank(self.process_group, rank)

    def all_gather(self, payload: Tensor, *, role: str) -> Pending[Tensor]:
        """payload (bytes,) uint8, equal size on all ranks -> received (ranks * bytes,) uint8."""
        plain = payload.numel()
        if self._sealed:
            payload = seal(payload, [plain], sender=self.rank)
        received = self.empty(self.size * payload.numel(), device=payload.device)
        self._count(role, [payload.numel()] * self.size)
        with profiler_range("all_gather", role, self.hop):
            if self.is_gloo and payload.device.type == "cpu":
                rows = list(received.view(self.size, -1))
                work = self._peer_to_peer([payload] * self.size, rows)
            else:
                work = self._dist.all_gather_into_tensor(
                    received, payload, group=self.process_group, async_op=True
                )
        pending = self._posted(payload, received, work, role)
        if not self._sealed:
            return pending
        return pending.then(partial(self._open, [plain] * self.size, role))

    def all_to_all(
        self, payload: Tensor, *, sent: Sequence[int], received: Sequence[int], role: str
    ) -> Pending[Tensor]:
        """payload (sum(sent),) uint8, ``sent[d]`` bytes for rank d -> (sum(received),) uint8."""
        plain = received
        if self._sealed:
            payload = seal(payload, sent, sender=self.rank)
            sent, received = [[sealed_bytes(n) for n in side] for side in (sent, received)]
        buffer = self.empty(sum(received), device=payload.device)
        self._count(role, received)
        with profiler_range("all_to_all", role, self.hop):
            if self.is_gloo and payload.device.type == "cpu":
                work = self._peer_to_peer(payload.split(list(sent)), buffer.split(list(received)))
            else:
                work = self._dist.all_to_all_single(
                    buffer,
                    payload,
                    output_split_sizes=list(received),
                    input_split_sizes=list(sent),
                    group=self.process_group,
                    async_op=True,
                )
        pending = self._posted(payload, buffer, work, role)
        return pending.then(partial(self._open, plain, role)) if self._sealed else pending

    def differs(self, number: int) -> bool:
        """Whether any ranks call this with different numbers (int64), which all of them learn. A
        collective of 16 bytes that are not counted, for gloo: with NCCL the answer would wait for
        the device.
        """
        least, inverted = self.least(torch.tensor([number, ~number])).tolist()
        return least != ~inverted

    def least(self, numbers: Tensor) -> Tensor:
        """Replace numbers by the least of any rank. Not counted."""
        minimum = torch.distributed.ReduceOp.MIN
        torch.distributed.all_reduce(numbers, op=minimum, group=self.process_group)
        return numbers

    def _open(self, sizes: Sequence[int], role: str, sealed: Tensor) -> Tensor:
        """Check and remove the checksums; rank r has sent ``sizes[r]`` bytes without its own."""
        payload, changed = unseal(sealed, sizes)
        self.message_errors.note(role, self.ranks, changed.view(-1, 1), describe_changed)
        return payload

    def _peer_to_peer(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> Pending[None]:
        """``sends[r]`` goes to rank r, ``receives[r]`` comes from it. See [Note: gloo].

        Through torch: ``irecv`` of DeepSpeed before 0.18 waits for the message, which deadlocks.
        """
        receives[self.rank].copy_(sends[self.rank])
        turns = [(self.rank + i) % self.size for i in range(1, self.size)]  # spread the load
        posts = [(torch.distributed.irecv, receives[r], self.ranks[r]) for r in turns]
        posts += [(torch.distributed.isend, sends[r], self.ranks[r]) for r in turns]
        works = []
        for post, message, peer in posts:
            if message.numel():
                try:
                    works.append((peer, post(message, peer, group=self.process_group)))
                except RuntimeError as error:
                    raise _lost(peer, error) from error
        return Pending(partial(_wait_for, works))

    def _posted(self, payload: Tensor, received: Tensor, work: Any, role: str) -> Pending[Tensor]:
        """The received bytes; on CUDA valid in order of the stream that waits.

        Both buffers belong to the stream that posted the collective, which may be far behind, and
        NCCL keeps nothing since torch 2.8. So the allocator must not reuse them before the waiting
        stream has passed the collective.
        """
        meter = self._traffic.meter
        posted_on = torch.cuda.current_stream(payload.device) if payload.is_cuda else None

        def finish() -> Tensor:
            with profiler_range("wait", role, self.hop), meter.section("wait"):
                work.wait()
            if posted_on is not None:
                waiting = torch.cuda.current_stream(received.device)
                if waiting != posted_on:
                    payload.record_stream(waiting)
                    received.record_stream(waiting)
            return received

        return Pending(finish)

    def count_ring(self, nbytes: int, *, role: str, passes: int = 1) -> None:
        """Count a collective that somebody else runs on ``nbytes`` bytes, as a ring in the order of
        the ranks: a gather is one pass, an all-reduce two, and each brings (W - 1) / W of them from
        the rank before.
        """
        if self.size == 1:
            return
        brought = passes * nbytes * (self.size - 1) // self.size
        crosses = (self.rank - 1) % self.size in self._far
        self._traffic.count(role, intra=0 if crosses else brought, inter=crosses * brought)

    def _count(self, role: str, received: Sequence[int]) -> None:
        intra = sum([received[r] for r in self._near])
        inter = sum([received[r] for r in self._far])
        self._traffic.count(role, intra=intra, inter=inter)


class HierarchicalCommunicator:
    """The link of one process group and, where its ranks fill several nodes, those of its two
    levels.

    intra: this rank's node. inter: the ranks of all nodes with this rank's place in the node.
    gradients: what they take inside the node, ``intra`` if not given. All are None for a group that
    lies in one node, has one rank per node, or is not the world, and so is ``node_size``.

    [Note: order of the second level] A gather over two levels posts its second one when it is
    waited for, and DeepSpeed's waits come from sets, in another order on every rank. So a wait
    first posts the second level of all gathers that were posted before.
    """

    def __init__(
        self,
        flat: Communicator,
        intra: Communicator | None = None,
        inter: Communicator | None = None,
        gradients: Communicator | None = None,
    ) -> None:
        self.flat, self.intra, self.inter = flat, intra, inter
        self.gradients = gradients or intra
        self.size, self.rank, self.backend = flat.size, flat.rank, flat.backend
        self.hop = flat.hop
        self.node_size = None if intra is None or inter is None else intra.size
        self.encoding, self.decoding, self.empty = flat.encoding, flat.decoding, flat.empty
        self.unposted: deque[_TwoLevelGather] = deque()  # their second level

    def all_gather(self, payload: Tensor, *, role: str) -> Pending[Tensor] | _TwoLevelGather:
        """As ``Communicator.all_gather`` over the whole group; over two levels (nodes, ranks of a
        node, bytes) arrive, strided: see ``message.row_place``.

        With two levels the rows cross between nodes once and are then spread inside the node.
        """
        if self.intra is None or self.inter is None:
            return self.flat.all_gather(payload, role=role)
        gather = _TwoLevelGather(self, self.inter.all_gather(payload, role=role), role)
        self.unposted.append(gather)
        return gather


class _TwoLevelGather:
    """A gather whose rows cross between nodes first, then inside the node: see [Note: order of the
    second level].
    """

    def __init__(
        self, hierarchy: HierarchicalCommunicator, between: Pending[Tensor], role: str
    ) -> None:
        self._hierarchy, self.between, self.role = hierarchy, between, role
        self.inside: Pending[Tensor] | None = None

    def wait(self) -> Tensor:
        """Return the rows of all ranks, (nodes, ranks of a node, bytes), strided."""
        hierarchy = self._hierarchy
        while self.inside is None:
            first = hierarchy.unposted.popleft()
            first.inside = hierarchy.intra.all_gather(first.between.wait(), role=first.role)
        # Received as (local rank, node, bytes). They are decoded where they lie, without a copy.
        return (
            self.inside.wait().view(hierarchy.intra.size, hierarchy.inter.size, -1).transpose(0, 1)
        )
