"""The nodes' copies of the weights of all modules, kept equal to the weights themselves.

[Note: when weights are compared] After an optimizer step the nodes receive the changes. Other code
may write weights at any time: it loads a checkpoint, clamps, swaps an average in for an evaluation,
or perturbs weights between two forwards. So weights are compared with what was sent, by content,
before the first gather of each forward; a forward begins where a module is gathered again. All
ranks vote, and the parameters that any of them has written are filled exactly. Before an optimizer
step, writes since the last forward are noted. A backward compares nothing: it uses the weights of
its forward.

[Note: one agreement] Lossless messages have lengths that all nodes must know before the first one
is posted. They are exchanged once per step for all modules of a mesh: see [Note: lengths] of
comm/lossless_gather.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress

import torch
from torch import Event, Tensor

from ds_quant.comm.lossless_gather import posts
from ds_quant.config.errors import KEY
from ds_quant.fsdp2.context import Context
from ds_quant.fsdp2.node_shard import NodeShard
from ds_quant.runtime.param import Param
from ds_quant.runtime.run import Level
from ds_quant.runtime.written_weights import WrittenWeights


class NodeCopies:
    """The node shards of a model: see [Note: when weights are compared].

    ``detach`` of the front frees them, with the fingerprints: 8 bytes per piece of a shard.
    """

    def __init__(self, context: Context, node_shards: Sequence[NodeShard]) -> None:
        self._run = context.run
        self.node_shards = node_shards
        # In their own dtype, without a cast. So a write that the sent dtype does not show counts.
        dtypes = [shard.dtype for each in node_shards for shard in each.sharded.shards()]
        self._written = WrittenWeights(dtypes, self._run.device)
        self._compared: Event | None = None  # after the last fingerprints; None on the CPU
        self._is_marked = False
        self._has_logged = False
        self.resync()

    @property
    def nbytes(self) -> int:
        """Bytes of all copies on this rank."""
        return sum(node_shard.nbytes for node_shard in self.node_shards)

    def rows(self) -> list[Tensor]:
        """Return the rows of this rank, with the weights of the last step; none before they are
        filled.
        """
        return [node_shard.rows() for node_shard in self.node_shards if node_shard.is_filled]

    def comparable_weights(self) -> Iterator[tuple[int, Iterable[Tensor]]]:
        """See ``copies.WeightCache``. Ranks of equal place in the nodes of a level hold equal rows;
        the first of them stands for their owner.
        """
        by_level: dict[Level, list[Tensor]] = {}
        for node_shard in self.node_shards:
            if node_shard.is_filled:
                by_level.setdefault(node_shard.sharded.level, []).append(node_shard.rows())
        for level, rows in by_level.items():
            yield level.between_nodes.ranks[0], rows

    # ---- weights that were written ----

    def resync(self) -> None:
        """Let the next forward fill all copies exactly, if any rank calls this."""
        self._is_marked = True
        for shard in range(sum(len(each.sharded.params) for each in self.node_shards)):
            self._written.mark(shard)

    def resync_frozen(self) -> None:
        """Let the next forward fill the copies of frozen weights exactly.

        An exchange does not send them, so they stay as the last quantized one has left them.
        """
        self._is_marked = True
        params = [param for each in self.node_shards for param in each.sharded.params]
        for shard, param in enumerate(params):
            if not param.trained:
                self._written.mark(shard)

    def note_writes(self) -> None:
        """Note the writes since the last forward, before an optimizer step."""
        self._written.note(self._shards())
        self._record()

    def fill_written(self) -> None:
        """Fill the copies of weights that any rank has written. A collective.

        Raises:
            UnequalSteps: on all ranks, if they have taken other numbers of steps.
        """
        if self._compared is not None:
            # Gathers need not wait for the stream of the optimizer: ``set_post_optim_event``.
            self._compared.wait()
        steps = self._run.step
        written = set(self._written.written(self._shards(), self._run.votes, steps=steps))
        if not written:
            return
        params: list[Param] = []
        nbytes = 0
        first = 0
        for node_shard in self.node_shards:
            own = node_shard.sharded.params
            is_written = [first + index in written for index in range(len(own))]
            first += len(own)
            if not any(is_written):
                continue
            with self._run.traffic.adding():
                node_shard.fill(is_written)
            filled = list(compress(own, is_written))
            numel = sum(param.shape.numel() for param in filled)
            nbytes += numel * node_shard.sharded.dtype.itemsize
            params += filled
        if not (self._is_marked or self._has_logged):
            self._has_logged = True
            self._run.log(
                f"{KEY}: weights of {len(params)} parameter(s), such as {params[0].name}, were "
                f"written outside of an optimizer step: all nodes have received them exactly, "
                f"{nbytes / 1e6:.3g} MB between nodes. Each such write costs as much (logged once)"
            )
        self._is_marked = False

    # ---- optimizer steps ----

    def exchange(self) -> None:
        """Post the new weights of all modules between the nodes: see [Note: one agreement].

        A collective.
        """
        run = self._run
        lossless: dict[tuple[Level, torch.dtype], list[NodeShard]] = {}
        for node_shard in self.node_shards:
            node_shard.finish_exchange()  # a forward may have skipped the module
            if not node_shard.is_filled:
                continue  # no forward yet: the first one fills it
            if node_shard.sends_lossless:
                sharded = node_shard.sharded
                lossless.setdefault((sharded.level, sharded.dtype), []).append(node_shard)
            else:
                node_shard.exchange()
        for (level, _), node_shards in lossless.items():
            rows = [node_shard.lossless_rows() for node_shard in node_shards]
            inter = level.between_nodes
            gathers = posts(rows, inter, inter, device=run.device, traffic=run.traffic)
            for node_shard, post in zip(node_shards, gathers, strict=True):
                node_shard.exchange_lossless(post)
        self._written.take(self._shards(), self._sent())
        self._record()

    def _sent(self) -> set[int] | None:
        """Return the parameters that the exchange has sent, by their index in all modules; None if
        it has sent all.

        A frozen one stays comparable with what was sent of it before: an optimizer that holds its
        gradient, or a hook of the user, may have moved it in this step.
        """
        sent: set[int] = set()
        first = 0
        for node_shard in self.node_shards:
            own = node_shard.sharded.params
            if node_shard.is_filled:
                sent.update([first + index for index, param in enumerate(own) if param.trained])
            first += len(own)
        return None if len(sent) == first else sent

    def finish(self) -> None:
        """Wait for all running exchanges."""
        for node_shard in self.node_shards:
            node_shard.finish_exchange()

    def _record(self) -> None:
        """Record that the fingerprints so far are computed."""
        if self._run.device.type != "cpu":
            self._compared = Event(self._run.device)
            self._compared.record()

    def _shards(self) -> list[Tensor]:
        """Return this rank's shards of all parameters, padded and flat."""
        return [shard for each in self.node_shards for shard in each.sharded.shards()]
