"""The recommended scheme: one table by ZeRO stage, GPUs per node and link.

README, docs/choosing.md, ``ds_quant estimate``, autotune and the start-up line all read it.

[Note: why these] Figures of docs/results.md: ``eden4`` sends half the bytes of ``qsdp`` between
nodes with less error. It needs a reference of the weights on every rank, which ZeRO-3 keeps if the
GPUs of a node can share it. On slow links ``lossless_w_g3`` was measured fastest; lossless weights
take longer to encode, which does not pay on a fast link.
"""

from __future__ import annotations

from typing import NamedTuple

from ds_quant.config.presets import AUTOTUNE
from ds_quant.config.schema import QuantizedCommConfig, parse_block

EXACT = "full_precision"
NOTHING = ""  # no quantized_comm block


class Row(NamedTuple):
    """The recommended schemes for links of ``least`` Gb/s and more, up to the preceding row.

    link: name of the links.
    replicated: under ZeRO-1/2.
    shared: under ZeRO-3 with several GPUs per node.
    alone: under ZeRO-3 with one GPU per node.
    unsharded: under DDP, which sends no weights.
    ask: True if the gain is uncertain: only if ``ds_quant estimate`` predicts one.
    """

    link: str
    least: float
    replicated: str
    shared: str
    alone: str
    ask: bool = False
    unsharded: str = "eden4"


# By Gb/s into a node from the others.
BETWEEN = (
    Row("400 and more", 300, "eden4", "eden4", "qsdp", ask=True),
    Row("100 to 200", 60, "eden4", "eden4", "qsdp"),
    Row("10 to 40", 5, "eden4", "eden4", "qsdp"),
    Row("1", 0, "lossless_w_g3", "lossless_w_g3", "qsdp"),
)
# By Gb/s into a GPU, on one node.
INSIDE = (
    Row("one node, NVLink", 1000, NOTHING, NOTHING, NOTHING, unsharded=NOTHING),
    Row("one node, PCIe without peer access", 0, "eden4", "qsdp", "qsdp", ask=True),
)


class Place(NamedTuple):
    """The ZeRO stage and the nodes of a job; stage 0 is DDP.

    replica: True if a full copy of the weights on every rank is accepted (``allow_full_replica``).
    """

    stage: int
    nodes: int
    node_size: int
    replica: bool = False

    @property
    def rows(self) -> tuple[Row, ...]:
        """The applicable part of the table."""
        return BETWEEN if self.nodes > 1 else INSIDE

    @property
    def column(self) -> str:
        """The applicable field of a row."""
        if self.stage == 0:
            return "unsharded"
        if self.stage < 3:
            return "replicated"
        if self.node_size > 1 or self.replica:
            return "shared"
        return "alone"


def recommended(place: Place, gigabits: float) -> str:
    """Return the scheme for a link, ``NOTHING`` if the block is better left out.

    gigabits: Gb/s into a node from the others, or on one node into a GPU.
    """
    row = next(row for row in place.rows if gigabits >= row.least)
    return getattr(row, place.column)


def advised_below(place: Place, scheme: str) -> float | None:
    """Return the rate in Gb/s below which a scheme is recommended; None if it is on no slow link.

    A scheme that is recommended on the fastest links, too, has no such rate.
    """
    faster: Row | None = None
    for row in place.rows:
        if getattr(row, place.column) == scheme:
            return None if faster is None else faster.least
        faster = row
    return None


def advice_under_ddp(config: QuantizedCommConfig) -> str | None:
    """Return a sentence if the block sends nothing under DDP that it would quantize, else None."""
    if config.scheme == AUTOTUNE or config.gradients.enabled:
        return None
    return f'scheme "{config.scheme}" quantizes nothing under DDP: take "eden4"'


def candidates(place: Place) -> tuple[str, ...]:
    """Return the schemes that are recommended on any link, the most precise one first."""
    schemes = dict.fromkeys(getattr(row, place.column) for row in place.rows)
    return EXACT, *(scheme for scheme in schemes if scheme)


def autotune_candidates(place: Place) -> tuple[str, ...]:
    """Return the schemes that autotune times.

    Lossless differences are left out: the length of their messages depends on the training.
    """
    names = []
    for name in candidates(place):
        block = parse_block({"scheme": name}, load_codecs=False)
        if not block.weights.sends_lossless_differences:
            names.append(name)
    return tuple(names)
