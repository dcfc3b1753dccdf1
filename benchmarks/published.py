"""SDP4Bit's Table 2 against the cost model: which speed-ups follow from its bytes, and why not.

The paper's baseline reduces fp32 gradients: 6 bytes per parameter and step enter a node (2 bf16
weights, 4 gradients), SDP4Bit's two hops bring 1.033. Nothing overlaps on either side (App. D).
A baseline's step time follows from its TFLOPs with Megatron's formula (accumulation 1, micro-batch
1, sequence 2048); what is not communication at the assumed rate is compute, and the same compute
stands under SDP4Bit. May import ds_quant.policy.cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from ds_quant.policy.cost import Cluster, Volume, predict

BASE_BYTES, OUR_BYTES = 6.0, 1.033  # per parameter and step, into a node
SEQUENCE, VOCABULARY = 2048, 51200
CLOSE = 1.25  # a row within this factor counts as reproduced
STATED = {"A100": 100.0, "H800": 3200.0}  # Gb/s per node


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A row of Table 2; tensor: ranks of a model slice, pipeline: stages in different nodes."""

    cluster: str
    model: str
    numel: float
    hidden: int
    layers: int
    base: float  # TFLOPs per GPU of the baseline
    ours: float  # the same for SDP4Bit
    tensor: int = 1
    pipeline: int = 1

    @property
    def speedup(self) -> float:
        return self.ours / self.base

    @property
    def nodes(self) -> int:
        """Data-parallel nodes of the 16 that hold the same slice."""
        return 16 // self.pipeline

    @property
    def base_seconds(self) -> float:
        """Step of the baseline: Megatron's flops of one sequence per model replica."""
        h, layers = self.hidden, self.layers
        extra = 1 + SEQUENCE / (6 * h) + VOCABULARY / (12 * layers * h)
        flops = 72 * SEQUENCE * layers * h**2 * extra / (self.tensor * self.pipeline)
        return flops / (self.base * 1e12)

    def wire_seconds(self, volume: float, rate: float) -> float:
        """Time of `volume` bytes per parameter into a node at `rate` Gb/s."""
        cluster = Cluster(
            nodes=self.nodes, node_size=1, link=rate * 1e9 / 8, intra_link=1.0, flops=1.0
        )
        held = round(self.numel / self.pipeline)
        return predict(Volume(inter=volume), cluster, numel=held, tokens=1).communication

    def implied_rate(self) -> float:
        """Gb/s per node that saved bytes over saved time amount to."""
        saved = self.base_seconds * (1 - 1 / self.speedup)
        return self.wire_seconds(BASE_BYTES - OUR_BYTES, 1.0) / saved

    def predicted(self, rate: float) -> float | None:
        """Speed-up at `rate`; None if the baseline's bytes alone take longer than its step."""
        base = self.base_seconds
        compute = base - self.wire_seconds(BASE_BYTES, rate)
        return None if compute < 0 else base / (compute + self.wire_seconds(OUR_BYTES, rate))


def _entries() -> list[Entry]:
    """Table 2; parallelism of Table 8."""
    sizes = {"1.3B": (1.3e9, 2048, 24), "2.7B": (2.7e9, 2560, 32), "6.7B": (6.7e9, 4096, 32),
             "13B": (13e9, 5120, 40), "18B": (18e9, 6144, 40)}  # fmt: skip
    rows = {
        "A100": [("1.3B", 24.1, 57.6, 1, 1), ("2.7B", 24.0, 58.4, 1, 1),
                 ("6.7B", 10.8, 37.1, 4, 1), ("13B", 9.7, 26.0, 4, 2), ("18B", 10.2, 29.8, 4, 2)],
        "H800": [("1.3B", 69.1, 106.0, 1, 1), ("2.7B", 71.9, 116.9, 1, 1),
                 ("6.7B", 26.2, 77.9, 4, 1), ("13B", 13.9, 53.5, 8, 1), ("18B", 14.5, 59.2, 8, 1)],
    }  # fmt: skip
    return [
        Entry(cluster=cluster, model=model, numel=sizes[model][0], hidden=sizes[model][1],
              layers=sizes[model][2], base=base, ours=ours, tensor=tensor, pipeline=pipeline)
        for cluster, table in rows.items()
        for model, base, ours, tensor, pipeline in table
    ]  # fmt: skip


ENTRIES = _entries()


def compare() -> list[dict[str, Any]]:
    """Per row the published speed-up, and the model's at the stated and at the fitted rate.

    The fitted rate is one number per cluster: the median over its rows of saved bytes over saved
    time. So the rows of a cluster test each other, not the rate.
    """
    fitted = {
        cluster: median(e.implied_rate() for e in ENTRIES if e.cluster == cluster)
        for cluster in STATED
    }
    return [_row(entry, fitted[entry.cluster]) for entry in ENTRIES]


def _row(entry: Entry, fitted: float) -> dict[str, Any]:
    stated = entry.predicted(STATED[entry.cluster])
    at_fitted = entry.predicted(fitted)
    return {
        "cluster": entry.cluster, "model": entry.model, "published": entry.speedup,
        "stated_rate": STATED[entry.cluster], "at_stated_rate": stated,
        "fitted_rate": fitted, "at_fitted_rate": at_fitted,
        "verdict": f"stated rate: {_verdict(stated, entry.speedup)}; "
        f"fitted rate: {_verdict(at_fitted, entry.speedup)}",
    }  # fmt: skip


def _verdict(predicted: float | None, published: float) -> str:
    if predicted is None:
        return "impossible, the baseline's bytes alone take longer than its step: a faster link"
    factor = max(predicted / published, published / predicted)
    if factor <= CLOSE:
        return f"reproduced within a factor of {factor:.2f}"
    slower = "the link behaved slower than that" if predicted < published else "it was faster"
    return f"not reproduced, off by a factor of {factor:.2f}: {slower}"
