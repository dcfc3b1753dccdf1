"""Gather weights of FSDP2: the custom all-gather of every sharded module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_quant.codec.bound import BoundCodec
from ds_quant.comm.message import Message
from ds_quant.comm.profiling import profiler_range
from ds_quant.comm.rows import plan_gather
from ds_quant.comm.transport import Pending
from ds_quant.fsdp2.context import Context
from ds_quant.fsdp2.node_shard import NodeShard
from ds_quant.fsdp2.sharded_module import ShardedModule
from ds_quant.fsdp2.torch_names import AllGather
from ds_quant.fsdp2.weight_codecs import WeightCodecs


class _Gathering(dist.Work):
    """A gather to wait for; FSDP2 accepts nothing but a ``Work``."""

    def __init__(self, pending: Pending[Any]) -> None:
        super().__init__()
        self._pending = pending

    def wait(self, timeout: Any = None) -> bool:
        self._pending.wait()
        return True


class QuantizedAllGather(AllGather):
    """The all-gather of one sharded module, in forward and again in backward.

    All ranks use decoded weights, of their own shards too. With a node shard the gather stays
    inside the node.

    front: the model that this serves.
    """

    def __init__(
        self,
        front: object,
        context: Context,
        sharded: ShardedModule,
        node_shard: NodeShard | None,
    ) -> None:
        self.front = front
        self._context = context
        self._sharded = sharded
        self._node_shard = node_shard
        self._own = sharded.group._all_gather_comm  # FSDP2's
        self._weight_codecs = WeightCodecs(context, sharded, hop=0)

    def connect(self) -> None:
        """Replace FSDP2's all-gather."""
        self._sharded.group._all_gather_comm = self

    def disconnect(self) -> None:
        """Give FSDP2 its all-gather back."""
        self._sharded.group._all_gather_comm = self._own

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return uninitialized memory."""
        return self._own.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather rows, (row,), to ``output_tensor``, (ranks * row,), decoded."""
        self._context.run.refuse_capture()
        self._context.before_gather(self._sharded)
        if self._sharded.fsdp_gathers:
            self._sharded.level.shards.flat.count_ring(output_tensor.nbytes, role="weights")
            return self._own(output_tensor, input_tensor, group, async_op)
        if input_tensor.numel() != self._sharded.row_numel:
            # reshard_after_forward=int gathers weights that are decoded already, among some ranks.
            some_ranks = dist.get_process_group_ranks(group)
            self._sharded.level.shards.flat.count_ring(
                output_tensor.nbytes, role="weights", among=some_ranks
            )
            return self._own(output_tensor, input_tensor, group, async_op)
        with profiler_range("gather", self._sharded.title):
            if self._node_shard is not None:
                pending = self._node_shard.gather(output_tensor)
            else:
                pending = self._gather(output_tensor, input_tensor)
        if async_op:
            return _Gathering(pending)
        pending.wait()
        return None

    def _gather(self, output_tensor: Tensor, input_tensor: Tensor) -> Pending[Any]:
        shards = self._sharded.level.shards
        bound_codecs, message = self._weight_codecs.of_step(self._plan)
        if shards.intra is None and not shards.flat.sealed and self._weight_codecs.are_exact:
            return self._gather_exactly(output_tensor, input_tensor, bound_codecs[0])
        return message.gather(shards, [input_tensor], bound_codecs, lambda: [output_tensor])

    def _gather_exactly(
        self, output_tensor: Tensor, input_tensor: Tensor, exact: BoundCodec
    ) -> Pending[Any]:
        """Gather rows as they are, without a message of their own."""
        flat = self._sharded.level.shards.flat
        payload = input_tensor.view(torch.uint8)
        with flat.encoding("weights") as note:
            if note is not None:
                note(exact.error, input_tensor, payload)
        return flat.all_gather(payload, role="weights", into=output_tensor.view(torch.uint8))

    def _plan(self, bound_codecs: Sequence[BoundCodec]) -> Message:
        shards = self._sharded.level.shards
        codecs = tuple([bound.codec for bound in bound_codecs])
        return plan_gather(self._sharded.layout, codecs, shards.rank, shards.node_size)
