"""Cut the gradients of a sharded module into pieces, each summed by one rank."""

from __future__ import annotations

from collections.abc import Sequence

from ds_quant.comm.reduction_plan import Segment
from ds_quant.comm.slots import row_vector
from ds_quant.comm.small_tensors import is_tight, small_tensors_last
from ds_quant.fsdp2.sharded_module import ShardedModule
from ds_quant.kernels.wire import shard_range
from ds_quant.runtime.param import GradientCodecs
from ds_quant.runtime.reductions import placements


def segments_of(rows: ShardedModule, gradient_codecs: Sequence[GradientCodecs]) -> list[Segment]:
    """Return every rank's shard of every gradient, small ones last; with replicas a shard in as
    many pieces as there are nodes, and a replicated parameter in pieces for all ranks.
    """
    if rows.is_replicated:
        return _pieces_of_replicated(rows, gradient_codecs)
    if rows.level.replicas > 1:
        return _pieces(rows, gradient_codecs)
    route = rows.level.hops
    plain = len(route) == 1 and not route[0].full_precision_own
    plain = plain and not any(codecs.spec.block for codecs in gradient_codecs)
    last_codecs = [codecs.spec.codecs[-1] for codecs in gradient_codecs]
    segments = []
    for index in small_tensors_last(last_codecs):
        width = rows.widths[index]
        for rank, numel in enumerate(rows.lengths[index]):
            segments.append(
                Segment(
                    tensor=0,
                    start=rank * rows.row_numel + rows.offsets[index],
                    numel=numel,
                    gradient=index,
                    first=rank * width,
                    reducer=rank,
                    total=rows.offsets[index],
                    vector=row_vector(rank, numel, width) if plain else None,
                    slot=width if plain or is_tight(last_codecs[index]) else 0,
                )
            )
    return segments


def _pieces(rows: ShardedModule, gradient_codecs: Sequence[GradientCodecs]) -> list[Segment]:
    """Cut the shard of every local rank: node n sums the n-th piece."""
    topology = rows.level.topology
    segments = []
    for index in small_tensors_last([codecs.spec.codecs[-1] for codecs in gradient_codecs]):
        for local, numel in enumerate(rows.lengths[index]):
            shard_start = local * rows.row_numel + rows.offsets[index]
            for node in range(topology.nodes):
                start, stop = shard_range(numel, topology.nodes, node)
                segments.append(
                    Segment(
                        tensor=0,
                        start=shard_start + start,
                        numel=stop - start,
                        gradient=index,
                        first=local * rows.widths[index] + start,
                        reducer=node * topology.node_size + local,
                    )
                )
    return segments


def _pieces_of_replicated(
    rows: ShardedModule, gradient_codecs: Sequence[GradientCodecs]
) -> list[Segment]:
    """Cut every gradient into pieces, each summed by one rank."""
    placed = placements(rows.params, rows.level.hierarchy.size)
    segments: list[Segment] = []
    for index in small_tensors_last([codecs.spec.codecs[-1] for codecs in gradient_codecs]):
        numel = rows.widths[index]
        whole = Segment(
            tensor=0, start=rows.offsets[index], numel=numel, gradient=index, first=0, reducer=0
        )
        unit = gradient_codecs[index].spec.unit
        pieces = placed[rows.params[index]].pieces(numel, unit)
        segments += [whole.part(start, stop, reducer=rank) for start, stop, rank in pieces]
    return segments
