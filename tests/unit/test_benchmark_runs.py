"""The benchmarks that run in one process, at sizes that show nothing but that they work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = "All happy families are alike. " * 200
RUNS = {
    "codec.py": "--numel 4096 --codecs int4 --repeats 1",
    "levels.py": "--steps 2 --layers 1 --width 32 --text TEXT",
    "errors.py": "--steps 4 --every 2 --lr 1e-3 --layers 1 --width 32 --text TEXT",
    "lossless_bits.py": "--warmup 2 --settle 1 --measured 2 --layers 1 --width 32 --text TEXT",
    "gradient_errors.py": "--looks 1 --nodes 2 --batch 2 --layers 1 --width 32 --text TEXT",
    "glue.py": "--cases 2 --codecs empty cuda --layers 5 --rounds 2 --worlds 1x2 2x2",
    "threshold.py": "--schemes sdp4bit --widths 16 --layers 5 --rounds 2",
    "scaling.py": "--models 1.3B --stages 3 --ranks 16 --node-sizes 8 --rates 10",
}


LONG = ("glue.py", "threshold.py", "gradient_errors.py", "levels.py")  # they train


@pytest.mark.parametrize(
    "script", [pytest.param(s, marks=pytest.mark.slow) if s in LONG else s for s in RUNS]
)
def test_benchmark_writes_its_file(script: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    arguments = RUNS[script].replace("TEXT", str(tmp_path / "text")).split()
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    out = tmp_path / "out.json"
    done = subprocess.run(
        [*command, "--json", str(out)], capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(out.read_text("utf-8"))
    assert written["kind"] == script.removesuffix(".py") and written["versions"]["torch"]
    assert "\n| --- |" in out.with_suffix(".md").read_text("utf-8")
