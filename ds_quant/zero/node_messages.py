"""The messages of the node shard: the codecs of their weights, and the chunks of an exchange.

node_shard.py decides when a message is posted. The layout of a message is in comm/rows.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_quant.codec.bound import BoundCodec, full_precision
from ds_quant.comm.lossless_gather import posts
from ds_quant.comm.node_rows import LosslessRows, chunk_ranges, exchange, gather
from ds_quant.comm.transport import Pending
from ds_quant.policy.in_flight import chunk_numel
from ds_quant.runtime.param import HopCodec, Param
from ds_quant.runtime.plan_cache import PlanCache
from ds_quant.runtime.run import Run
from ds_quant.zero import sharded_params
from ds_quant.zero.chunked_exchange import Chunk

# Index of a hop among the codecs of a parameter's weights.
_INTER_NODE = 0
_INTRA_NODE = -1


@dataclass(frozen=True, eq=False)
class NodePlan:
    """Parameters that travel together, with their codecs.

    hop_codecs: per parameter, between the nodes, then inside them. Frozen parameters have no codec
        between the nodes, nodes of one rank none inside.
    is_full_precision: the codecs are not used, because the step sends everything in full precision.
    is_lossy: per parameter True if its weights may differ from the exact ones.
    """

    params: Sequence[Param]
    hop_codecs: Sequence[tuple[HopCodec | None, ...]]
    is_full_precision: bool
    is_lossy: list[bool]


class NodeMessages:
    """Plans and posts the messages of the node shard."""

    def __init__(self, run: Run) -> None:
        self._run = run
        hierarchy = run.world.hierarchy
        # With one rank per node every message crosses between nodes.
        self._inter = hierarchy.inter or hierarchy.flat
        self._intra = hierarchy.intra
        self._rank = hierarchy.flat.rank
        # The parameters of a gather or a chunk repeat in every step. By parameters, and True for
        # steps in full precision.
        self._plans: PlanCache[tuple[tuple[Param, ...], bool], NodePlan] = PlanCache()

    # ---- codecs ----

    def plan(self, params: Sequence[Param], step: int) -> NodePlan:
        """Return the plan of parameters that travel together in an optimizer step."""
        is_full_precision = self._run.is_full_precision(step)
        key = tuple(params), is_full_precision
        plan = self._plans.get(key)
        if plan is None:
            hop_codecs = [
                param.weight_codecs(param.node_rows.rows.dtype, rank=self._rank) for param in params
            ]
            is_lossy = [not is_full_precision and any(codecs) for codecs in hop_codecs]
            plan = NodePlan(key[0], hop_codecs, is_full_precision, is_lossy)
            self._plans.add(key, plan)
        return plan

    def _bound_codecs(self, plan: NodePlan, hop: int, step: int) -> list[BoundCodec]:
        """Bind the codecs of one hop to a step."""
        if plan.is_full_precision:
            return _exact_codecs(plan.params)
        return [
            param.bound_codec(hop_codecs[hop], param.node_rows.rows.dtype, step)
            for param, hop_codecs in zip(plan.params, plan.hop_codecs, strict=True)
        ]

    # ---- inside the node ----

    def gather(self, plan: NodePlan, step: int) -> Pending[list[Tensor]]:
        """Post the gather of full parameters inside the node. step: that of the plan."""
        bound_codecs: list[BoundCodec] = []
        if self._intra is not None:  # else nothing is sent
            bound_codecs = self._bound_codecs(plan, _INTRA_NODE, step)
        return gather([param.node_rows for param in plan.params], bound_codecs, self._intra)

    # ---- between the nodes ----

    def fill(self, params: Sequence[Param]) -> None:
        """Fill the rows of parameters with the exact weights of their owners. A collective."""
        with self._run.traffic.adding():
            self._exchange(params, _exact_codecs(params)).wait()

    def chunks(self, params: Sequence[Param], step: int) -> Iterator[Chunk]:
        """Cut the exchange after an optimizer step into chunks, lossless differences first.

        Lossless differences are all encoded here, see [Note: lengths] of comm/lossless_gather.py;
        the others when they are posted.
        """
        by_lossless_dtype: dict[torch.dtype, list[Param]] = {}
        others: list[Param] = []
        lossless_dtypes = self._lossless_dtypes(params, step)
        for param in params:
            dtype = param.node_rows.rows.dtype
            if dtype in lossless_dtypes:
                by_lossless_dtype.setdefault(dtype, []).append(param)
            else:
                others.append(param)
        lossless_chunks: list[Sequence[Param]] = []
        for same_dtype in by_lossless_dtype.values():
            lossless_chunks += _cut(same_dtype)
        if lossless_chunks:
            yield from self._lossless(lossless_chunks)
        for chunk in _cut(others):
            bound_codecs = self._bound_codecs(self.plan(chunk, step), _INTER_NODE, step)
            yield chunk, partial(self._exchange, chunk, bound_codecs)

    def _lossless_dtypes(self, params: Sequence[Param], step: int) -> set[torch.dtype]:
        """Return the dtypes whose differences are lossless in a step."""
        if not self._run.scheme.lossless or self._run.is_full_precision(step):
            return set()
        dtypes = {param.node_rows.rows.dtype for param in params}
        return set(filter(self._run.routes.sends_lossless, dtypes))

    def _lossless(self, chunks: Sequence[Sequence[Param]]) -> Iterator[Chunk]:
        """Encode the lossless differences of all chunks. A collective."""
        sources = [
            LosslessRows(
                [param.node_rows.rows for param in chunk],
                self._inter.rank,
                partial(self._shards, chunk),
                chunk[0].node_rows.device,
            )
            for chunk in chunks
        ]
        post_each = posts(
            sources,
            self._inter,
            self._inter,
            device=self._run.device,
            traffic=self._run.traffic,
        )
        yield from zip(chunks, post_each, strict=True)

    def _exchange(
        self, params: Sequence[Param], bound_codecs: Sequence[BoundCodec]
    ) -> Pending[Any]:
        """Post this rank's new shards to the ranks of equal place in other nodes."""
        node_rows = [param.node_rows for param in params]
        return exchange(node_rows, self._shards(params), bound_codecs, self._inter)

    def _shards(self, params: Sequence[Param]) -> list[Tensor]:
        """Return this rank's own shards, as the optimizer has left them."""
        return sharded_params.valid_shards([param.tensor for param in params], self._rank)


def _exact_codecs(params: Sequence[Param]) -> list[BoundCodec]:
    return [full_precision(param.node_rows.rows.dtype) for param in params]


def _cut(params: Sequence[Param]) -> list[Sequence[Param]]:
    """Cut parameters into the chunks of an exchange."""
    widths = [param.node_rows.rows.shape[1] for param in params]
    chunks = chunk_ranges(widths, chunk_numel(sum(widths)))
    return [params[chunk.start : chunk.stop] for chunk in chunks]
