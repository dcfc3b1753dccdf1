"""The codec and the block of docs/adding_a_codec.md, as they stand there, in training."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import models
from tests.distributed.harness import run
from tests.thin import thinned

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "adding_a_codec.md").read_text("utf-8")
(MODULE,) = re.findall(r"```python\n# fp8\.py\n(.*?)```", PAGE, re.DOTALL)
(BLOCK,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
BLOCK = json.loads("{" + BLOCK + "}")["quantized_comm"]
STEPS = 12


def _train(folder: str, stage: int, block: dict[str, Any]) -> dict[str, Any]:
    sys.path.insert(0, folder)
    config = models.settings(stage, block, dtype="bf16")
    found = models.train(config, STEPS)
    return {
        "losses": found.losses,
        "report": found.report,
        "digests": models.digests(found.weights),
    }


def train(folder: Path, world: int, stage: int, block: dict, **options: Any) -> list[dict]:
    (folder / "fp8.py").write_text(MODULE)
    return run(_train, world, str(folder), stage, block, **options)


def test_the_example_is_short() -> None:
    assert len(MODULE.splitlines()) + 1 < 50


@pytest.mark.parametrize("stage", thinned([1, 2, 3], lambda stage: stage == 3))
def test_the_example_trains_and_its_bytes_are_counted(tmp_path: Path, stage: int) -> None:
    ranks = train(tmp_path, 2, stage, BLOCK)
    plain = train(tmp_path, 2, stage, {"scheme": "full_precision"})
    for rank, exact in zip(ranks, plain, strict=True):
        report = rank["report"]
        assert rank["digests"] == ranks[0]["digests"]
        assert rank["losses"][-1] < 0.8 * rank["losses"][0]
        assert rank["losses"][-1] == pytest.approx(exact["losses"][-1], rel=0.05)
        assert rank["losses"] != exact["losses"]
        assert "; weights in codec fp8; gradients in codec fp8" in report["line"]
        # 8.25 bits instead of 16, biases and the norm excepted, rows padded to 16 bytes.
        for role, links in report["received_bytes"].items():
            share = sum(links.values()) / sum(exact["report"]["received_bytes"][role].values())
            assert 0.5 < share < 0.55, role
        # Of two ranks each receives half of the volume by formula; ZeRO-1/2 deliver sums besides.
        formula = report["expected_bytes_per_param"] * report["params"] * STEPS / 2
        counted = sum(sum(links.values()) for links in report["received_bytes"].values())
        assert counted == pytest.approx(formula, rel=0.01 if stage == 3 else 0.3)


@pytest.mark.parametrize(
    ("stage", "scheme"),
    thinned([(2, "sdp4bit"), (3, "sdp4bit"), (3, "zeropp")], lambda *case: case == (3, "sdp4bit")),
)
def test_the_example_works_with_differences_rotation_and_two_levels(
    tmp_path: Path, stage: int, scheme: str
) -> None:
    block = {**BLOCK, "scheme": scheme}
    ranks = train(tmp_path, 4, stage, block, environment={"LOCAL_SIZE": "2"})
    for rank in ranks:
        assert rank["digests"] == ranks[0]["digests"]
        assert rank["losses"][-1] < 0.8 * rank["losses"][0]
        assert "2 x 2 ranks" in rank["report"]["line"]
        assert rank["report"]["received_bytes"]["weights"]["inter"] > 0


def _refused(folder: str, name: str) -> str:
    sys.path.insert(0, folder)
    try:
        models.build(models.settings(2, {"gradients": {"codec": name}}))
    except ValueError as error:
        return str(error)
    return ""


def test_a_codec_that_does_not_exist_stops_the_job_before_anything_travels(tmp_path: Path) -> None:
    for message in run(_refused, 2, str(tmp_path), "fp9"):
        assert message.startswith('quantized_comm.gradients.codec="fp9": allowed: a module beside')
        assert "No module named 'fp9'" in message


def _differing(folder: str) -> str:
    own = Path(folder, os.environ["RANK"])
    own.mkdir()
    (own / "fp8.py").write_text(MODULE + "\n" * int(os.environ["RANK"]))
    sys.path.insert(0, str(own))
    try:
        models.build(models.settings(2, BLOCK))
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_with_other_sources_are_named(tmp_path: Path) -> None:
    for message in run(_differing, 2, str(tmp_path)):
        assert "ranks disagree" in message and "codec fp8" in message and "rank 1: " in message
