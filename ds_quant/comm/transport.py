"""Byte transport of the collectives: one process group, asynchronous, counted.

Flat uint8 through ``all_gather_into_tensor`` and ``all_to_all_single``, which take any world size.

communicator  collectives on the bytes of one process group, see ``Communicator``
hop           "intra" (inside a node) or "inter" (between nodes); a communicator is on one of them
pending       the result of a posted collective, to wait for, see ``Pending``

[Note: gloo] CPU tensors go from peer to peer instead, all receives posted before the first send.
gloo's all-to-all posts sends first. A send whose peer is ready fills the socket before the message
that lets the peer send, so two ranks take turns and use half of a slow link; its all-gather uses
two thirds. Peer-to-peer reaches 93 to 98 % of the link.

[Note: sealed messages] With ``payload_checksum`` every message carries a checksum behind it. The
communicator adds and removes it, so codecs and collectives never see it. On two levels each hop has
its own checksums, because its messages are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ds_quant.comm.buffers import Buffers
from ds_quant.comm.checksum import MessageErrors, describe_changed, seal, sealed_bytes, unseal
from ds_quant.comm.profiling import profiler_range
from ds_quant.comm.topology import Topology
from ds_quant.comm.traffic import Traffic

T = TypeVar("T")
U = TypeVar("U")


class Pending(Generic[T]):
    """The result of a posted collective. ``finish`` makes the result and is called once."""

    _result: T

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish

    def wait(self) -> T:
        """Return the result, the same object at every call."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None  # frees the buffers that only it refers to
        return self._result

    def then(self, change: Callable[[T], U]) -> Pending[U]:
        """Return the pending result of ``change``, which is called with this one's result."""
        return Pending(lambda: change(self.wait()))


def _lost(who: str, error: RuntimeError) -> RuntimeError:
    """Return gloo's error, which names only an address, with the rank. who: such as "rank 3"."""
    return RuntimeError(
        f"quantized_comm: {who} does not answer: it, or a rank it waits for, has died or "
        "stalled, or the network is cut. See its log, and resume from the last checkpoint "
        f"({error})"
    )


def _wait_for(works: Sequence[tuple[int, Any]]) -> None:
    """Wait for operations of torch.distributed, given as (global rank of the peer, work)."""
    for rank, work in works:
        try:
            work.wait()
        except RuntimeError as error:
            raise _lost(f"rank {rank}", error) from error


def keep_for_current_stream(*tensors: Tensor) -> None:
    """Keep the allocator from reusing CUDA tensors of another stream before the current stream has
    passed its work so far.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def carries(process_group: Any, device: torch.device) -> str:
    """Return the backend that carries tensors of ``device``, such as "nccl"; "" if none does.

    The name of a group does not tell: that of ``init_process_group()`` without arguments is
    "undefined".

    process_group: None for the world.
    """
    if process_group is None:
        process_group = torch.distributed.group.WORLD
    if process_group is None:  # not initialized: the ranks of a simulation
        return ""
    try:
        name: str = process_group._get_backend(device).name()
    except RuntimeError:  # no backend for this device
        return ""
    return name


class Communicator:
    """Byte collectives over one process group, counted. Holds no algorithm.

    process_group: a group of torch.distributed, None: the world.
    message_errors: collects messages that cannot be used.
    sealed: True to add checksums, see [Note: sealed messages].
    buffers: pool of the messages and of all that is made of them, see ``empty``.
    backend: kernels that encode and decode the messages, one of ``dispatch.BACKENDS``.
    dist: module with the collectives, DeepSpeed's if None.

    rank: index of this rank in the group. ranks: the global rank of every index.
    hop: "inter" if the group crosses nodes, else "intra".
    """

    backend = "auto"
    # A gather returns the rows in rank order; see ``HierarchicalCommunicator.node_size``.
    node_size: int | None = None

    def __init__(
        self,
        process_group: Any,
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
            from deepspeed import comm

            dist = comm
        self._dist = dist
        self.process_group = process_group
        self._traffic = traffic
        self.sealed = sealed
        self.backend = backend
        self.message_errors = message_errors or MessageErrors()
        self.empty = (buffers or Buffers()).empty
        self.size: int = dist.get_world_size(group=process_group)
        self.rank: int = dist.get_rank(group=process_group)
        self.ranks: list[int] = [self._global_rank(rank) for rank in range(self.size)]
        nodes = [topology.node_of(rank) for rank in self.ranks]
        # Indices of the other ranks: of this rank's node, and of other nodes.
        self._near: list[int] = []
        self._far: list[int] = []
        for peer, node in enumerate(nodes):
            if node != nodes[self.rank]:
                self._far.append(peer)
            elif peer != self.rank:
                self._near.append(peer)
        self.hop = "inter" if self._far else "intra"
        # Context managers that measure encoding and decoding for this hop in sampled steps.
        self.encoding = partial(traffic.meter.encoding, hop=self.hop)
        self.decoding = partial(traffic.meter.section, "decode")
        self.is_gloo = carries(process_group, torch.device("cpu")) == "gloo"

    def _global_rank(self, rank: int) -> int:
        if self.process_group is None:
            return rank
        return self._dist.get_global_rank(self.process_group, rank)

    # ---- collectives ----

    def all_gather(
        self, payload: Tensor, *, role: str, into: Tensor | None = None
    ) -> Pending[Tensor]:
        """payload (bytes,) uint8, equal size on all ranks -> received (ranks * bytes,) uint8.

        into: memory for the result; not for ``sealed`` messages, which hold checksums, too.
        """
        payload_bytes = payload.numel()
        if self.sealed:
            assert into is None
            payload = seal(payload, [payload_bytes], sender=self.rank)
        received = into
        if received is None:
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
        if not self.sealed:
            return pending
        return pending.then(partial(self._open, [payload_bytes] * self.size, role))

    def all_to_all(
        self, payload: Tensor, *, sent: Sequence[int], received: Sequence[int], role: str
    ) -> Pending[Tensor]:
        """payload (sum(sent),) uint8, ``sent[d]`` bytes for rank d -> (sum(received),) uint8."""
        payload_bytes = received
        if self.sealed:
            payload = seal(payload, sent, sender=self.rank)
            sent = [sealed_bytes(nbytes) for nbytes in sent]
            received = [sealed_bytes(nbytes) for nbytes in received]
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
        if not self.sealed:
            return pending
        return pending.then(partial(self._open, payload_bytes, role))

    def differs(self, number: int) -> bool:
        """Return True on all ranks if any two ranks call this with different numbers (int64).

        A collective of 16 bytes that are not counted. For gloo: with NCCL the host would wait for
        the device.
        """
        smallest, smallest_inverted = self.least(torch.tensor([number, ~number])).tolist()
        return smallest != ~smallest_inverted

    def least(self, numbers: Tensor) -> Tensor:
        """Replace each number by its minimum over the ranks. A collective, not counted."""
        minimum = torch.distributed.ReduceOp.MIN
        try:
            torch.distributed.all_reduce(numbers, op=minimum, group=self.process_group)
        except RuntimeError as error:
            raise _lost(f"one of ranks {self.ranks[0]} to {self.ranks[-1]}", error) from error
        return numbers

    def post_least(self, numbers: Tensor) -> Any:
        """Post ``least``. Returns the work to wait for before ``numbers`` are read."""
        return torch.distributed.all_reduce(
            numbers,
            op=torch.distributed.ReduceOp.MIN,
            group=self.process_group,
            async_op=True,
        )

    def _open(self, sizes: Sequence[int], role: str, sealed: Tensor) -> Tensor:
        """Check and remove the checksums; rank r sent ``sizes[r]`` bytes and a checksum.

        A changed message is noted and used. All ranks end before the optimizer step, see
        [Note: when errors are read] of checksum.py.
        """
        payload, changed = unseal(sealed, sizes)
        self.message_errors.note(role, self.ranks, changed.view(-1, 1), describe_changed)
        return payload

    def _peer_to_peer(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> Pending[None]:
        """Send ``sends[r]`` to rank r and receive ``receives[r]`` from it. See [Note: gloo].

        Through torch: ``irecv`` of DeepSpeed before 0.18 waits for the message, which deadlocks.
        """
        receives[self.rank].copy_(sends[self.rank])
        # Each rank starts with its next peer, which spreads the load.
        peers = [(self.rank + i) % self.size for i in range(1, self.size)]
        posts: list[tuple[Callable[..., Any], Tensor, int]] = []
        for peer in peers:
            posts.append((torch.distributed.irecv, receives[peer], self.ranks[peer]))
        for peer in peers:
            posts.append((torch.distributed.isend, sends[peer], self.ranks[peer]))
        works = []
        for post, message, peer in posts:
            if not message.numel():
                continue
            try:
                works.append((peer, post(message, peer, group=self.process_group)))
            except RuntimeError as error:
                raise _lost(f"rank {peer}", error) from error
        return Pending(partial(_wait_for, works))

    def _posted(self, payload: Tensor, received: Tensor, work: Any, role: str) -> Pending[Tensor]:
        """Return the pending bytes of a posted collective; on CUDA valid in order of the stream
        that waits.

        Both buffers belong to the stream that posted the collective, which may be far behind, and
        NCCL holds no reference since torch 2.8. So the allocator must not reuse them before the
        waiting stream has passed the collective.
        """
        meter = self._traffic.meter
        posting_stream = torch.cuda.current_stream(payload.device) if payload.is_cuda else None

        def finish() -> Tensor:
            with profiler_range("wait", role, self.hop), meter.section("wait"):
                work.wait()
            if posting_stream is not None:
                waiting_stream = torch.cuda.current_stream(received.device)
                if waiting_stream != posting_stream:
                    payload.record_stream(waiting_stream)
                    received.record_stream(waiting_stream)
            return received

        return Pending(finish)

    # ---- counters ----

    def count_ring(
        self, nbytes: int, *, role: str, passes: int = 1, among: Sequence[int] | None = None
    ) -> None:
        """Count a collective on ``nbytes`` bytes that a library has issued, as a ring.

        passes: 1 for a gather, 2 for an all-reduce. Each pass receives (W - 1) / W of the bytes
            from the preceding rank.
        among: global ranks, in the order of the ring, which no scheme compresses; None for all
            ranks, whose bytes the formulas have.
        """
        ranks = self.ranks if among is None else among
        if len(ranks) == 1:
            return
        preceding = self.ranks.index(ranks[ranks.index(self.ranks[self.rank]) - 1])
        received = passes * nbytes * (len(ranks) - 1) // len(ranks)
        is_far = preceding in self._far
        self._traffic.count(
            role,
            intra=0 if is_far else received,
            inter=received if is_far else 0,
            saves_nothing=among is not None,
        )

    def rows_of_gather(self) -> dict[str, int]:
        """Return the rows that ``all_gather`` receives over each link."""
        return {"intra": len(self._near), "inter": len(self._far)}

    def _count(self, role: str, received: Sequence[int]) -> None:
        intra = sum([received[peer] for peer in self._near])
        inter = sum([received[peer] for peer in self._far])
        self._traffic.count(role, intra=intra, inter=inter)
