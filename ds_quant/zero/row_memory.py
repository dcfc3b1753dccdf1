"""The memory of the node shard's rows.

[Note: rows in host memory] If DeepSpeed keeps its shards on the host (``offload_param``), the rows
are there, too, page-locked. A gather copies its rows to the device when it is posted, as far ahead
of their use as DeepSpeed fetches. An exchange copies a chunk to the device when it has arrived,
changes it there and copies it back; differences are also taken from a copy. Copies run in order of
the stream that asks for them: the device holds one chunk and the gathers under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ds_quant.comm.node_rows import RowArena, ShardRows
from ds_quant.comm.topology import Topology
from ds_quant.runtime.param import Param
from ds_quant.zero import accelerator, offload


class RowMemory:
    """The rows of all parameters that the node shard serves, ``Param.node_rows``.

    They are zeros at first. ``free`` frees them.

    local: this rank's index in its node.
    stays_on_host: True if the rows are in host memory throughout.
    """

    def __init__(
        self, params: Sequence[Param], topology: Topology, *, local: int, stays_on_host: bool
    ) -> None:
        self._params = params
        self._nodes = topology.nodes
        self._stays_on_host = stays_on_host
        self._is_away = False  # moved to the host by ``leave_device``
        arena = self._new_arena(on_host=stays_on_host)
        for param in params:
            param.node_rows = ShardRows.allocate(
                param.tensor.ds_numel,
                nodes=topology.nodes,
                node_size=topology.node_size,
                local=local,
                dtype=param.tensor.ds_tensor.dtype,
                arena=arena,
                device=accelerator.device() if stays_on_host else None,
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the rows on this rank."""
        return sum(param.node_rows.rows.nbytes for param in self._params)

    def leave_device(self, *, pin: bool) -> None:
        """Move all rows to the host: see ``offload.follow_states``.

        Afterwards gathers read copies: [Note: rows in host memory].
        """
        if not (self._stays_on_host or self._is_away):
            accelerator.synchronize()  # other streams may have written rows
            self._move(self._new_arena(on_host=True, pin=pin), away_from=accelerator.device())

    def return_to_device(self) -> None:
        """Move all rows back: see ``offload.follow_states``. The copies may still be under way."""
        if self._is_away:
            self._move(self._new_arena(on_host=False), away_from=None)

    def free(self) -> None:
        """Free the rows."""
        for param in self._params:
            del param.node_rows
        self._params = []

    def _new_arena(self, *, on_host: bool, pin: bool = True) -> RowArena:
        """Return an arena for all rows, on the device or the host."""
        shard_bytes = sum(param.tensor.ds_tensor.nbytes for param in self._params)
        device = torch.device("cpu") if on_host else accelerator.device()

        def zeros(nbytes: int) -> Tensor:
            block = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            return offload.pin(block) if on_host and pin else block

        return RowArena(self._nodes * shard_bytes, zeros)

    def _move(self, arena: RowArena, *, away_from: torch.device | None) -> None:
        """Copy all rows into ``arena``. away_from: device of the collectives, None to return."""
        self._is_away = away_from is not None
        for param in self._params:
            old_rows = param.node_rows.rows
            rows = arena.zeros(*old_rows.shape, dtype=old_rows.dtype)
            rows.copy_(old_rows, non_blocking=not self._is_away)
            param.node_rows = replace(param.node_rows, rows=rows, device=away_from)
