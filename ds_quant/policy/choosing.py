"""Which scheme to take: one table by ZeRO stage, GPUs per node and link.

README, docs/choosing.md, ``ds_quant estimate``, autotune and the start-up line all read it.

[Note: why these] Figures of docs/results.md: ``eden4`` sends half the bytes of ``qsdp`` between
nodes and loses less. It needs weights that everybody holds, which ZeRO-3 keeps where a node has
several GPUs to share them. On slow links ``lossless_w_g3`` was measured fastest; its exact weights
take longer to encode, which a fast link does not give back.
"""

from __future__ import annotations

from typing import NamedTuple

from ds_quant.config.schema import parse_block

EXACT = "full_precision"
NOTHING = ""  # leave the block out


class Row(NamedTuple):
    """What to take on a link from ``least`` Gb/s on, up to the row before.

    replicated, shared, alone: under ZeRO-1/2, under ZeRO-3 where a node has several GPUs, and where
    it has one. ask: only where ``ds_quant estimate`` says that it gains.
    """

    link: str
    least: float
    replicated: str
    shared: str
    alone: str
    ask: bool = False


# Gb/s into a node from the others.
BETWEEN = (
    Row("400 and more", 300, "eden4", "eden4", "qsdp", ask=True),
    Row("100 to 200", 60, "eden4", "eden4", "qsdp"),
    Row("10 to 40", 5, "eden4", "eden4", "qsdp"),
    Row("1", 0, "lossless_w_g3", "lossless_w_g3", "qsdp"),
)
# Gb/s into a GPU, on one node.
INSIDE = (
    Row("one node, NVLink", 1000, NOTHING, NOTHING, NOTHING),
    Row("one node, PCIe without peer access", 0, "eden4", "qsdp", "qsdp", ask=True),
)


class Place(NamedTuple):
    """Where a job runs. replica: a full copy of the weights on every rank is accepted
    (``allow_full_replica``).
    """

    stage: int
    nodes: int
    node_size: int
    replica: bool = False

    @property
    def rows(self) -> tuple[Row, ...]:
        """The part of the table that holds."""
        return BETWEEN if self.nodes > 1 else INSIDE

    @property
    def column(self) -> str:
        """The field of a row that holds."""
        if self.stage < 3:
            return "replicated"
        return "shared" if self.node_size > 1 or self.replica else "alone"


def recommended(place: Place, gigabits: float) -> str:
    """Return the scheme for a link in Gb/s, into a node from the others, or on one node into a GPU;
    ``NOTHING`` if the block is better left out.
    """
    row = next(row for row in place.rows if gigabits >= row.least)
    return getattr(row, place.column)


def candidates(place: Place) -> tuple[str, ...]:
    """List what may be taken at a place on any link, the most exact one first."""
    schemes = dict.fromkeys(getattr(row, place.column) for row in place.rows)
    return EXACT, *(scheme for scheme in schemes if scheme)


def tuned(place: Place) -> tuple[str, ...]:
    """List what autotune tries: not lossless differences, as long as the training makes them."""
    blocks = {name: parse_block({"scheme": name}, load_codecs=False) for name in candidates(place)}
    return tuple(name for name, block in blocks.items() if not block.weights.exactly_differ)
