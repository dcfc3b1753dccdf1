"""The ds_quant command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import ds_quant
from ds_quant.config.schema import json_schema
from ds_quant.resources import resource_dir
from ds_quant.tools.cli import main

ESTIMATE = "estimate --params 7b --nodes 2 --link 10 --step 1".split()
GOOD = {"zero_optimization": {"stage": 2}, "quantized_comm": {"node_size": 4, "exclude": ["a.*"]}}


def write(folder: Path, content: object, name: str = "ds_config.json") -> str:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_validate_accepts_every_shipped_config(capsys) -> None:
    paths = [str(path) for path in resource_dir("configs").glob("*.json")]
    assert paths and main(["validate", *paths]) == 0
    assert capsys.readouterr().err == ""


def test_estimate_reads_switches_as_deepspeed_does(tmp_path, capsys) -> None:
    told = []
    for enabled in (True, "true", False):
        config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": enabled}}
        assert main([*ESTIMATE, "--ds-config", write(tmp_path, config), "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out)["rows"])
    assert told[0] == told[1] != told[2]


@pytest.mark.parametrize("enabled", [True, False])
def test_code_that_a_config_names_runs_only_when_asked_for(
    tmp_path, capsys, monkeypatch, enabled: bool
) -> None:
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    block = {"enabled": enabled, "weights": {"codec": "trap"}}
    path = write(tmp_path, {"zero_optimization": {"stage": 2}, "quantized_comm": block})
    estimate = [*ESTIMATE, "--ds-config", path]
    assert main(["validate", path]) == 0
    assert (
        "codec trap, not tried (--load-codecs imports it)" in capsys.readouterr().out
    ) == enabled
    assert main(estimate) == enabled
    said = 'weights.codec="trap": only its code knows its bytes: give --load-codecs'
    assert (said in capsys.readouterr().err) == enabled
    for command in (["validate", path], estimate):
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


@pytest.mark.parametrize("command", [["schema"], ["validate", "--json"], ESTIMATE])
def test_a_reader_that_has_seen_enough_is_no_error(tmp_path, command: list[str]) -> None:
    if "validate" in command:
        command = [*command, *[write(tmp_path, GOOD)] * 200]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-m", "ds_quant", *command], **pipes) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait(timeout=60)) == (b"", 0)


def test_schema_is_printed(capsys) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()


def test_version(capsys) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"ds_quant {ds_quant.__version__}\n"


def test_command_loads_neither_torch_nor_deepspeed() -> None:
    path = resource_dir("configs") / "ds_qsdp_zero3.json"
    code = (
        "import sys; from ds_quant.tools.cli import main; "
        f"assert main(['validate', {str(path)!r}]) == 0 and main(['schema']) == 0; "
        "loaded = {'torch', 'deepspeed', 'cupy', 'numpy'} & set(sys.modules); "
        "assert not loaded, loaded"
    )
    root = Path(ds_quant.__file__).parent.parent
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True)


# ---- the block of the environment ----


def test_the_block_of_the_environment_is_checked(tmp_path, capsys, monkeypatch) -> None:
    plain, own = tmp_path / "plain.json", tmp_path / "own.json"
    plain.write_text('{"zero_optimization": {"stage": 2}}')
    own.write_text('{"zero_optimization": {"stage": 2}, "quantized_comm": {"scheme": "qwd"}}')
    assert main(["validate", "--env"]) == 1 and "is not set" in capsys.readouterr().err
    monkeypatch.setenv("DS_QUANT_BLOCK", '{"scheme": "eden3"}')
    assert main(["validate", "--env"]) == 0
    assert "gradients: 3-bit gaussian" in capsys.readouterr().out
    assert main(["validate", "--env", str(plain), str(own)]) == 0
    first, second = capsys.readouterr().out.split(f"{own}: valid")
    assert "valid, block from DS_QUANT_BLOCK" in first and "3-bit gaussian" in first
    assert "gradients: full precision" in second
    assert main(["validate", str(plain)]) == 0 and "no quantized_comm" in capsys.readouterr().out
    monkeypatch.setenv("DS_QUANT_BLOCK", '{"scheme": "eden5"}')
    assert main(["validate", "--env", str(plain)]) == 1
    assert 'DS_QUANT_BLOCK: quantized_comm.scheme="eden5"' in capsys.readouterr().err


def test_validate_needs_a_file_or_the_environment(capsys) -> None:
    assert main(["validate"]) == 1 and "no file: give" in capsys.readouterr().err
