"""Pydantic models of the committed result files, so that old files stay readable.

New files carry `kind` and `version`; the first four benchmarks wrote none and are recognised by
their keys. Every model has `about()`: what a number needs to be quoted. May import the standard
library, pydantic and results_common.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError
from results_common import About, Arguments, MadeHere, Model, Versioned, command_line


class ResultError(ValueError):
    """A result file that cannot be read; names the file, the key and what is expected."""


class Summary(Model):
    """Figures of one training run, see report.Row; bytes per rank, parameter and step."""

    label: str
    final_loss: float
    gap_percent: float | None
    validation_loss: float
    wire_bytes: float | None
    inter_bytes: float | None
    step_seconds: float = Field(gt=0)
    run_seconds: float = Field(gt=0)


class Text(Model):
    """The training text."""

    bytes: int
    sha256: str


class Training(Model):
    """What train.py wrote."""

    parameters: int
    losses: list[float]
    seconds: list[float]
    reports: list[dict[str, Any]] | None
    validation_loss: float
    device: str


class Run(Model):
    """One scheme of a comparison."""

    label: str
    block: dict[str, Any] | None
    run_seconds: float
    result: Training


class Comparison(MadeHere):
    """Of compare.py."""

    device: str
    text: Text
    summary: list[Summary]
    runs: list[Run]

    def _command(self) -> str:
        return command_line("benchmarks/compare.py", self.arguments, commas=("schemes",))


class CodecEnvironment(Model):
    """Machine of a codec table."""

    cpu: str
    vectors: str
    kernels: str = "torch kernels"  # before there were others
    torch: str
    python: str
    threads: int
    date: str


class CodecRow(Model):
    """One codec and input dtype; seconds, 1e9 elements per second, share of a copy's speed."""

    input: str
    codec: str
    encode_s: float
    encode_median_s: float
    encode_gelem_s: float
    encode_copy_ratio: float
    decode_s: float
    decode_median_s: float
    decode_gelem_s: float
    decode_copy_ratio: float
    squared_error: float
    wire_bytes: int
    bits_per_element: float


class CodecTable(Model):
    """Of codec.py."""

    environment: CodecEnvironment
    settings: Arguments
    rows: list[CodecRow]

    def about(self) -> About:
        facts = self.environment
        settings = {k: v for k, v in self.settings.items() if k != "data"}
        return About(
            facts.date,
            f"{facts.cpu}, {facts.vectors}, {facts.threads} thread, {facts.kernels}",
            f"python {facts.python}, torch {facts.torch}",
            command_line("benchmarks/codec.py", {**settings, "threads": facts.threads}),
        )


class LevelRow(Model):
    """Relative squared error after 0, 1 and 4 updates of the levels."""

    bits: int
    error_after_0: float
    error_after_1: float
    error_after_4: float


class LevelTable(Model):
    """Of levels.py."""

    date: str
    torch: str
    machine: str
    arguments: Arguments
    loss: float
    weights: int
    rows: list[LevelRow]

    def about(self) -> About:
        given = {k: v for k, v in self.arguments.items() if k != "json" and v != "None"}
        command = command_line("benchmarks/levels.py", given)
        return About(self.date, self.machine, f"torch {self.torch}", command)


class LayerErrors(Model):
    """One matrix at the last measurement: ratio as in ErrorRun, gradients by scheme."""

    name: str
    ratio: float
    gradients: dict[str, float]


class ErrorRun(Model):
    """One training: per measurement the weights' error ratio, and the gradients' by scheme."""

    lr: float
    scheme: str
    steps: list[int]
    ratio: list[float]
    gradients: list[dict[str, float]]
    layers: list[LayerErrors] = []
    loss: float


class ErrorStudy(MadeHere):
    """Of errors.py. bits: by scheme and role, per element with scales."""

    bits: dict[str, dict[str, float]] = {}
    runs: list[ErrorRun]

    def _command(self) -> str:
        rates = str(self.arguments["lr"]).strip("[]").split(", ")
        return command_line("benchmarks/errors.py", {**self.arguments, "lr": rates})


class Gap(Model):
    """Paired gaps to full precision in per cent, one per seed; half_width of the 95 % interval."""

    label: str
    gaps: list[float]
    mean: float
    spread: float
    half_width: float | None


class Convergence(Versioned):
    """Of convergence.py; summaries by seed and scheme."""

    kind: Literal["convergence"]
    device: str
    text: Text
    gaps: list[Gap]
    summaries: list[list[Summary]]

    def _command(self) -> str:
        given = {k: v for k, v in self.arguments.items() if k != "seed"}
        return command_line(
            "benchmarks/convergence.py",
            {"seeds": self.arguments["seed"], **given},
            commas=("schemes",),
        )


class SpeedRow(Model):
    """One link rate (Mbit/s, 0: unshaped) and scheme; bytes per parameter and step."""

    rate: float
    scheme: str
    seconds: float
    speedup: float
    speedup_min: float
    speedup_max: float
    interface_bytes: float
    counted_bytes: float
    bytes_bound: float
    clean_blocks: int


class SpeedPoint(Model):
    """One stage and topology."""

    title: str
    stage: int
    topology: str
    parameters: int
    lines: dict[str, str]
    rows: list[SpeedRow]


class Speed(Versioned):
    """Of speed.py."""

    kind: Literal["speed"]
    points: list[SpeedPoint]


class OverlapRow(Model):
    """One link rate (Mbit/s) and scheme: seconds of a step, and what they exceed compute by."""

    rate: float = Field(gt=0)
    scheme: str
    seconds: float
    seconds_waiting: float
    compute: float
    compute_waiting: float
    exposed: float
    exposed_waiting: float
    ratio: float
    ratio_min: float
    ratio_max: float
    clean_blocks: int


class Overlap(Versioned):
    """Of overlap.py."""

    kind: Literal["overlap"]
    title: str
    parameters: int
    rows: list[OverlapRow]


class CollectiveRow(Model):
    """One operation, scheme and size at one link rate; bandwidths in bytes per second."""

    operation: Literal["gather", "reduce"]
    scheme: str
    rate: float = Field(ge=0)
    numel: int = Field(ge=1)
    received: int
    seconds: float = Field(gt=0)
    fastest: float = Field(gt=0)
    slowest: float = Field(gt=0)
    bus_bandwidth: float
    wire_bandwidth: float
    speedup: float = Field(gt=0)


class Collectives(Versioned):
    """Of collectives.py."""

    kind: Literal["collectives"]
    rows: list[CollectiveRow]


class GlueRow(Model):
    """One case (ZeRO stage) and codec: CPU seconds of a step, and microseconds that the plugin adds
    per parameter, median and quartiles of the rounds, and of the fastest steps of either engine.
    ``world``: nodes x ranks per node; ``scheme``: of the codec.
    """

    world: str = "1x2"
    case: str
    codec: str
    scheme: str = "qsdp"
    parameters: int = Field(ge=1)
    plain_seconds: float = Field(gt=0)
    seconds: float = Field(gt=0)
    added_us: float
    added_us_low: float
    added_us_high: float
    added_us_least: float


class Glue(Versioned):
    """Of glue.py."""

    kind: Literal["glue"]
    rows: list[GlueRow]


class ThresholdRow(Model):
    """A quantized matrix of ``numel`` elements against one in full precision: microseconds of CPU
    that an optimizer step takes longer, median and quartiles, bytes that a rank no longer receives,
    and the Mbit/s below which that is the better deal (None: no time was added).
    """

    stage: int = Field(ge=1, le=3)
    scheme: str
    numel: int = Field(ge=1)
    saved_bytes: float = Field(gt=0)
    added_us: float
    added_us_low: float
    added_us_high: float
    break_even: float | None


class Threshold(Versioned):
    """Of threshold.py."""

    kind: Literal["threshold"]
    rows: list[ThresholdRow]


class LosslessRow(Model):
    """Bits per weight and step at a learning rate: of the codec's messages, and the entropy of the
    same differences, given the exponent before the step too; unchanged: share of weights.
    """

    lr: float
    unchanged: float
    bits: float
    entropy: float
    entropy_given_exponent: float
    numel: int = Field(ge=1)


class LosslessBits(Versioned):
    """Of lossless_bits.py."""

    kind: Literal["lossless_bits"]
    rows: list[LosslessRow]


class ScalingRow(Model):
    """One predicted point; see scaling.py."""

    model: str
    scheme: str
    stage: int
    ranks: int
    node_size: int
    rate: float  # Gb/s per node
    inter_bytes: float
    intra_bytes: float
    communication_seconds: float
    compute_seconds: float
    no_overlap_seconds: float
    full_overlap_seconds: float
    speedup_no_overlap: float
    speedup_full_overlap: float


class PublishedRow(Model):
    """One row of SDP4Bit's Table 2 against the model; speedups over the paper's baseline."""

    cluster: str
    model: str
    published: float
    stated_rate: float  # Gb/s per node
    at_stated_rate: float | None
    fitted_rate: float
    at_fitted_rate: float
    verdict: str


class LabPoint(Model):
    """A step time of speed.py against its prediction; rate in Mbit/s, error relative."""

    topology: str
    stage: int
    scheme: str
    rate: float
    measured: float
    predicted: float
    error: float


class Scaling(Versioned):
    """Of scaling.py."""

    kind: Literal["scaling"]
    rows: list[ScalingRow]
    published: list[PublishedRow]
    lab: list[LabPoint] = []


class PeerCounts(Model):
    """Tests of one file of DeepSpeed's under one scheme."""

    collected: int
    passed: int
    failed: int
    refused: int  # by the plugin, which says why
    skipped: int  # by DeepSpeed: not for this machine
    not_run: int  # the time limit of the file came first
    with_plugin: int  # some config had the block
    communicating: int  # and more than one rank


class PeerFile(Model):
    """One file; counts by scheme."""

    file: str
    counts: dict[str, PeerCounts]


class PeerDifference(Model):
    """A test that passes without the plugin and not with it; why: None if unexplained."""

    test: str
    scheme: str
    outcome: Literal["failed", "refused", "skipped"]
    error: str
    why: str | None


class PeerBroken(Model):
    """A test that fails without the plugin."""

    test: str
    error: str


class PeerSuite(Versioned):
    """Of peer_suite.py; blocks by scheme, skipped tests by reason."""

    kind: Literal["peer_suite"]
    tree_version: str
    blocks: dict[str, dict[str, Any] | None]
    files: list[PeerFile]
    differences: list[PeerDifference]
    broken: list[PeerBroken]
    skipped: dict[str, int]

    def totals(self) -> dict[str, dict[str, int]]:
        """The counts of all files, by scheme."""
        return {
            scheme: {
                name: sum(getattr(file.counts[scheme], name) for file in self.files)
                for name in PeerCounts.model_fields
            }
            for scheme in self.blocks
        }


Result = (
    Comparison
    | CodecTable
    | LevelTable
    | ErrorStudy
    | Convergence
    | Speed
    | Overlap
    | Collectives
    | Glue
    | Threshold
    | LosslessBits
    | Scaling
    | PeerSuite
)

_KINDS: dict[str, type[Any]] = {
    "convergence": Convergence,
    "speed": Speed,
    "overlap": Overlap,
    "collectives": Collectives,
    "glue": Glue,
    "threshold": Threshold,
    "lossless_bits": LosslessBits,
    "scaling": Scaling,
    "peer_suite": PeerSuite,
}
_OLD: tuple[tuple[frozenset[str], type[Any]], ...] = (
    (frozenset({"environment", "settings", "rows"}), CodecTable),
    (frozenset({"loss", "weights", "rows"}), LevelTable),
    (frozenset({"summary", "runs"}), Comparison),
    (frozenset({"arguments", "runs"}), ErrorStudy),
)


def load(path: Path) -> Result:
    """The content of a result file.

    Raises:
        ResultError: not JSON, of unknown kind or version, or a key is wrong.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ResultError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(data, dict):
        raise ResultError(f"{path}: expected an object at the top, found {type(data).__name__}")
    try:
        return _model_of(path, data).model_validate(data)
    except ValidationError as error:
        raise ResultError(f"{path}: {_explained(error)}") from None


def _model_of(path: Path, data: Mapping[str, Any]) -> type[Any]:
    kinds = ", ".join(sorted(_KINDS))
    if "kind" in data:
        if (model := _KINDS.get(data["kind"])) is None:
            raise ResultError(f"{path}: kind={data['kind']!r}: expected one of {kinds}")
        if data.get("version") != 1:
            raise ResultError(
                f"{path}: version={data.get('version')!r}: expected 1; "
                "run the benchmark again, or read the file with the release that wrote it"
            )
        return model
    for keys, model in _OLD:
        if keys <= data.keys():
            return model
    raise ResultError(
        f"{path}: no key 'kind': expected one of {kinds}, or the keys of an older "
        f"file: {'; '.join(', '.join(sorted(keys)) for keys, _ in _OLD)}"
    )


def _explained(error: ValidationError) -> str:
    first, *others = error.errors()
    place = ".".join(str(part) for part in first["loc"])
    expected = "no such key" if first["type"] == "extra_forbidden" else first["msg"].lower()
    more = f" (and {len(others)} more)" if others else ""
    return f"key {place!r}: {expected}{more}"
