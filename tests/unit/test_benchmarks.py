"""The demo's own parts: batches, the model, the command line, figures and the table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # scripts that import each other, not a package

import compare  # noqa: E402
import launch  # noqa: E402
import report  # noqa: E402
import schemes  # noqa: E402
import text  # noqa: E402
from gpt import GPT, GPTConfig  # noqa: E402


def batch(**address: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(4096).remainder(251).to(torch.uint8)
    address = {"seed": 0, "step": 0, "rank": 0} | address
    return text.batch(tokens, batch_size=4, seq_len=16, **address)


def test_targets_are_the_inputs_one_byte_later() -> None:
    inputs, targets = batch()
    assert inputs.shape == targets.shape == (4, 16)
    assert torch.equal((inputs + 1) % 251, targets)


def test_batch_is_a_function_of_all_parts_of_its_address() -> None:
    first = batch(seed=3, step=5, rank=1)[0]
    torch.rand(7)  # nothing is drawn from a shared generator
    assert torch.equal(batch(seed=3, step=5, rank=1)[0], first)
    for other in ({"seed": 1}, {"step": 1}, {"rank": 1}):
        assert not torch.equal(batch()[0], batch(**other)[0])


def test_model_sees_only_the_past() -> None:
    torch.manual_seed(0)
    model, logits = GPT(GPTConfig(layers=2, width=32, heads=2, seq_len=16)), []
    inputs, targets = batch()
    changed = inputs.clone()
    changed[:, 8:] = 7
    model.head.register_forward_hook(lambda module, args, output: logits.append(output))
    model(inputs, targets)
    model(changed, targets)
    assert torch.equal(logits[0][:, :8], logits[1][:, :8])
    assert not torch.equal(logits[0][:, 8:], logits[1][:, 8:])


def test_scheme_listing_keeps_overrides_with_their_scheme() -> None:
    listing = 'full_precision,qsdp:weights.bits=6,weights.levels=learned,exclude=["a","b"],qsdp'
    entries = schemes.parse_schemes(listing)
    assert [entry.name for entry in entries] == ["full_precision", "qsdp", "qsdp"]
    assert entries[1].overrides == {
        "weights.bits": 6, "weights.levels": "learned", "exclude": ["a", "b"],
    }  # fmt: skip
    assert not entries[0].overrides and not entries[2].overrides


@pytest.mark.parametrize("listing", ["", "a,,b", "a,a", "bits=3", "a:bits", "deepspeed_plain:a=1"])
def test_wrong_scheme_listing_is_refused(listing: str) -> None:
    with pytest.raises(ValueError, match="schemes|override"):
        schemes.parse_schemes(listing)


def test_configs_of_all_schemes_differ_in_the_block_only() -> None:
    listing = "deepspeed_plain,full_precision,qsdp_w4g4:weights.bits=3"
    args = compare.parse_args(["--schemes", listing, "--seed", "7", "--node-size", "2"])
    configs = [schemes.deepspeed_config(entry, args) for entry in args.schemes]
    blocks = [config.pop("quantized_comm", None) for config in configs]
    assert blocks[0] is None and blocks[1] == {
        "scheme": "full_precision",
        "seed": 7,
        "node_size": 2,
    }
    assert blocks[2] == {"scheme": "qsdp_w4g4", "seed": 7, "node_size": 2, "weights": {"bits": 3}}
    assert configs[0] == configs[1] == configs[2]


@pytest.mark.parametrize("listing", ["qsdpp", "qsdp:weights.bitz=4", "qsdp:weights.bits=9"])
def test_wrong_block_is_refused_before_anything_runs(
    listing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(["--schemes", listing, "--out", str(tmp_path / "out")]) == 1
    assert "quantized_comm" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_command_starts_every_rank_on_this_machine(tmp_path: Path, launcher: str) -> None:
    """Only a checkout that is not installed needs the plugin to be imported by name."""
    job = launch.Job(label="qsdp", config={}, arguments=["--layers=1"], folder=tmp_path, world=3,
                     steps=5, device="cpu", launcher=launcher, timeout=1)  # fmt: skip
    line = launch.command(job, port=1234, installed=True)
    assert "--master_port=1234" in line and "--plugin-import" not in line
    assert any(part in ("--num_accelerators=3", "--nproc_per_node=3") for part in line)
    assert "--plugin-import" in launch.command(job, port=1, installed=False)
    path = launch.environment("cpu", installed=False)["PYTHONPATH"]
    assert path.split(":")[0] == str(BENCHMARKS.parent)


def test_progress_file_is_read_up_to_its_last_complete_line(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    assert launch.read_progress(path) == []
    path.write_text('{"step": 0, "loss": 5.5}\n{"step": 1, "lo', "utf-8")
    assert launch.read_progress(path) == [{"step": 0, "loss": 5.5}]


def finished(label: str, *, loss: float, received: int | None, inter: int = 500) -> dict:
    """A run of 100 steps and 10 parameters on two ranks, as train.py leaves it."""
    counters = {"weights": {"intra": received, "inter": 0},
                "gradients": {"intra": 0, "inter": inter}}  # fmt: skip
    reports = None if received is None else [{"params": 10, "received_bytes": counters}] * 2
    result = {"losses": [9.0] * 50 + [loss] * 50, "seconds": [0.1] * 99 + [50.0],
              "validation_loss": 2.5, "reports": reports, "parameters": 10}  # fmt: skip
    return {"label": label, "run_seconds": 12.0, "block": None, "result": result}


def test_figures_of_runs_and_what_is_concluded_from_them() -> None:
    runs = [
        finished("full_precision", loss=2.0, received=2500, inter=2000),
        finished("x", loss=2.1, received=500),
    ]
    base, other = rows = report.rows(runs)
    assert (base["final_loss"], base["gap_percent"]) == (2.0, 0.0)
    assert other["gap_percent"] == pytest.approx(5.0)
    assert base["wire_bytes"] == 4.5  # (2500 + 2000) bytes / 10 parameters / 100 steps
    assert base["inter_bytes"] == 2.0 and base["step_seconds"] == 0.1
    saved, units, _ = report.conclusions(rows, world=4)
    assert "multiply by 4/3" in units
    assert saved == "x: 4.0x fewer bytes between nodes than full_precision, loss +5.00 %."
    assert report.gap(other) == "+5.00"
    assert report.gap(other | {"gap_percent": -0.4}) == "-0.40 (too short to tell)"
    assert report.gap(base) == "+0.00" and report.gap({"gap_percent": None}) == "n/a"
