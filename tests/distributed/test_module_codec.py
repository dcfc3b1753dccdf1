"""The codec and the block of docs/adding_a_codec.md, as they stand there, in training."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.harness import of_all_ranks, on_ranks, scratch
from tests.distributed.models import FULL, Run, digests, engine_of, settings, train
from tests.thin import thinned

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "adding_a_codec.md").read_text("utf-8")
(MODULE,) = re.findall(r"```python\n# fp8\.py\n(.*?)```", PAGE, re.DOTALL)
(BLOCK,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
BLOCK = json.loads("{" + BLOCK + "}")["quantized_comm"]
STEPS = 12


def trained(stage: int, block: dict[str, Any]) -> Run:
    install(scratch() / str(torch.distributed.get_rank()))  # ranks would read half a file
    run = train(settings(stage, block, dtype="bf16"), STEPS)
    bits = of_all_ranks(digests(run.weights))
    assert bits == [bits[0]] * len(bits)
    return run


def install(folder: Path, source: str = MODULE) -> None:
    """The module, on the path."""
    folder.mkdir(exist_ok=True)
    (folder / "fp8.py").write_text(source)
    sys.path.insert(0, str(folder))


def test_the_example_is_short() -> None:
    assert len(MODULE.splitlines()) + 1 < 50


@pytest.mark.parametrize("stage", thinned([1, 2, 3], lambda stage: stage == 3))
@on_ranks()
def test_the_example_trains_and_its_bytes_are_counted(stage: int) -> None:
    ours, exact = trained(stage, BLOCK), trained(stage, FULL)
    report = ours.report
    assert ours.losses[-1] < 0.8 * ours.losses[0]
    assert ours.losses[-1] == pytest.approx(exact.losses[-1], rel=0.05)
    assert ours.losses != exact.losses
    assert "; weights in codec fp8; gradients in codec fp8" in report["line"]
    # 8.25 bits instead of 16, biases and the norm excepted, rows padded to 16 bytes.
    counted = {role: sum(links.values()) for role, links in report["received_bytes"].items()}
    for role, nbytes in counted.items():
        assert 0.5 < nbytes / sum(exact.report["received_bytes"][role].values()) < 0.55, role
    # Of two ranks each receives half of the volume by formula; ZeRO-1/2 deliver sums besides.
    formula = report["expected_bytes_per_param"] * report["params"] * STEPS / 2
    assert sum(counted.values()) == pytest.approx(formula, rel=0.01 if stage == 3 else 0.3)


@pytest.mark.parametrize(
    ("stage", "scheme"),
    thinned([(2, "sdp4bit"), (3, "sdp4bit"), (3, "zeropp")], lambda *case: case == (3, "sdp4bit")),
)
@on_ranks(4, environment={"LOCAL_SIZE": "2"})
def test_the_example_works_with_differences_rotation_and_two_levels(
    stage: int, scheme: str
) -> None:
    run = trained(stage, {**BLOCK, "scheme": scheme})
    assert run.losses[-1] < 0.8 * run.losses[0]
    assert "2 x 2 ranks" in run.report["line"]
    assert run.report["received_bytes"]["weights"]["inter"] > 0


@on_ranks()
def test_a_codec_that_does_not_exist_stops_the_job_before_anything_travels() -> None:
    said = '^quantized_comm.gradients.codec="fp9": allowed: a module beside.*No module named .fp9'
    with pytest.raises(ValueError, match=said):
        engine_of(2, {"gradients": {"codec": "fp9"}})


@on_ranks()
def test_ranks_with_other_sources_are_named() -> None:
    rank = torch.distributed.get_rank()
    install(scratch() / str(rank), MODULE + "\n" * rank)
    with pytest.raises(RuntimeError, match="(?s)ranks disagree.*codec fp8") as caught:
        engine_of(2, BLOCK)
    assert "rank 1: " in str(caught.value)
