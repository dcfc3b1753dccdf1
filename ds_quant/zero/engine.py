"""A DeepSpeed engine that a scheme is attached to: see ``AttachedEngine``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_quant.runtime.copies import WeightCache
from ds_quant.runtime.figures import figures
from ds_quant.runtime.run import Run
from ds_quant.runtime.start_line import full_line
from ds_quant.runtime.warmup import MessageKinds, message_kinds
from ds_quant.zero import hooks
from ds_quant.zero.fetch import Fetch
from ds_quant.zero.front import EngineFront
from ds_quant.zero.node_shard import NodeShard
from ds_quant.zero.partial_gradients import PartialGradients
from ds_quant.zero.replica import Replica
from ds_quant.zero.startup_line import line_parts_of


@dataclass(frozen=True, eq=False, kw_only=True)
class AttachedEngine:
    """The front of one DeepSpeed engine, with the parts that serve it.

    ``attach`` makes it, after all parts. DeepSpeed's engine holds it and lives as long.

    fetch: of ZeRO-3. Holds the node shard, which ``Fetch.close`` frees when DeepSpeed's engine is
        destroyed.
    replica: of ZeRO-1 and 2. Its weights are DeepSpeed's.
    partial_gradients: None unless gradients cross between nodes once per optimizer step. The last
        micro-step of a step frees its sums.
    """

    front: EngineFront
    events: hooks.Hooks
    fetch: Fetch | None = None
    replica: Replica | None = None
    partial_gradients: PartialGradients | None = None

    @property
    def run(self) -> Run:
        """The run of the front."""
        return self.front.run

    @property
    def node_shard(self) -> NodeShard | None:
        """The node shard, None if the scheme keeps none, or another engine serves this one."""
        return None if self.fetch is None else self.fetch.node_shard

    @property
    def weight_cache(self) -> WeightCache | None:
        """The node shard, or the replica if differences are added to it; else None."""
        if self.node_shard is not None:
            return self.node_shard
        if self.run.scheme.block.weights.difference_key:
            return self.replica
        return None

    def resync(self) -> None:
        """Refill the replica or node shard with exact weights on all ranks. A collective."""
        if self.replica is not None:
            self.replica.resync()
        if self.node_shard is not None:
            self.node_shard.resync()

    def message_kinds(self) -> MessageKinds:
        """Return dtypes and levels of the messages, for ``warm_up``."""
        front = self.front
        levels = list(dict.fromkeys(front.run.level(group) for _, group in front.served_params))
        return message_kinds(self.run, levels)

    def figures(self) -> dict[str, Any]:
        """Return the figures of ``ds_quant.report``."""
        front, engine, sums = self.front, self.front.engine, self.partial_gradients
        return {
            "stage": front.stage,
            "micro_steps": engine.micro_steps,
            "not_counted": ["gradients"] if front.stock_gradients_reason else [],
            "gathers": front.gathers,
            **figures(
                self.run,
                micro_steps=engine.gradient_accumulation_steps(),
                kept_bytes=0 if self.node_shard is None else self.node_shard.nbytes(),
                held_bytes=0 if sums is None else sums.most_nbytes,
                accumulates=hooks.accumulates(engine),
            ),
            "line": full_line(front.run, line_parts_of(front)),
        }
