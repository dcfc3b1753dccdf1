"""The ds_quant command; golden/commands.yaml has what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ds_quant
from ds_quant.config.schema import json_schema
from ds_quant.tools.cli import main
from tests.thin import thinned

ESTIMATE = "estimate --params 7b --nodes 2 --link 10 --step 1".split()
VALIDATE, PROBED = ["validate", "{file}"], "estimate --params 1b --step 1 --probe {file}".split()
MODEL = "estimate --nodes 2 --link 10 --step 1 --model-config {file}".split()
GOOD = {"zero_optimization": {"stage": 2}, "quantized_comm": {"node_size": 4, "exclude": ["a.*"]}}
LLAMA = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 128, "num_hidden_layers": 2,
    "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def write(folder: Path, content: object, name: str = "ds_config.json") -> str:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_estimate_reads_switches_as_deepspeed_does(tmp_path, capsys) -> None:
    told = []
    for enabled in (True, "true", False):
        config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": enabled}}
        assert main([*ESTIMATE, "--ds-config", write(tmp_path, config), "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out)["rows"])
    assert told[0] == told[1] != told[2]


@pytest.mark.parametrize("enabled", [True, False])
def test_code_that_a_config_names_runs_only_when_asked_for(
    tmp_path, monkeypatch, enabled: bool
) -> None:
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    block = {"enabled": enabled, "weights": {"codec": "trap"}}
    path = write(tmp_path, {"zero_optimization": {"stage": 2}, "quantized_comm": block})
    for command, code in ((["validate", path], 0), ([*ESTIMATE, "--ds-config", path], enabled)):
        assert main(command) == code
        if enabled:
            with pytest.raises(SystemExit, match="imported"):
                main([*command, "--load-codecs"])
        else:
            assert main([*command, "--load-codecs"]) == 0


def test_only_codecs_are_looked_for_in_the_working_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert main(["schema"]) == main(["validate", write(tmp_path, GOOD)]) == main(ESTIMATE) == 0
    assert str(tmp_path) not in sys.path
    assert main([*ESTIMATE, "--load-codecs"]) == 0 and sys.path[-1] == str(tmp_path)


@pytest.mark.parametrize(
    "command", [["schema"], *thinned([["validate", "--json"], ESTIMATE], lambda _: False)]
)
def test_a_reader_that_has_seen_enough_is_no_error(tmp_path, command: list[str]) -> None:
    if "validate" in command:
        command = [*command, *[write(tmp_path, GOOD)] * 200]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-m", "ds_quant", *command], **pipes) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait(timeout=60)) == (b"", 0)


def test_schema_and_version_are_printed(capsys) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"ds_quant {ds_quant.__version__}\n"


def test_the_schema_needs_neither_torch_nor_deepspeed() -> None:
    code = (
        "import sys; from ds_quant.tools.cli import main; "
        "assert main(['schema']) == 0; "
        "loaded = {'torch', 'deepspeed', 'cupy', 'numpy'} & set(sys.modules); "
        "assert not loaded, loaded"
    )
    root = Path(ds_quant.__file__).parent.parent
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("command", "content", "message"),
    [
        (VALIDATE, '{"a": ' * 900 + "1" + "}" * 900, "nested too deeply"),
        (PROBED, "[" * 100_000, "nested too deeply"),
        # in words of transformers
        (MODEL, LLAMA | {"num_hidden_layers": "x"}, "num_hidden_layers"),
        (MODEL, LLAMA | {"num_attention_heads": 0}, "ZeroDivisionError"),
        (MODEL, {"model_type": "nope"}, "Unrecognized model identifier"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    tmp_path, capsys, command: list[str], content: Any, message: str
) -> None:
    if command is MODEL:
        pytest.importorskip("transformers", reason="needs transformers")
    path = write(tmp_path, content)
    assert main([word.format(file=path) for word in command]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert message in err and path in err


@pytest.mark.parametrize(
    ("output", "message"),
    [(">&-", "standard output is closed"), (">/dev/full", "No space left on device")],
)
def test_output_that_cannot_be_written_is_told_in_one_line(
    tmp_path, output: str, message: str
) -> None:
    command = f"{sys.executable} -m ds_quant validate {write(tmp_path, GOOD)} {output}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and message in done.stderr
