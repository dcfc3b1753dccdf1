"""The start-up lines, and the long line of ``ds_quant.report`` that leaves nothing out.

Logged are at most three lines that need no glossary; advice and notices follow, a line each. The
long line names all bytes, tensors in full precision and memory.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ds_quant.config.errors import did_you_mean
from ds_quant.config.presets import preset_groups
from ds_quant.config.schema import parse_block
from ds_quant.kernels import dispatch
from ds_quant.policy import choosing, in_words
from ds_quant.policy.model_volume import ModelVolume
from ds_quant.policy.scheme import Scheme, matches
from ds_quant.runtime.run import Run, StockVolume

GB = 1e9
_LESS = 0.9  # share of the bytes below which another scheme is advised
_NOTABLE = 0.05  # share of the bytes from which tensors in full precision are named
_LINES, _COLUMNS, _INDENT = 3, 100, 2


@dataclass(frozen=True, kw_only=True)
class LineParts:
    """The part of the lines that a front knows.

    layout: such as "ZeRO-3". report_of: the argument of ``ds_quant.report``.
    volume: of the run.
    stock: volume without the block.
    micro_steps: of the period that bytes are counted of. period: its name.
    kept_bytes: that the scheme keeps on this rank. kept_where: " in host memory", or "".
    between: stands between the number of nodes and that of their ranks.
    fetches, weights, gradients: clauses about these, or "". gradients: how they are kept until the
        last micro-step.
    accumulates: True if gradients are kept so in every step, False if the user declares it later.
    reasons: sentences that say why something stays in full precision.
    """

    layout: str
    volume: ModelVolume
    stock: StockVolume
    micro_steps: int = 1
    period: str = "step"
    kept_bytes: float = 0.0
    report_of: str = "model"
    kept_where: str = ""
    between: str = "x"
    fetches: str = ""
    weights: str = ""
    gradients: str = ""
    accumulates: bool = False
    reasons: Sequence[str] = ()


def announce(run: Run, front: LineParts) -> None:
    """Log the start-up lines and warnings on the first rank of the run."""
    _warn_of_unmatched(run)
    run.info(summary(run, front))
    for sentence in _sentences(run, front):
        run.info(f"quantized_comm: {sentence}")


# ---- the start-up lines ----


def summary(run: Run, front: LineParts) -> str:
    """Describe a run in at most three lines of 100 columns."""
    block = run.scheme.block
    head = f"quantized_comm: {run.scheme.name} on {front.layout}, {_places(run)}"
    facts: list[str] = []
    if run.topology.world > 1:
        ratio, both = _ratio_and_bytes(run, front)
        formats = in_words.formats(front.volume.routes, _weights_dtype(run))
        if _leaves_all_out(run, front.volume):
            formats = in_words.NOTHING
        facts += [f"{head}: {ratio}", f"({both}); {formats};"]
    else:
        facts.append(f"{head};")
    if block.warmup_steps:
        facts.append(f"from step {block.warmup_steps} on;")
    if run.topology.world > 1:
        facts.append(f"{_memory_in_short(run, front)};")
    kernels = dispatch.name_of_kernels(run.device, block.backend)
    facts += [f"{kernels};", f"all: ds_quant.report({front.report_of})"]
    return "\n  ".join(_lines_of(facts))


def _lines_of(facts: Sequence[str]) -> list[str]:
    """Break the lines between facts, else between words; leave out the last facts if need be."""
    lines = _filled(facts)
    kept = list(facts)
    while not _fit(lines):
        lines = _filled(re.split(r"(?<!\d) ", " ".join(kept)))  # numbers stay with their units
        kept.pop()
    return lines


def _fit(lines: Sequence[str]) -> bool:
    widths = [len(lines[0]), *(_INDENT + len(line) for line in lines[1:])]
    return len(lines) <= _LINES and max(widths) <= _COLUMNS


def _filled(pieces: Sequence[str]) -> list[str]:
    """Fill lines with pieces that are not broken. All but the first line are indented by two."""
    lines: list[str] = []
    for piece in pieces:
        indent = _INDENT if len(lines) > 1 else 0
        if lines and indent + len(f"{lines[-1]} {piece}") <= _COLUMNS:
            lines[-1] += f" {piece}"
        else:
            lines.append(piece)
    return lines


def saving(run: Run, front: LineParts) -> str:
    """Compare the bytes of a step with those of a run without the block."""
    ratio, both = _ratio_and_bytes(run, front)
    return f"{ratio} ({both})"


def _ratio_and_bytes(run: Run, front: LineParts) -> tuple[str, str]:
    sent_bytes = front.volume.step_bytes(run.routes.stage, micro_steps=front.micro_steps)
    nodes = max(level.topology.nodes for level in run.levels)
    ranks = "processes" if run.device.type == "cpu" else "GPUs"
    ratio = in_words.saving(front.stock.bytes_per_param, sent_bytes, nodes=nodes, ranks=ranks)
    figures = f"{sent_bytes:.2f} instead of {front.stock.bytes_per_param:.2f}"
    return ratio, f"{figures} per parameter and {front.period}"


def _places(run: Run) -> str:
    """Name the nodes and their ranks, as "2 nodes x 8 GPUs"."""
    nodes, node_size = run.topology.nodes, run.topology.node_size
    rank = "CPU process" if run.device.type == "cpu" else "GPU"
    ranks = f"{rank}{'' if node_size == 1 else 'es' if rank.endswith('s') else 's'}"
    return f"{nodes} node{'s' if nodes > 1 else ''} x {node_size} {ranks}"


def _weights_dtype(run: Run) -> torch.dtype:
    """Return the dtype of most weights."""
    numel_by_dtype: Counter[torch.dtype] = Counter()
    for params in run.workload.params:
        for sent in params:
            numel_by_dtype[sent.dtype] += sent.param.shape.numel()
    return max(numel_by_dtype, key=lambda dtype: numel_by_dtype[dtype], default=torch.bfloat16)


def _memory_in_short(run: Run, front: LineParts) -> str:
    """Describe the memory that the scheme takes: between steps, and in a step."""
    volume = front.volume
    in_step = run.peak_bytes(volume)
    if front.accumulates:
        in_step += volume.partial_sums * volume.numel
    per = "process" if run.device.type == "cpu" else "GPU"
    kept = ""
    if front.kept_bytes:
        kept = f"{in_words.amount(front.kept_bytes)} kept{front.kept_where} + "
    return f"memory per {per}: {kept}{in_words.amount(in_step)} at most in a step"


def _sentences(run: Run, front: LineParts) -> list[str]:
    """Return warnings, advice and notices, for a line each."""
    volume = front.volume
    sentences: list[str] = []
    if _names_tensors(run, volume):
        tensors = ", ".join(_tensors_by_reason(volume))
        share = 100 * volume.full_precision_share
        sentences.append(f"NOT compressed: {tensors}, {share:.1f} % of the bytes")
    why_no_native = dispatch.why_no_native(run.device, run.scheme.block.backend)
    if why_no_native:
        sentences.append(f"torch kernels are slow: {why_no_native}")
    return [*sentences, *_advice_and_notices(run, front)]


def _names_tensors(run: Run, volume: ModelVolume) -> bool:
    """Return True if single tensors in full precision have a notable share of the bytes."""
    if run.topology.world == 1:
        return False
    if _leaves_all_out(run, volume):
        return True
    formats = in_words.formats(volume.routes, _weights_dtype(run))
    names_role = in_words.UNCOMPRESSED in formats or formats == in_words.NOTHING
    return not names_role and volume.full_precision_share > _NOTABLE


def _leaves_all_out(run: Run, volume: ModelVolume) -> bool:
    """Return True if the block quantizes no tensor that the scheme would, by its exceptions."""
    if in_words.formats(volume.routes, _weights_dtype(run)) == in_words.NOTHING:
        return False
    return math.isclose(volume.full_precision_share, 1)


# ---- the long line ----


def full_line(run: Run, front: LineParts) -> str:
    """Describe a run in one line, its notices last."""
    volume = front.volume
    parts = [*_traffic(run, volume, front), *_memory(run, volume, front)]
    scheme = run.scheme
    if scheme.block.warmup_steps:
        parts.append(f"from step {scheme.block.warmup_steps} on")
    if volume.varies:
        most = volume.step_bytes(run.routes.stage, micro_steps=front.micro_steps, most=True)
        parts.append(
            f"traffic depends on the learning rate: volume {most:.2f} B/param/step at most"
        )
    return "; ".join([*parts, *_advice_and_notices(run, front)])


def _advice_and_notices(run: Run, front: LineParts) -> list[str]:
    """Return a sentence each."""
    if _leaves_all_out(run, front.volume):  # no other scheme would help
        return list(run.notices)
    sentences = _advised_lossless(run, front)
    sentences += front.reasons
    sentences += _advised(front.volume, run.comm_volume, micro_steps=run.workload.micro_steps)
    sentences += run.notices
    return sentences


def _traffic(run: Run, volume: ModelVolume, front: LineParts) -> list[str]:
    """Describe scheme, bytes, ranks and kernels."""
    stage = run.routes.stage
    outer = volume.step_bytes(stage, micro_steps=front.micro_steps)
    inner = volume.intra_bytes(stage, micro_steps=front.micro_steps)
    between = " between nodes" if inner else ""
    parts = [
        f"{run.scheme.name} on {front.layout}, volume {outer:.2f} B/param/{front.period}{between} "
        f"({front.stock.dtypes} {front.stock.bytes_per_param:.2f}), {_unquantized(volume)}",
        *_ranks(run, volume, front),
        dispatch.describe(run.device, run.scheme.block.backend),
    ]
    if front.fetches:
        parts.append(front.fetches)
    if run.topology.world > 1:
        received = volume.received_per_node(stage, micro_steps=front.micro_steps)
        crosses = any(level.topology.nodes > 1 for level in run.levels)
        receiver = "node" if crosses else "rank"
        parts.append(f"{received:.2f} B/param/{front.period} received per {receiver}")
    if inner:
        parts.append(f"volume inside a node {inner:.2f} B/param")
    return parts


def _ranks(run: Run, volume: ModelVolume, front: LineParts) -> list[str]:
    """Describe the ranks of every level; of several levels also their shares of the parameters and
    the bytes that each sends, the largest first.
    """
    clauses: list[tuple[int, str]] = []
    for level, part in zip(run.levels, volume.parts, strict=True):
        topology = level.topology
        between = front.between if level.routes.replicas else "x"
        of_all = "" if topology.world == run.topology.world else f"of {run.topology.world} "
        clause = f"{topology.nodes} {between} {topology.node_size} {of_all}ranks"
        if len(run.levels) > 1:
            share = 100 * part.numel / max(1, volume.numel)
            nbytes = part.step_bytes(level.routes.stage, micro_steps=front.micro_steps)
            clause = f"{share:.3g} % of the parameters on {clause}, {nbytes:.2f} B/param"
        clauses.append((part.numel, clause))
    clauses.sort(key=lambda numel_and_clause: -numel_and_clause[0])
    return [clause for _, clause in clauses]


def _memory(run: Run, volume: ModelVolume, front: LineParts) -> list[str]:
    """Describe the memory that the scheme takes on a rank."""
    parts: list[str] = []
    if front.kept_bytes:
        per_param = f"{front.kept_bytes / volume.numel:.2f} B/param"
        gigabytes = f"{front.kept_bytes / GB:.3g} GB"
        parts.append(f"keeps {per_param} ({gigabytes}) more{front.kept_where} on every rank")
    if front.weights:
        parts.append(front.weights)
    if front.gradients:
        gigabytes = f"{volume.partial_sums * volume.numel / GB:.3g} GB"
        per_param = f"{volume.partial_sums:.2f} B/param"
        parts.append(
            f"{front.gradients}; buffering them takes {per_param} ({gigabytes}) on every rank"
        )
    if run.topology.world > 1:
        parts.append(f"extra memory: up to {run.peak_bytes(volume) / GB:.2g} GB")
    return parts


def _warn_of_unmatched(run: Run) -> None:
    """Log the patterns of ``exclude`` that match none of the parameters' names."""
    names = [param.name for param in run.params]
    for pattern in run.scheme.block.exclude:
        if not any(matches(name, pattern) for name in names):
            similar = did_you_mean(pattern, names, cutoff=0.4) or next(iter(names), "nothing")
            run.log(
                f'quantized_comm: exclude pattern "{pattern}" matches no parameter; one is called '
                f"{similar}"
            )


def _unquantized(volume: ModelVolume) -> str:
    """Name the tensors that are sent in full precision, and their share of the bytes."""
    routes, scheme = volume.routes, volume.routes.scheme
    quantizes_weights = routes.sends_weights and (scheme.weights is not None or scheme.lossless)
    if not quantizes_weights and scheme.gradients is None:
        return "nothing quantized"
    parts: list[str] = []
    if routes.sends_weights and (weights_stay(volume) or not quantizes_weights):
        parts.append("all weights")
    if scheme.gradients is None:
        parts.append("all gradients")
    parts += _tensors_by_reason(volume)
    if not parts:
        return "all tensors quantized"
    share = f"{100 * volume.full_precision_share:.1f} % of bytes"
    return f"{', '.join(parts)} unquantized ({share})"


def _tensors_by_reason(volume: ModelVolume) -> list[str]:
    """Count the tensors that a scheme leaves in full precision, such as "2 small tensors"."""
    tensors_by_reason = dict(volume.kept)
    small = tensors_by_reason.pop("1-D", 0) + tensors_by_reason.pop("small", 0)
    parts: list[str] = []
    if small:
        parts.append(f"{small} small tensor{'s' if small > 1 else ''}")
    parts += [f"{count} {reason}" for reason, count in sorted(tensors_by_reason.items())]
    return parts


def weights_stay(comm_volume: ModelVolume) -> bool:
    """Return True if the scheme compresses weights between nodes only, and there is one node."""
    routes = comm_volume.routes
    compresses = routes.scheme.weights is not None or routes.scheme.lossless
    route = routes.weights(dtype=torch.bfloat16)
    return compresses and routes.ranks > 1 and route.is_full_precision


def _advised_lossless(run: Run, front: LineParts) -> list[str]:
    """Name the scheme that is exact, too, where it sends less than ``hybrid``."""
    if run.scheme.name != "hybrid" or run.topology.nodes == 1:
        return []
    stage = run.routes.stage
    own_bytes = front.volume.step_bytes(stage, micro_steps=front.micro_steps)
    lossless = run.comm_volume(parse_block({"scheme": "lossless"}).to_scheme())
    lossless_bytes = lossless.step_bytes(stage, micro_steps=front.micro_steps)
    if lossless_bytes >= own_bytes:
        return []
    return ['advice: scheme "lossless" is also exact and sends less']


def _advised(
    own: ModelVolume, volume_of: Callable[[Scheme], ModelVolume], *, micro_steps: int
) -> list[str]:
    """Name the scheme that is advised between these nodes, if it sends clearly less.

    volume_of: the volume of another scheme on the same model.
    """
    routes = own.routes
    block = routes.scheme.block
    stage = routes.stage
    place = choosing.Place(stage, routes.nodes, routes.node_size, block.allow_full_replica)
    recommended = preset_groups()[""]
    is_lossy = routes.scheme.gradients is not None and block.scheme in recommended
    if routes.nodes == 1 or not is_lossy or block.scheme in choosing.candidates(place):
        return []
    best = choosing.autotune_candidates(place)[-1]  # the first ones are more precise
    exceptions = {"exclude": list(block.exclude), "min_numel": block.min_numel}
    other = volume_of(parse_block({"scheme": best, **exceptions}).to_scheme())
    other_bytes = other.step_bytes(stage, micro_steps=micro_steps)
    if other_bytes > _LESS * own.step_bytes(stage, micro_steps=micro_steps):
        return []
    keeps = ""
    if other.memory > own.memory:
        keeps = f" and keeps {other.memory:.2f} in memory"
    return [
        f'advice: scheme "{best}" sends {other_bytes:.2f} bytes per parameter and step here{keeps}'
    ]
