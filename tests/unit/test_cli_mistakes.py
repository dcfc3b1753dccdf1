"""Wrong files and values: every command answers with one line and the exit code 1. Most are in
golden/commands.yaml; here are those that YAML cannot hold, or whose words are those of others.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_quant.tools.cli import main

PLAN = "--nodes 2 --gpus 2 --link 10 --intra 200 --step 1".split()
VALIDATE = ["validate", "{file}"]
PLOT = ["plot", "{file}"]
HOSTS = ["probe", "--hostfile", "{file}"]
PROBED = "estimate --params 1b --step 1 --probe {file}".split()
CONFIGURED = ["estimate", "--params", "1b", *PLAN, "--ds-config", "{file}"]
MODEL = ["estimate", *PLAN, "--model-config", "{file}"]

HUGE = 10**400
DEEP = '{"a": ' * 900 + "1" + "}" * 900
RATE = {"bytes_per_second": 1e8, "latency": 1e-3}
LLAMA = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 128, "num_hidden_layers": 2,
    "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def probe(**facts: Any) -> dict[str, Any]:
    links = {"intra": RATE, "inter": RATE}
    nodes = {"nodes": 2, "node_size": 2, "backend": "gloo"}
    return {"kind": "probe", "version": 1, **nodes, **links, **facts}


def config(steps: Any = None, **zero: Any) -> dict[str, Any]:
    accumulation = {} if steps is None else {"gradient_accumulation_steps": steps}
    return {"zero_optimization": {"stage": 3, **zero}, **accumulation}


NO_HOSTS = "allowed: a line per host, such as 'node0 slots=8'"

CASES: list[tuple[list[str], Any, str]] = [
    (VALIDATE, DEEP, "nested too deeply"),
    (VALIDATE, b"\xff\xfe\x00", "can't decode byte 0xff"),
    (CONFIGURED, DEEP, "nested too deeply"),
    (CONFIGURED, config(HUGE), "gradient_accumulation_steps=1000"),
    (CONFIGURED, config(stage=HUGE), "zero_optimization.stage=1000"),
    (CONFIGURED, config(reduce_bucket_size=HUGE), "zero_optimization.reduce_bucket_size=1000"),
    (PROBED, "[" * 100_000, "nested too deeply"),
    (PROBED, probe(inter=RATE | {"bytes_per_second": HUGE}), "a number is too large"),
    (MODEL, "[]", "no model_type, allowed: a Hugging Face config"),
    (MODEL, LLAMA | {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: allowed: 1 to"),
    (MODEL, LLAMA | {"num_hidden_layers": "x"}, "num_hidden_layers"),
    (MODEL, LLAMA | {"num_attention_heads": 0}, "ZeroDivisionError"),
    (MODEL, {"model_type": "nope"}, "Unrecognized model identifier"),
    (HOSTS, b"\xff\xfe\x00", NO_HOSTS),
    (PLOT, b"\xff\xfe\n", "no JSON objects of numbers with a step in line(s) 1: allowed: a file"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "content", "message"), CASES)
def test_mistake_is_told_in_one_line(
    tmp_path: Path, monkeypatch, capsys, command: list[str], content: Any, message: str
) -> None:
    if command is MODEL:
        pytest.importorskip("transformers", reason="needs transformers")
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "file"
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main([word.format(file=path) for word in command]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert message in err and str(path) in err


def test_a_probe_that_cannot_be_written_is_told_before_it_measures(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    path = tmp_path / "missing" / "probe.json"
    assert main(["probe", "--out", str(path)]) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"ds_quant probe: --out {path}: No such file or directory\n")


def test_node_sizes_are_listed_at_once(tmp_path: Path, capsys) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config() | {"quantized_comm": {"node_size": 7}}))
    assert main(["validate", str(path), "--world", str(10**12)]) == 1
    allowed = "1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 40, 50, 64, 80, 100, 125, ..."
    assert f"allowed with {10**12} ranks: {allowed}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "message"),
    [(">&-", "standard output is closed"), (">/dev/full", "No space left on device")],
)
def test_output_that_cannot_be_written_is_told_in_one_line(
    tmp_path: Path, output: str, message: str
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config()))
    command = f"{sys.executable} -m ds_quant validate {path} {output}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and message in done.stderr
