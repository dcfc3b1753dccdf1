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

GOOD = {"zero_optimization": {"stage": 2}, "quantized_comm": {"node_size": 4, "exclude": ["a.*"]}}


def write(folder: Path, content: object, name: str = "ds_config.json") -> str:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_validate_says_what_the_block_means(tmp_path, capsys) -> None:
    config = {**GOOD, "quantized_comm": {"warmup_steps": 10, **GOOD["quantized_comm"]}}
    assert main(["validate", write(tmp_path, config)]) == 0
    out = capsys.readouterr().out
    # 8 bits, and 8 bytes of scale and offset per 1024 elements
    assert "weights: 8-bit minmax codes, groups of 1024, 1.008 bytes per element" in out
    assert "random_shift rounding" in out
    assert "parameters under 2048 elements, names matching a.*" in out
    assert "the first 10 steps are in full precision" in out
    assert "ZeRO-2" in out


def test_validate_says_what_exact_differences_cost(tmp_path, capsys) -> None:
    config = {**GOOD, "quantized_comm": {"scheme": "sdp4bit", "weights": {"lossless": True}}}
    assert main(["validate", write(tmp_path, config)]) == 0
    out = capsys.readouterr().out
    assert "weights: exact differences, 2.9 bits per element at a learning rate of 3e-4, 16 " in out
    assert "gradients: 4-bit absmax codes, groups of 128" in out


def test_validate_says_how_gaussian_levels_travel(tmp_path, capsys) -> None:
    config = {"zero_optimization": {"stage": 3}, "quantized_comm": {"scheme": "eden3"}}
    assert main(["validate", write(tmp_path, config)]) == 0
    out = capsys.readouterr().out
    # 3 bits, and 2 bytes of scale per 128 elements
    assert "gradients: 3-bit gaussian codes, groups of 128, 0.391 bytes per element" in out
    assert "nearest level, scale of EDEN, Hadamard blocks of 128" in out
    assert "inside a node 8-bit absmax codes, groups of 128, 1.031 bytes per element" in out
    assert out.count("stochastic rounding") == 1


def test_validate_accepts_every_shipped_config(capsys) -> None:
    paths = [str(path) for path in resource_dir("configs").glob("*.json")]
    assert paths and main(["validate", *paths]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "content, message",
    [
        ({"quantized_comm": {"gradients": {"bits": 9}}}, "quantized_comm.gradients.bits=9"),
        ({"quantised_comm": {}}, "did you mean quantized_comm?"),
        ({"quantized_comm": {}}, "zero_optimization.stage is not set: allowed"),
        ({**GOOD, "zero_optimization": {"stage": 0}}, "zero_optimization.stage=0: allowed"),
        # DeepSpeed 0.19 refuses it by itself.
        ({**GOOD, "zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "MiCS keeps its own"),
        ({**GOOD, "zero_optimization": False}, "zero_optimization.stage=0: allowed"),
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
    assert "names matching a.*" in out
    assert main(["validate", "--json", str(tmp_path / "ds_config.json")]) == 0
    out = capsys.readouterr().out
    assert '"weights"' not in out and '"node_shard"' not in out


def test_json_alone_is_the_resolved_block(tmp_path, capsys) -> None:
    assert main(["validate", "--json", write(tmp_path, GOOD)]) == 0
    block = json.loads(capsys.readouterr().out)["quantized_comm"]
    assert (block["node_size"], block["weights"]["group_size"]) == (4, 1024)


@pytest.mark.parametrize("world", ["0", "-1", "two"])
def test_a_world_without_ranks_is_refused(tmp_path, capsys, world: str) -> None:
    with pytest.raises(SystemExit):
        main(["validate", write(tmp_path, GOOD), "--world", world])
    assert "argument --world" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "node shard: 2 / (ranks per node) bytes per parameter more on every rank"),
        (("--node-size", "8", "--params", "7b"), "0.25 bytes per parameter more on every rank (1."),
        (("--node-size", "8", "--world", "8"), "node shard: none, all ranks are on one node"),
    ],
)
def test_the_node_shard_and_its_memory_are_named(
    tmp_path, capsys, options: tuple[str, ...], expected: str
) -> None:
    config = {"bf16": {"enabled": True}, "quantized_comm": {"scheme": "sdp4bit"}}
    path = write(tmp_path, {**config, "zero_optimization": {"stage": 3}})
    assert main(["validate", path, *options]) == 0
    assert expected in capsys.readouterr().out
    path = write(tmp_path, {**config, "zero_optimization": {"stage": 2}})
    assert main(["validate", path, *options]) == 0
    assert "node shard" not in capsys.readouterr().out


@pytest.mark.parametrize("scheme", ["qsdp", "autotune"])
def test_gradients_that_stay_exact_are_not_promised_in_8_bits(tmp_path, capsys, scheme) -> None:
    zero = {"stage": 2, "reduce_scatter": False}
    path = write(tmp_path, {"zero_optimization": zero, "quantized_comm": {"scheme": scheme}})
    assert main(["validate", path]) == 0
    out = capsys.readouterr().out
    assert "gradients: full precision, because zero_optimization.reduce_scatter is false" in out
    assert "gradients: 8-bit" not in out


@pytest.mark.parametrize("enabled", [True, False])
def test_code_that_a_config_names_runs_only_when_asked_for(
    tmp_path, capsys, monkeypatch, enabled: bool
) -> None:
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    block = {"enabled": enabled, "weights": {"codec": "trap"}}
    path = write(tmp_path, {"zero_optimization": {"stage": 2}, "quantized_comm": block})
    assert main(["validate", path]) == 0
    assert (
        "codec trap, not tried (--load-codecs imports it)" in capsys.readouterr().out
    ) == enabled
    if enabled:
        with pytest.raises(SystemExit, match="imported"):
            main(["validate", path, "--load-codecs"])
    else:
        assert main(["validate", path, "--load-codecs"]) == 0


ESTIMATE = "estimate --params 7b --nodes 2 --link 10 --step 1".split()


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
