"""A plan under FSDP2: its memory, and HSDP beside it.

[Note: FSDP2 in a plan] Every block of the model is wrapped and gathered for forward and again for
backward. Shards are fp32 with mixed precision, which takes as many bytes as the 16-bit weights,
gradients, masters and states of ZeRO-3. Of whole blocks a GPU holds ``HELD_BLOCKS`` at once: two of
weights, the message that the second one is copied from, one of gradients, and their message.

[Note: parts] Tensor parallelism cuts the model into ``tensor_parallel`` parts, expert parallelism
its experts into ``expert_parallel``. A GPU has one part, and shares it with the GPUs that have the
same one: where the parts fill a node, these have one GPU per node. All parts of a node send over
its link, so each has a share of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from ds_quant.kernels.wire import ceil_div
from ds_quant.policy import choosing, memory
from ds_quant.policy.autotune import WORTH_IT
from ds_quant.policy.model import Model, dense_and_experts, part_of
from ds_quant.policy.model_volume import ModelVolume
from ds_quant.tools.forecast import Plan, Row, Sent, row_of

HELD_BLOCKS = 5
_HSDP = "fsdp2 hsdp as shipped"


@dataclass(frozen=True, kw_only=True)
class Fsdp2Plan(Plan):
    """A run to predict under FSDP2. See [Note: FSDP2 in a plan].

    tensor_parallel, expert_parallel: see [Note: parts].
    """

    stock: ClassVar[str] = "FSDP2 as shipped"
    assumptions: ClassVar[tuple[str, ...]] = (
        "fully_shard wraps every block; the last backward is declared",
        "(set_is_last_backward), HSDP reduces in it only (set_requires_all_reduce).",
    )
    more_gpus: ClassVar[str] = "take more GPUs or CPUOffloadPolicy, which the block refuses"

    tensor_parallel: int = 1
    expert_parallel: int = 1

    @property
    def front(self) -> str:
        """FSDP2 has no stages."""
        return "FSDP2"

    @property
    def facts(self) -> dict[str, Any]:
        """The front as JSON types."""
        return {"front": "fsdp2"}

    @cached_property
    def parts(self) -> Sequence[Fsdp2Plan]:
        """The parts of a GPU, see [Note: parts], but those that it shares with no other."""
        return [part for part in self._held if part.ranks > 1]

    @cached_property
    def _held(self) -> Sequence[Fsdp2Plan]:
        """The parts of a GPU."""
        if self.tensor_parallel == self.expert_parallel == 1:
            return [self]
        if self.expert_parallel == 1:
            return [self._part(self.model, self.tensor_parallel, "--tp", "part of the model")]
        dense, experts = dense_and_experts(self.model)
        return [
            self._part(dense, self.tensor_parallel, "--tp", "dense part"),
            self._part(experts, self.expert_parallel, "--ep", "experts"),
        ]

    def _part(self, model: Model, parts: int, option: str, name: str) -> Fsdp2Plan:
        """Return the plan of one of so many parts of a model, called ``name``.

        Raises:
            ValueError: so many parts do not fit the nodes; names the option.
        """
        nodes, node_size = self.cluster.nodes, self.cluster.node_size
        if node_size % parts == 0:
            places = nodes, node_size // parts
        elif parts % node_size == 0 and nodes % (parts // node_size) == 0:
            places = nodes // (parts // node_size), 1
        else:
            raise ValueError(
                f"{option} {parts}: allowed with {nodes} x {node_size} GPUs: a divisor of "
                f"{node_size}, or a multiple of it that divides {nodes * node_size}"
            )
        share = min(parts, node_size)
        cluster = replace(
            self.cluster, nodes=places[0], node_size=places[1], link=self.cluster.link / share
        )
        return replace(
            self,
            model=part_of(model, parts, name),
            cluster=cluster,
            tensor_parallel=1,
            expert_parallel=1,
        )

    @property
    def place(self) -> choosing.Place:
        """Stage and nodes of the part with the fewest GPUs per node."""
        part = min(self.parts, key=lambda part: part.cluster.node_size)
        return choosing.Place(
            self.stage, part.cluster.nodes, part.cluster.node_size, self.allow_full_replica
        )

    @property
    def gathers(self) -> float:
        """Gathers of the weights in a micro-step: for forward and for backward."""
        return 2.0

    @property
    def block_numel(self) -> int:
        """Elements that are gathered and reduced together."""
        return max(self.model.largest, ceil_div(self.model.numel, self.model.layers))

    @cached_property
    def stock_memory(self) -> float:
        """Bytes per GPU with Adam and without the plugin and activations."""
        return sum(part._memory() for part in self._held)

    @property
    def sizes(self) -> memory.Sizes:
        """The sizes that decide how much memory messages take."""
        numel = self.block_numel
        return replace(
            super().sizes, largest=numel, bucket=numel, prefetch=numel, exchanged_at_once=True
        )

    def other_rows(self, full_precision: ModelVolume) -> list[Row]:
        """Return the row of HSDP: sharded inside the nodes, replicated between them.

        Gradients are all-reduced between nodes once per optimizer step; sums of the micro-steps
        before it wait on the rank that owns them.
        """
        cluster, model, itemsize = self.cluster, self.model, self.dtype.itemsize
        if self._held != [self] or not self.has_two_levels:
            return []
        trained = full_precision.trained
        gpu_memory = self._memory(replicas=cluster.nodes)
        if self.micro_steps > 1:
            gpu_memory += itemsize * model.trained / cluster.node_size
        row = row_of(
            _HSDP,
            self,
            full_precision,
            sent=[
                Sent(
                    inter=2 * itemsize * trained,
                    intra=(self.gathers + trained) * itemsize * self.micro_steps,
                )
            ],
            gpu_memory=gpu_memory,
            host_memory=0.0,
            more_exchanges=1,
            note=self.too_large(gpu_memory),
        )
        return [row]

    def preferred(self, rows: list[Row]) -> str:
        """Return HSDP, which needs no plugin, unless the advised scheme is clearly faster."""
        steps = {row.scheme: row.step_serial for row in rows}
        to_beat = steps.get(self.advised, min(steps.values()))
        hsdp = steps.get(_HSDP, float("inf"))
        return _HSDP if hsdp < WORTH_IT * to_beat else self.advised

    def reason(self, taken: Row, faster: list[Row]) -> str:
        """Return the reason why HSDP is preferred to faster schemes."""
        if taken.scheme != _HSDP:
            return super().reason(taken, faster)
        names = " and ".join(row.scheme for row in faster)
        return f"{names}: less than 5 % faster than HSDP, which needs no plugin"

    def with_small_buckets(self) -> Plan:
        """Return the plan: messages are as large as the blocks that are wrapped."""
        return self

    def _memory(self, *, replicas: int = 1) -> float:
        """Return bytes per GPU, of a model with so many replicas, each sharded."""
        shards = self.ranks // replicas
        model, itemsize = self.model, self.dtype.itemsize
        states = (12 if itemsize == 2 else 8) + itemsize  # and gradients
        sharded = itemsize * model.numel + states * model.trained
        return sharded / shards + HELD_BLOCKS * itemsize * self.block_numel
