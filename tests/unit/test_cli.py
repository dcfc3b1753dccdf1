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


SDP4BIT_3 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
             "quantized_comm": {"scheme": "sdp4bit"}}  # fmt: skip
EXACT = {"zero_optimization": {"stage": 2, "reduce_scatter": False}}


def blocks(**block: object) -> dict:
    return {"zero_optimization": {"stage": 2}, "quantized_comm": block}


@pytest.mark.parametrize(
    ("config", "options", "said", "not_said"),
    [
        # 8 bits, and 8 bytes of scale and offset per 1024 elements
        (blocks(warmup_steps=10, node_size=4, exclude=["a.*"]), "", [
            "weights: 8-bit minmax codes, groups of 1024, 1.008 bytes per element", "ZeRO-2",
            "random_shift rounding", "parameters under 2048 elements, names matching a.*",
            "the first 10 steps are in full precision"], "node shard"),
        (blocks(scheme="sdp4bit", weights={"lossless": True}), "", [
            "weights: exact differences, 2.36 bits per element at a learning rate of 3e-4, 16 ",
            "gradients: 4-bit absmax codes, groups of 128"], "node shard"),
        # 3 bits, and 2 bytes of scale per 128 elements
        ({"zero_optimization": {"stage": 3}, "quantized_comm": {"scheme": "eden3"}}, "", [
            "gradients: 3-bit gaussian codes, groups of 128, 0.391 bytes per element",
            "nearest level, scale of EDEN, Hadamard blocks of 128", "stochastic rounding",
            "inside a node 8-bit absmax codes, groups of 128, 1.031 bytes per element"], "minmax"),
        ({}, "", ["as without ds_quant"], "weights:"),
        ({"quantized_comm": {"enabled": False}}, "", ["as without ds_quant"], "weights:"),
        (blocks(scheme="full_precision"), "",
         ["weights: full precision\ngradients: full precision"], "bytes per element"),
        (blocks(scheme="autotune", exclude=["a.*"], allow_full_replica=True), "", [
            "scheme: full_precision or eden4, whichever is measured",
            "names matching a.*"], "bytes per element"),
        (blocks(scheme="autotune", allow_full_replica=True), "--json", ["{"], '"node_shard"'),
        (blocks(scheme="autotune", allow_full_replica=True), "--json", ["{"], '"weights"'),
        (SDP4BIT_3, "",
         ["node shard: 2 / (ranks per node) bytes per parameter more on every rank"], "none"),
        (SDP4BIT_3, "--node-size 8 --params 7b",
         ["0.25 bytes per parameter more on every rank (1."], "none"),
        (SDP4BIT_3, "--node-size 8 --world 8",
         ["node shard: none, all ranks are on one node"], "more on every rank"),
        *((EXACT | {"quantized_comm": {"scheme": scheme}}, "", [
            "gradients: full precision, because zero_optimization.reduce_scatter is false"],
           "gradients: 8-bit") for scheme in ("qsdp", "autotune")),
    ],
)  # fmt: skip
def test_validate_says_what_the_block_means(
    tmp_path, capsys, config: dict, options: str, said: list[str], not_said: str
) -> None:
    assert main(["validate", write(tmp_path, config), *options.split()]) == 0
    out = capsys.readouterr().out
    assert [text for text in said if text not in out] == [] and not_said not in out, out


AUTO_3 = SDP4BIT_3 | {"bf16": {"enabled": "auto"}}


@pytest.mark.parametrize(
    ("config", "said", "not_said"),
    [
        (AUTO_3, "node shard: 2 / (ranks per node)", "4 bytes"),
        (AUTO_3 | {"bf16": {"enabled": False}}, "full precision (4 bytes each)", "shard: 2"),
        (AUTO_3, "micro-step, between nodes of several ranks once per step", "Hugging Face"),
        (blocks(scheme="zeropp"), "gradients reduced every micro-step", "once per step"),
        (blocks() | {"zero_optimization": {"stage": 1}}, "once per step", "between nodes of"),
        ('{"zero_optimization": {"stage": 2},\n "quantized_comm": {},}',
         "DeepSpeed reads this file, Hugging Face does not: line 2: ", "mistakes"),
    ],
)  # fmt: skip
def test_validate_counts_bytes_and_crossings_as_they_are(
    tmp_path, capsys, config: object, said: str, not_said: str
) -> None:
    assert main(["validate", write(tmp_path, config)]) == 0
    out = capsys.readouterr().out
    assert said in out and not_said not in out, out


def test_validate_tells_all_conflicts_at_once(tmp_path, capsys) -> None:
    gaussian = {"range": "gaussian", "bits": 5, "group_size": 64, "rotation": 0}
    learned = {"levels": "learned", "rounding": "random_shift", "range": "absmax"}
    zero = {"stage": 3, "zero_quantized_weights": True, "mics_shard_size": 2}
    block = {"gradients": gaussian, "weights": learned}
    path = write(tmp_path, {"zero_optimization": zero, "quantized_comm": block})
    assert main(["validate", path]) == 1
    said = capsys.readouterr().err
    assert "9 mistakes in the DeepSpeed config" in said, said
    fine = {"scheme": "sdp4bit", "node_shard": False, "node_size": 3}
    path = write(tmp_path, {"zero_optimization": zero, "quantized_comm": fine})
    assert main(["validate", path, "--world", "8"]) == 1
    said = capsys.readouterr().err
    for text in ("conflicts with", "ZeRO++ and quantized_comm", "MiCS", "allowed with 8 ranks"):
        assert text in said


@pytest.mark.parametrize("text", ["zero_optimization:\n  stage: 2\n", "# a\n---\nbf16: {a: 1}\n"])
def test_yaml_is_recognized(tmp_path, capsys, text: str) -> None:
    assert main(["validate", write(tmp_path, text)]) == 1
    assert "YAML, and DeepSpeed reads JSON" in capsys.readouterr().err


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


def test_json_alone_is_the_resolved_block(tmp_path, capsys) -> None:
    assert main(["validate", "--json", write(tmp_path, GOOD)]) == 0
    block = json.loads(capsys.readouterr().out)["quantized_comm"]
    assert (block["node_size"], block["weights"]["group_size"]) == (4, 1024)


@pytest.mark.parametrize("world", ["0", "-1", "two"])
def test_a_world_without_ranks_is_refused(tmp_path, capsys, world: str) -> None:
    with pytest.raises(SystemExit):
        main(["validate", write(tmp_path, GOOD), "--world", world])
    assert "argument --world" in capsys.readouterr().err


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
