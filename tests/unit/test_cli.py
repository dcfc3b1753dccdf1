"""The ds_quant command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import ds_quant
from ds_quant.cli import main
from ds_quant.config import json_schema
from ds_quant.resources import resource_dir

GOOD = {"zero_optimization": {"stage": 2}, "quantized_comm": {"node_size": 4, "exclude": ["a.*"]}}


def write(folder: Path, content: object, name: str = "ds_config.json") -> str:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_validate_prints_the_resolved_block_and_its_meaning(tmp_path, capsys) -> None:
    config = {**GOOD, "quantized_comm": {"warmup_steps": 10, **GOOD["quantized_comm"]}}
    assert main(["validate", write(tmp_path, config)]) == 0
    out = capsys.readouterr().out
    assert '"group_size": 1024' in out
    # 8 bits, and 8 bytes of scale and offset per 1024 elements
    assert "weights: 8-bit minmax codes, groups of 1024, 1.008 bytes per element" in out
    assert "random_shift rounding" in out
    assert "parameters under 2048 elements, names matching a.*" in out
    assert "the first 10 steps are in full precision" in out
    assert "ZeRO-2" in out


def test_validate_accepts_every_shipped_config(capsys) -> None:
    paths = [str(path) for path in resource_dir("configs").glob("*.json")]
    assert paths and main(["validate", *paths]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "content, message",
    [
        ({"quantized_comm": {"gradients": {"bits": 9}}}, "quantized_comm.gradients.bits=9"),
        ({"quantised_comm": {}}, "did you mean quantized_comm?"),
        ({"quantized_comm": {}}, "zero_optimization.stage=0"),
        ({**GOOD, "zero_optimization": True}, "zero_optimization.stage=0"),
        ('{"seed": 1, "seed": 2}', "seed: set twice"),
        ("{]", "char"),
        ("[1]", "an object in braces"),
    ],
)
def test_validate_fails_with_the_reason(tmp_path, capsys, content: object, message: str) -> None:
    path = write(tmp_path, content)
    assert main(["validate", path]) == 1
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.startswith(path)
    assert captured.out == ""


def test_one_bad_file_does_not_hide_the_others(tmp_path, capsys) -> None:
    good = write(tmp_path, GOOD, "good.json")
    assert main(["validate", str(tmp_path / "none.json"), good]) == 1
    captured = capsys.readouterr()
    assert f"{good}: valid" in captured.out
    assert "none.json: No such file or directory" in captured.err


def test_validate_checks_the_node_size_against_the_world(tmp_path, capsys) -> None:
    path = write(tmp_path, GOOD)
    assert main(["validate", path, "--world", "8"]) == 0
    assert main(["validate", path, "--world", "6"]) == 1
    assert "node_size=4: allowed with 6 ranks: 1, 2, 3, 6" in capsys.readouterr().err


def test_comments_are_read_as_deepspeed_reads_them(tmp_path) -> None:
    text = '{"zero_optimization": {"stage": 3},\n  # weights only\n  "quantized_comm": {}}'
    assert main(["validate", write(tmp_path, text)]) == 0


@pytest.mark.parametrize("config", [{}, {"quantized_comm": {"enabled": False}}])
def test_validate_says_when_nothing_is_quantized(tmp_path, capsys, config: dict) -> None:
    assert main(["validate", write(tmp_path, config)]) == 0
    assert "as without ds_quant" in capsys.readouterr().out


def test_roles_in_full_precision_are_named(tmp_path, capsys) -> None:
    config = {**GOOD, "quantized_comm": {"scheme": "full_precision"}}
    assert main(["validate", write(tmp_path, config)]) == 0
    assert "weights: full precision\ngradients: full precision" in capsys.readouterr().out


def test_autotune_is_valid_and_says_what_it_chooses_from(tmp_path, capsys) -> None:
    block = {"scheme": "autotune", "exclude": ["a.*"], "allow_full_replica": True}
    assert main(["validate", write(tmp_path, {**GOOD, "quantized_comm": block})]) == 0
    out = capsys.readouterr().out
    assert "scheme: full_precision, qsdp, sdp4bit, as links and codecs measured" in out
    assert '"weights"' not in out and '"node_shard"' not in out and "names matching a.*" in out


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
        "import sys; from ds_quant.cli import main; "
        f"assert main(['validate', {str(path)!r}]) == 0 and main(['schema']) == 0; "
        "loaded = {'torch', 'deepspeed', 'cupy', 'numpy'} & set(sys.modules); "
        "assert not loaded, loaded"
    )
    root = Path(ds_quant.__file__).parent.parent
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True)
