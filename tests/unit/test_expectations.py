"""The README's table of what to expect is what `ds_quant estimate` predicts."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from ds_quant.tools.cli import main

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("10", "25", "100", "400")
LORA = "--params 7b --trained 0.01 --step 3"
KEPT = f"--ds-config {shlex.quote(str(ROOT / 'configs' / 'ds_lora_zero3.json'))}"
ROWS = {  # what the README says of a plan -> its options, the row of estimate
    ("LoRA, 7 B, ZeRO-3", "2 x 4", "`ds_lora_zero3.json`"): (
        f"{LORA} {KEPT} --dtype bf16 --accumulation 1 --nodes 2 --gpus 4 --intra 200",
        "your block (qsdp)",
    ),
    ("fine-tuning, 1 B, ZeRO-2", "2 x 1", "`eden4`"): (
        "--params 1b --stage 2 --nodes 2 --gpus 1 --step 0.6",
        "eden4",
    ),
    ("fine-tuning, 7 B, ZeRO-3", "2 x 8", "`eden4`"): (
        "--params 7b --stage 3 --nodes 2 --gpus 8 --intra 1800 --step 4.2",
        "eden4",
    ),
    ("pre-training, 1 B, ZeRO-2", "8 x 1", "`eden4`"): (
        "--params 1b --stage 2 --nodes 8 --gpus 1 --step 0.6",
        "eden4",
    ),
    ("pre-training, 7 B, ZeRO-3", "8 x 8", "`eden4`"): (
        "--params 7b --stage 3 --nodes 8 --gpus 8 --intra 1800 --step 4.2",
        "eden4",
    ),
}


def predicted(options: str, scheme: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The cells of a row: speed-up with communication hidden and not, the smaller one first."""
    assert main(["estimate", *shlex.split(options), "--link", "10", "--json"]) == 0
    links = json.loads(capsys.readouterr().out)["links"]
    cells = []
    for link in LINKS:
        (row,) = (row for row in links[link] if row["scheme"] == scheme)
        assert not row["note"], "only what is recommended"
        low, high = sorted((row["speedup_overlapped"], row["speedup_serial"]))
        cells.append(f"{low:.1f} to {high:.1f}")
    return cells


def test_readme_shows_what_estimate_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    section = (ROOT / "README.md").read_text("utf-8").partition("## What to expect")[2]
    shown = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in re.findall(r"^\| (?:LoRA|fine-tuning|pre-training), .*$", section, re.MULTILINE)
    ]
    expected = [(*place, *predicted(*plan, capsys)) for place, plan in ROWS.items()]
    assert shown == expected, "\n".join(f"| {' | '.join(row)} |" for row in expected)
