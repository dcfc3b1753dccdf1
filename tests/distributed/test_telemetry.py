"""Sampled steps: what rank 0 writes to DeepSpeed's monitors and to a file, and when."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ds_quant
from tests.distributed.harness import on_ranks, run, scratch
from tests.distributed.models import Regression, engine_of, heard, save, train_step, train_steps

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

PREFIX = "Train/Samples/ds_quant/"
INTERVAL = 3
SECONDS = {f"seconds/{name}" for name in ("encode", "wait", "decode")}
COUNTS = {"resyncs", "nonfinite_steps", "exact_steps"}


def sampling(
    stage: int, scheme: str, file: Path | None, *, interval: int = INTERVAL, **given: Any
) -> Any:
    """An engine in fp32 of two nodes."""
    block = {
        "scheme": scheme, "min_numel": 0, "allow_full_replica": True,
        "node_size": torch.distributed.get_world_size() // 2,
        "metrics": {"interval": interval, "file": None if file is None else str(file)},
    }  # fmt: skip
    return engine_of(stage, block, dtype="fp32", **given)


def reported(file: Path) -> list[dict[str, float]]:
    torch.distributed.barrier()
    return [json.loads(line) for line in file.read_text().splitlines()]


def received(engine: DeepSpeedEngine) -> dict[str, int]:
    roles = ds_quant.report(engine)["received_bytes"]
    return {f"{role}/{k}/bytes": n for role, links in roles.items() for k, n in links.items()}


def per_step(after: dict[str, int], before: dict[str, int]) -> dict[str, float]:
    """Bytes of a step of an interval, by name, without zeros."""
    grown = {name: nbytes - before.get(name, 0) for name, nbytes in after.items()}
    return {name: nbytes / INTERVAL for name, nbytes in grown.items() if nbytes}


@pytest.mark.parametrize(
    ("stage", "scheme", "bits"),  # of weights and gradients between nodes; scales come on top
    [(1, "full_precision", (32, 32)), (2, "qsdp", (8, 8)), (3, "sdp4bit", (4, 4))],
)
@on_ranks()
def test_every_interval_is_reported_with_the_bytes_that_were_counted(
    stage: int, scheme: str, bits: tuple[int, int]
) -> None:
    monitor = {"enabled": True, "output_path": str(scratch()), "job_name": "job"}
    engine = sampling(stage, scheme, scratch() / "lines", csv_monitor=monitor)
    train_steps(engine, INTERVAL)
    first = received(engine)
    train_steps(engine, INTERVAL, INTERVAL)
    wanted = [per_step(first, {}), per_step(received(engine), first)]
    train_step(engine, 2 * INTERVAL)
    lines = reported(scratch() / "lines")
    if engine.global_rank > 0:  # rank 0 reports its own
        return
    assert [line["step"] for line in lines] == [3, 6]
    for line, nbytes in zip(lines, wanted, strict=True):
        assert {name: value for name, value in line.items() if name.endswith("/bytes")} == nbytes
    line = lines[1]
    assert SECONDS | COUNTS <= set(line) and all(line[name] > 0 for name in SECONDS)
    for role, least in zip(("weights", "gradients"), bits, strict=True):
        assert least <= line[f"{role}/inter/bits"] < least + 1.7  # 1-D ones in full precision
        error = line[f"{role}/inter/error"]
        assert error == 0 if scheme == "full_precision" else 0 < error < 4e-2  # steps of absmax / 7
        # 1-D parameters, ranges of rows and node shards make up the rest.
        assert line[f"{role}/inter/saved"] >= (1 - (least + 1.7) / 32) - 0.02
    samples = line["samples"]
    assert samples == 6 * 2 * 16
    for name in line.keys() - {"step", "samples"}:
        _, *rows = csv.reader((scratch() / "job" / f"{PREFIX}{name}.csv".replace("/", "_")).open())
        assert len(rows) == 2 and rows[-1] == [str(samples), str(line[name])], name


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(4)
def test_two_levels_are_told_apart(stage: int) -> None:
    """SDP4Bit's gradients take 8 bits inside a node and 4 between, at every stage."""
    train_steps(sampling(stage, "sdp4bit", scratch() / "lines"), INTERVAL)
    (line,) = reported(scratch() / "lines")
    assert 8 < line["gradients/intra/bits"] < 9.7 and 4 < line["gradients/inter/bits"] < 5.7
    assert 0 < line["gradients/intra/error"] < 1e-3 < line["gradients/inter/error"] < 5e-2
    assert 0 < line["weights/inter/error"] < 1e-3  # of differences, relative to the weights
    assert line["weights/inter/saved"] > 0.7  # every row is as long as the longest
    if stage == 3:  # the node shard is gathered exactly inside a node
        assert line["weights/intra/error"] == 0 and line["weights/intra/bits"] >= 32


@pytest.mark.parametrize(
    ("interval", "steps", "opens", "listens"),
    [(0, 3, False, True), (4, 2, False, True), (4, 3, True, True), (1, 2, False, False)],
)
@on_ranks()
def test_nothing_is_sampled_before_it_is_asked_for_or_where_nobody_listens(
    interval: int, steps: int, opens: bool, listens: bool
) -> None:
    """The step before the first interval opens a sample; rank 0 alone writes."""
    file = scratch() / "lines"
    engine = sampling(2, "qsdp", file if listens else None, interval=interval)
    train_steps(engine, steps)
    if interval > 0 and listens:
        assert reported(file) == []
    else:
        assert not file.exists()
    assert engine.ds_quant_attached.run.traffic.meter.is_open == (opens and engine.global_rank == 0)


@on_ranks()
def test_two_engines_of_a_process_do_not_mix() -> None:
    schemes = ("qsdp", "sdp4bit")
    engines = [sampling(2, scheme, scratch() / scheme) for scheme in schemes]
    for step in range(INTERVAL):
        for engine in engines:
            train_step(engine, step)
    (qsdp,), (sdp4bit,) = (reported(scratch() / scheme) for scheme in schemes)
    assert qsdp["gradients/inter/bits"] > 8 > sdp4bit["gradients/inter/bits"]
    assert qsdp["gradients/inter/bytes"] > 1.5 * sdp4bit["gradients/inter/bytes"]


@on_ranks()
def test_a_resumed_run_samples_the_same_steps() -> None:
    engine = sampling(2, "qsdp", None)
    train_steps(engine, 5)
    save(engine)
    engine.destroy()
    engine = sampling(2, "qsdp", scratch() / "lines")
    engine.load_checkpoint(scratch(), tag="middle")
    train_steps(engine, 4, 5)
    assert [line["step"] for line in reported(scratch() / "lines")] == [6, 9]


@on_ranks()
def test_a_file_that_becomes_unwritable_costs_records_and_not_the_run() -> None:
    """In step 3 a folder is in the file's place, in step 5 it is gone."""
    said, file, before = heard("log_here"), scratch() / "lines", scratch() / "before"
    engine = sampling(2, "qsdp", file, interval=1)
    for step in range(7):
        if engine.global_rank == 0 and step in (3, 5):
            if step == 3:
                file.rename(before)
            (file.mkdir if step == 3 else file.rmdir)()
        train_step(engine, step)
    assert engine.global_steps == 7
    assert [line["step"] for part in (before, file) for line in reported(part)] == [1, 2, 3, 6, 7]
    assert len(said) == (engine.global_rank == 0)
    for line in said:
        assert "step 4: the metrics cannot be written: " in line and "Is a directory" in line


def times(repeats: int) -> tuple[float, float]:
    """Shortest ordinary and shortest sampled step, in seconds."""
    shortest = []
    for interval in (0, 1):
        engine = sampling(2, "sdp4bit", scratch() / "lines", interval=interval)
        found = []
        for step in range(repeats):
            torch.distributed.barrier()
            start = time.perf_counter()
            train_step(engine, step)
            torch.distributed.barrier()
            found.append(time.perf_counter() - start)
        shortest.append(min(found))
        engine.destroy()
    return shortest[0], shortest[1]


@pytest.mark.alone
def test_the_default_interval_costs_less_than_one_percent() -> None:
    """One step in a hundred is sampled; it must not take twice as long as another."""
    plain, with_sample = run(times, 2, 30)[0]
    assert (with_sample - plain) / plain / 100 < 0.01


@on_ranks()
def test_full_precision_saves_nothing() -> None:
    """Bytes of a step of two micro-steps by formula, were nothing quantized, are those counted:
    fp32, half of it from the other rank, weights once, gradients twice.
    """
    engine = sampling(2, "full_precision", None, accumulation=2)
    train_step(engine, 0)
    expected = engine.ds_quant_attached.run.received_in_full_precision()
    numel, counted = sum(p.numel() for p in Regression().parameters()), received(engine)
    for role, times in (("weights", 1), ("gradients", 2)):
        assert expected[role]["intra"] == counted[f"{role}/intra/bytes"] == 0
        assert expected[role]["inter"] == pytest.approx(4 * numel / 2 * times, rel=1e-3)
        assert counted[f"{role}/inter/bytes"] == pytest.approx(expected[role]["inter"], rel=1e-2)
