"""SDP4Bit's Table 2 and Fig. 7 from bytes: speed-ups that follow from volumes and one link rate.

The paper's baseline gathers bf16 weights and reduces fp32 gradients: 6 bytes per parameter enter a
node in every step; SDP4Bit sends 1.03. Nothing overlaps on either side. The step time of a baseline
follows from its TFLOPs by Megatron's formula: micro-batch 1, sequences of 2048. What is not
communication at an assumed link rate is compute, and SDP4Bit has the same compute.
May import the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median

BASELINE_BYTES, SDP4BIT_BYTES = 6.0, 1.033  # per parameter and step, into a node
SEQUENCE, VOCABULARY = 2048, 51200
NODES = 16
CLUSTERS = ("A100", "H800")

# Model: parameters, width, layers.
SIZES = {
    "1.3B": (1.3e9, 2048, 24),
    "2.7B": (2.7e9, 2560, 32),
    "6.7B": (6.7e9, 4096, 32),
    "13B": (13e9, 5120, 40),
    "18B": (18e9, 6144, 40),
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A row of Table 2, with the parallelism of Table 8.

    baseline, sdp4bit: TFLOPs per GPU.
    tensor: ranks that share a layer. pipeline: stages, which lie in different nodes.
    """

    cluster: str
    model: str
    baseline: float
    sdp4bit: float
    tensor: int
    pipeline: int

    @property
    def speedup(self) -> float:
        return self.sdp4bit / self.baseline

    @property
    def step_seconds(self) -> float:
        """Seconds of a step of the baseline."""
        _, width, layers = SIZES[self.model]
        extra = 1 + SEQUENCE / (6 * width) + VOCABULARY / (12 * layers * width)
        flops = 72 * SEQUENCE * layers * width**2 * extra / (self.tensor * self.pipeline)
        return flops / (self.baseline * 1e12)

    def wire_seconds(self, volume: float, gigabits: float, nodes: int = NODES) -> float:
        """Seconds that ``volume``, bytes per parameter, needs into a node at a link rate."""
        numel, _, _ = SIZES[self.model]
        replicas = nodes / self.pipeline  # nodes that hold the same part of the model
        received = volume * numel / self.pipeline * (replicas - 1) / replicas
        return received / (gigabits * 1e9 / 8)

    def implied_gigabits(self) -> float:
        """Return the link rate that saved bytes over saved time amount to."""
        saved = self.step_seconds * (1 - 1 / self.speedup)
        return self.wire_seconds(BASELINE_BYTES - SDP4BIT_BYTES, 1.0) / saved

    def predicted(self, gigabits: float, nodes: int = NODES) -> float:
        """Return the speed-up at a link rate, with the compute of the step on NODES nodes."""
        compute = self.step_seconds - self.wire_seconds(BASELINE_BYTES, gigabits)
        baseline = compute + self.wire_seconds(BASELINE_BYTES, gigabits, nodes)
        return baseline / (compute + self.wire_seconds(SDP4BIT_BYTES, gigabits, nodes))


def _entry(row: str) -> Entry:
    cluster, model, baseline, sdp4bit, tensor, pipeline = row.split()
    return Entry(
        cluster=cluster,
        model=model,
        baseline=float(baseline),
        sdp4bit=float(sdp4bit),
        tensor=int(tensor),
        pipeline=int(pipeline),
    )


ENTRIES = [
    _entry(row)
    for row in (
        "A100 1.3B 24.1 57.6 1 1",
        "A100 2.7B 24.0 58.4 1 1",
        "A100 6.7B 10.8 37.1 4 1",
        "A100 13B 9.7 26.0 4 2",
        "A100 18B 10.2 29.8 4 2",
        "H800 1.3B 69.1 106.0 1 1",
        "H800 2.7B 71.9 116.9 1 1",
        "H800 6.7B 26.2 77.9 4 1",
        "H800 13B 13.9 53.5 8 1",
        "H800 18B 14.5 59.2 8 1",
    )
]


def fitted_gigabits(cluster: str) -> float:
    """Return one link rate for all rows of a cluster: the median of those that they imply."""
    return median(entry.implied_gigabits() for entry in ENTRIES if entry.cluster == cluster)


def over_node_counts(cluster: str, model: str, counts: tuple[int, ...]) -> float:
    """Return the mean predicted speed-up over numbers of nodes, as Fig. 7 averages it."""
    (entry,) = [e for e in ENTRIES if (e.cluster, e.model) == (cluster, model)]
    gigabits = fitted_gigabits(cluster)
    return fmean(entry.predicted(gigabits, nodes) for nodes in counts)
