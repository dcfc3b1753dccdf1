"""Sampled steps: what rank 0 writes to DeepSpeed's monitors and to a file, and when."""

from __future__ import annotations

import csv
import json
import os
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.harness import run, run_all
from tests.distributed.models import Regression, build, heard, settings, train_step

PREFIX = "Train/Samples/ds_quant/"
INTERVAL, STEPS, STAGES = 3, 7, (1, 2, 3)
SECONDS = {f"seconds/{name}" for name in ("encode", "wait", "decode")}
COUNTS = {"resyncs", "nonfinite_steps", "exact_steps"}


def block(scheme: str, file: str | None, node_size: int = 1, **more: Any) -> dict[str, Any]:
    metrics = {"interval": INTERVAL, "file": file}
    fields = {"scheme": scheme, "node_size": node_size, "metrics": metrics, "min_numel": 0}
    return {**fields, "allow_full_replica": True, **more}


def received(engine: Any) -> dict[str, dict[str, int]]:
    import ds_quant

    return ds_quant.report(engine)["received_bytes"]


def sampled(stage: int, scheme: str, node_size: int) -> tuple[list[dict], list[dict], dict]:
    """Lines of the file, bytes received up to every step, and the CSV monitor's files."""
    folder = Path(os.environ["TEST_SCRATCH"], f"{stage} {scheme}")
    folder.mkdir(exist_ok=True)
    torch.distributed.barrier()
    monitor = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    config = settings(stage, block(scheme, str(folder / "lines"), node_size), csv_monitor=monitor)
    engine = build(config)
    before = []
    for step in range(STEPS):
        train_step(engine, step)
        before.append(received(engine))
    torch.distributed.barrier()
    lines = [json.loads(line) for line in (folder / "lines").read_text().splitlines()]
    tables = {
        path.stem: list(csv.reader(path.open())) for path in (folder / "job").glob("*ds_quant*.csv")
    }
    return lines, before, tables


def per_step(before: list[dict], first: int, last: int) -> dict[str, float]:
    """Bytes per step of the steps after ``first`` up to ``last``, by name, without zeros."""
    found = {}
    for role, links in before[last - 1].items():
        for link, nbytes in links.items():
            start = before[first - 1][role][link] if first else 0
            if nbytes > start:
                found[f"{role}/{link}/bytes"] = (nbytes - start) / (last - first)
    return found


# scheme -> bits of (weights, gradients) between nodes; scales and the padding of slots come on top
BITS = {
    "full_precision": (32, 32),
    "qsdp": (8, 8),
    "sdp4bit": (4, 4),
}


@pytest.mark.parametrize("scheme", BITS)
@pytest.mark.parametrize("stage", STAGES)
def test_every_interval_is_reported_with_the_bytes_that_were_counted(
    stage: int, scheme: str
) -> None:
    lines, before, tables = run_all(sampled, 2, tuple(product(STAGES, BITS, [1])))[
        stage, scheme, 1
    ][0]
    assert [line["step"] for line in lines] == [3, 6]
    for line, first in zip(lines, (0, 3), strict=True):
        nbytes = {name: value for name, value in line.items() if name.endswith("/bytes")}
        assert nbytes == per_step(before, first, first + 3)
    line = lines[1]
    assert SECONDS | COUNTS <= set(line) and all(line[name] > 0 for name in SECONDS)
    for role, bits in zip(("weights", "gradients"), BITS[scheme], strict=True):
        assert bits <= line[f"{role}/inter/bits"] < bits + 1.7  # 1-D ones are in full precision
        error = line[f"{role}/inter/error"]
        assert error == 0 if scheme == "full_precision" else 0 < error < 4e-2  # steps of absmax / 7
        # 1-D parameters, ranges of rows and node shards make up the rest.
        assert line[f"{role}/inter/saved"] >= (1 - (bits + 1.7) / 32) - 0.02
    for name, value in line.items():
        if name in ("step", "samples"):
            continue
        rows = tables[(PREFIX + name).replace("/", "_")]
        assert rows[-1] == [str(line["samples"]), str(value)], name
        assert len(rows) == 3  # a header and two reports
    assert line["samples"] == 6 * 2 * 16


def test_two_levels_are_told_apart() -> None:
    """SDP4Bit's gradients take 8 bits inside a node and 4 between, at every stage."""
    for ranks in run_all(sampled, 4, ((2, "sdp4bit", 2), (3, "sdp4bit", 2))).values():
        line = ranks[0][0][0]
        assert 8 < line["gradients/intra/bits"] < 9.7 and 4 < line["gradients/inter/bits"] < 5.7
        assert 0 < line["gradients/intra/error"] < 1e-3 < line["gradients/inter/error"] < 5e-2
        assert 0 < line["weights/inter/error"] < 1e-3  # of differences, relative to the weights
        assert line["weights/inter/saved"] > 0.7  # every row is as long as the longest
    # The node shard is gathered exactly inside a node.
    assert line["weights/intra/error"] == 0 and line["weights/intra/bits"] >= 32


def quiet(interval: int, steps: int, *, heard: bool = True) -> tuple[bool, bool]:
    """Whether a file was written, and whether a sample is open."""
    path = Path(os.environ["TEST_SCRATCH"], f"lines {interval} {steps}")
    metrics = {"interval": interval, "file": str(path) if heard else None}
    engine = build(settings(2, block("qsdp", None) | {"metrics": metrics}))
    for step in range(steps):
        train_step(engine, step)
    torch.distributed.barrier()
    return path.exists() and path.read_text() != "", engine.ds_quant_plugin.traffic.meter.is_open


def test_nothing_is_sampled_before_it_is_asked_for_or_where_nobody_listens() -> None:
    """The step before the first interval opens a sample; rank 0 alone writes."""
    cases = ((0, 3), (4, 2), (4, 3))
    found = run_all(quiet, 2, cases)
    assert [found[case] for case in cases] == [
        [(False, False)] * 2, [(False, False)] * 2, [(False, True), (False, False)]
    ]  # fmt: skip
    assert run(unheard, 2) == [(False, False)] * 2


def unheard() -> tuple[bool, bool]:
    """With neither monitor nor file."""
    return quiet(1, 2, heard=False)


def two_engines() -> list[list[dict]]:
    folder = Path(os.environ["TEST_SCRATCH"])
    engines = [
        build(settings(2, block(scheme, str(folder / scheme)))) for scheme in ("qsdp", "sdp4bit")
    ]
    for step in range(INTERVAL):
        for engine in engines:
            train_step(engine, step)
    torch.distributed.barrier()
    return [
        [json.loads(line) for line in (folder / scheme).read_text().splitlines()]
        for scheme in ("qsdp", "sdp4bit")
    ]


def test_two_engines_of_a_process_do_not_mix() -> None:
    (qsdp,), (sdp4bit,) = run(two_engines, 2)[0]
    assert qsdp["gradients/inter/bits"] > 8 > sdp4bit["gradients/inter/bits"]
    assert qsdp["gradients/inter/bytes"] > 1.5 * sdp4bit["gradients/inter/bytes"]


def resumed() -> list[int]:
    """Steps reported by a run that loads a checkpoint of step 5."""
    folder = Path(os.environ["TEST_SCRATCH"])
    engine = build(settings(2, block("qsdp", None)))
    for step in range(5):
        train_step(engine, step)
    engine.save_checkpoint(folder, "five")
    engine.destroy()
    engine = build(settings(2, block("qsdp", str(folder / "lines"))))
    engine.load_checkpoint(folder, tag="five")
    for step in range(5, 9):
        train_step(engine, step)
    torch.distributed.barrier()
    return [json.loads(line)["step"] for line in (folder / "lines").read_text().splitlines()]


def test_a_resumed_run_samples_the_same_steps() -> None:
    assert run(resumed, 2)[0] == [6, 9]


def lost_file() -> tuple[int, list[int], list[str]]:
    """Steps taken, steps reported, and what rank 0 logs; in step 3 a folder is in the file's place,
    in step 5 it is gone.
    """
    said = heard("log_here")
    file = Path(os.environ["TEST_SCRATCH"], "lines")
    engine = build(settings(2, block("qsdp", str(file)) | {"metrics": _every_step(file)}))
    for step in range(7):
        if torch.distributed.get_rank() == 0 and step in (3, 5):
            if step == 3:
                file.rename(file.with_name("before"))
            (file.mkdir if step == 3 else file.rmdir)()
        train_step(engine, step)
    torch.distributed.barrier()
    parts = [file.with_name("before").read_text(), file.read_text()]
    return (
        engine.global_steps,
        [json.loads(line)["step"] for part in parts for line in part.splitlines()],
        said,
    )


def _every_step(file: Path) -> dict[str, Any]:
    return {"interval": 1, "file": str(file)}


def test_a_file_that_becomes_unwritable_costs_records_and_not_the_run() -> None:
    (steps, reported, said), (_, _, silent) = run(lost_file, 2)
    assert steps == 7 and reported == [1, 2, 3, 6, 7]
    assert len(said) == 1 and "step 4: the metrics cannot be written: " in said[0]
    assert "Is a directory" in said[0] and silent == []


def times(repeats: int) -> tuple[float, float]:
    """Shortest ordinary and shortest sampled step, in seconds."""
    shortest = []
    for interval in (0, 1):
        metrics = {"interval": interval, "file": str(Path(os.environ["TEST_SCRATCH"], "lines"))}
        engine = build(settings(2, block("sdp4bit", None) | {"metrics": metrics}))
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


def baseline() -> tuple[dict, dict]:
    """Bytes of a step of two micro-steps by formula, were nothing quantized, and those counted."""
    engine = build(settings(2, block("full_precision", None), accumulation=2))
    train_step(engine, 0)
    return engine.ds_quant_plugin.received_in_full_precision(), received(engine)


def test_full_precision_saves_nothing() -> None:
    """fp32, half of it from the other rank: weights once, gradients twice."""
    numel = sum(p.numel() for p in Regression().parameters())
    for expected, counted in run(baseline, 2):
        for role, times in (("weights", 1), ("gradients", 2)):
            assert expected[role]["intra"] == counted[role]["intra"] == 0
            assert expected[role]["inter"] == pytest.approx(4 * numel / 2 * times, rel=1e-3)
            assert counted[role]["inter"] == pytest.approx(expected[role]["inter"], rel=1e-2)
