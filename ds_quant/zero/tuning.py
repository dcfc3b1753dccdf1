"""Scheme "autotune": measures the links and codecs of an engine at start-up and picks a scheme.

Every rank measures, because links are measured together and codecs under the load that a step
brings; rank 0 decides for all.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ds_quant import bandwidth, codec_speed
from ds_quant.autotune import Candidate, Links, Place, choose, codec_seconds, slice_pace
from ds_quant.bandwidth import Rate
from ds_quant.config import QuantizedCommConfig
from ds_quant.link import Link
from ds_quant.metrics import Traffic
from ds_quant.presets import CANDIDATES
from ds_quant.refusals import starts
from ds_quant.zero import parameters, seams
from ds_quant.zero.binding import Binding
from ds_quant.zero.world import broadcast


def tune(binding: Binding, config: QuantizedCommConfig) -> QuantizedCommConfig:
    """The settings with the scheme that suits this engine; notes the reason, and the pace of slices
    on these links. A collective.
    """
    place = Place(
        stage=binding.stage,
        micro_steps=binding.engine.gradient_accumulation_steps(),
        nodes=binding.topology.nodes,
        node_size=binding.topology.node_size,
        modules=sum(map(_is_gathered, binding.engine.module.modules())),
        gathers=binding.gathers,
    )
    links = _links(binding)
    found = [_candidate(binding, config.picked(name), place) for name in _allowed(config, place)]
    choice = choose(found, place, links)
    (chosen,) = (c for c in found if c.name == choice.scheme)
    decided = choice.scheme, choice.reason(links), slice_pace(chosen, place, links)
    scheme, reason, pace = broadcast(decided, source=0)
    binding.notices.append(reason)
    if pace is not None:
        binding.slicing = replace(binding.slicing, pace=pace)
    return config.picked(scheme)


def _is_gathered(module: torch.nn.Module) -> bool:
    """Whether it has parameters of its own that do not stay gathered."""
    return any(not getattr(p, "ds_persist", True) for p in module.parameters(recurse=False))


def _allowed(config: QuantizedCommConfig, place: Place) -> list[str]:
    """Candidates without those that start-up would refuse."""
    where = {"world": place.nodes * place.node_size, "node_size": place.node_size}
    return [n for n in CANDIDATES if starts(config.picked(n), stage=place.stage, **where)]


def _links(binding: Binding) -> Links:
    """Measure both levels. On links of their own, so that nothing is counted as training."""
    fabric, topology = binding.fabric(None), binding.topology  # None: the world
    intra, inter = fabric.intra, fabric.inter
    if intra is None and topology.nodes == 1:
        intra = fabric.whole
    elif inter is None:
        inter = fabric.whole
    rates: list[Rate | None] = []
    for link in (intra, inter):
        if link is None:
            rates.append(None)
            continue
        uncounted = Link(link.process_group, topology=topology, traffic=Traffic())
        rates.append(bandwidth.measure_shortly(uncounted, parameters.device()))
    inside, between = rates
    if between is not None:  # every rank of a node receives its own share at the same time
        whole = between.bytes_per_second * topology.node_size
        between = Rate(bytes_per_second=whole, latency=between.latency)
    return Links(intra=inside, inter=between)


def _candidate(binding: Binding, config: QuantizedCommConfig, place: Place) -> Candidate:
    scheme = config.to_scheme()
    dtypes = [p.dtype for p in binding.engine.module.parameters() if p.is_floating_point()]
    speeds = codec_speed.speeds_of(
        scheme,
        weights=dtypes[0] if dtypes else torch.float32,
        gradients=seams.gradient_dtype(binding.engine),
        device=parameters.device(),
    )
    codec = codec_seconds(scheme, speeds, place)
    return Candidate(name=config.scheme, bill=binding.bill(scheme), codec=codec)
