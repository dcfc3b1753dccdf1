"""The demo's own parts: text and its batches, the model, the command line, the table."""

from __future__ import annotations

import io
import json
import math
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
from gpt import GPT, VOCABULARY, GPTConfig  # noqa: E402

SMALL = GPTConfig(layers=2, width=32, heads=2, seq_len=16)


@pytest.fixture(scope="module")
def documentation() -> str:
    return text.documentation()


@pytest.mark.slow
def test_documentation_is_long_ascii_and_the_same_every_time(documentation: str) -> None:
    assert text.documentation() == documentation
    assert documentation.isascii()
    assert len(documentation) > 1_500_000


@pytest.mark.slow
def test_documentation_is_english(documentation: str) -> None:
    words = documentation.lower().split()
    assert words.count("the") > 0.03 * len(words)


def test_load_returns_the_bytes_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_bytes(bytes(range(256)))
    assert torch.equal(text.load(path), torch.arange(256, dtype=torch.uint8))


def test_split_cuts_without_overlap_or_loss() -> None:
    tokens = torch.arange(101, dtype=torch.uint8)
    training, validation = text.split(tokens, validation_share=0.1)
    assert torch.equal(torch.cat([training, validation]), tokens)
    assert len(validation) == 10


def batch(**address: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(4096).remainder(251).to(torch.uint8)
    address = {"seed": 0, "step": 0, "rank": 0} | address
    return text.batch(tokens, batch_size=4, seq_len=16, **address)


def test_targets_are_the_inputs_one_byte_later() -> None:
    inputs, targets = batch()
    assert inputs.shape == targets.shape == (4, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal((inputs + 1) % 251, targets)


def test_batch_is_a_function_of_its_address() -> None:
    first = batch(seed=3, step=5, rank=1)
    batch(seed=3, step=6, rank=1)
    torch.rand(7)  # nothing is drawn from a shared generator
    assert torch.equal(batch(seed=3, step=5, rank=1)[0], first[0])


@pytest.mark.parametrize("other", [{"seed": 1}, {"step": 1}, {"rank": 1}])
def test_batch_differs_with_every_part_of_its_address(other: dict[str, int]) -> None:
    assert not torch.equal(batch()[0], batch(**other)[0])


def test_batch_of_a_text_shorter_than_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="17"):
        text.batch(torch.zeros(16, dtype=torch.uint8), seed=0, step=0, rank=0,
                   batch_size=1, seq_len=16)  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("compute_dtype", [None, torch.float32])
def test_untrained_model_predicts_uniformly(tied: bool, compute_dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=32, heads=2, seq_len=16, tied=tied,
                          compute_dtype=compute_dtype)).bfloat16()  # fmt: skip
    loss = model(*batch())
    # Logits have a standard deviation of at most 0.02 * sqrt(32) around zero, which moves the
    # cross-entropy by about its square; bf16 logits add less.
    assert loss.item() == pytest.approx(math.log(VOCABULARY), abs=0.05)
    assert loss.dtype == torch.float32


def test_model_sees_only_the_past() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL)
    inputs, _ = batch()
    changed = inputs.clone()
    changed[:, 8:] = 7
    targets = torch.zeros_like(inputs)
    before, after = (model(x[:, :8], targets[:, :8]) for x in (inputs, changed))
    assert torch.equal(before, after)
    logits = []
    hook = model.head.register_forward_hook(lambda module, args, output: logits.append(output))
    model(inputs, targets)
    model(changed, targets)
    hook.remove()
    assert torch.equal(logits[0][:, :8], logits[1][:, :8])
    assert not torch.equal(logits[0][:, 8:], logits[1][:, 8:])


def test_bf16_weights_keep_bf16_gradients_under_fp32_arithmetic() -> None:
    model = GPT(GPTConfig(layers=1, width=32, heads=2, seq_len=16,
                          compute_dtype=torch.float32)).bfloat16()  # fmt: skip
    model(*batch()).backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}


def test_tied_head_shares_one_parameter() -> None:
    config = GPTConfig(layers=1, width=32, heads=2, seq_len=16, tied=True)
    names = [name for name, _ in GPT(config).named_parameters()]
    assert "head.weight" not in names


@pytest.mark.parametrize("sizes", [{"layers": 0}, {"width": 30, "heads": 4}])
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(sizes)) if len(sizes) == 1 else "heads=4"):
        GPTConfig(**sizes)


def test_longer_sequence_than_the_model_is_refused() -> None:
    inputs = torch.zeros(1, 17, dtype=torch.int64)
    with pytest.raises(ValueError, match="at most 16"):
        GPT(SMALL)(inputs, inputs)


def test_scheme_listing_keeps_overrides_with_their_scheme() -> None:
    listing = 'full_precision,qsdp:weights.bits=6,exclude=["a","b"],qsdp,qsdp_w4g4'
    entries = schemes.parse_schemes(listing)
    assert [entry.name for entry in entries] == ["full_precision", "qsdp", "qsdp", "qsdp_w4g4"]
    assert entries[1].overrides == {"weights.bits": 6, "exclude": ["a", "b"]}
    assert not any(entry.overrides for entry in (entries[0], *entries[2:]))


@pytest.mark.parametrize(
    ("setting", "parsed"),
    [
        ("weights.bits=6", ("weights.bits", 6)),
        ("weights.levels=learned", ("weights.levels", "learned")),
        ("gradients.enabled=false", ("gradients.enabled", False)),
        ('exclude=["*head*"]', ("exclude", ["*head*"])),
    ],
)
def test_override_values_are_json_or_strings(setting: str, parsed: tuple) -> None:
    assert schemes.parse_override(setting) == parsed


@pytest.mark.parametrize("listing", ["", "a,,b", "a,a", "bits=3", "a:bits", "deepspeed_plain:a=1"])
def test_wrong_scheme_listing_is_refused(listing: str) -> None:
    with pytest.raises(ValueError, match="schemes|override"):
        schemes.parse_schemes(listing)


def test_block_merges_arguments_overrides_and_entry() -> None:
    args = compare.parse_args(
        ["--schemes", "qsdp_w4g4:weights.rounding=nearest,weights.bits=3", "--seed", "7",
         "--node-size", "2", "--override", "weights.bits=6", "--override", "min_numel=0"]
    )  # fmt: skip
    assert schemes.block_of(args.schemes[0], args) == {
        "scheme": "qsdp_w4g4",
        "seed": 7,
        "node_size": 2,
        "min_numel": 0,
        "weights": {"bits": 3, "rounding": "nearest"},
    }


def test_configs_of_all_schemes_differ_in_the_block_only() -> None:
    args = compare.parse_args(["--schemes", "deepspeed_plain,full_precision,qsdp"])
    configs = [schemes.deepspeed_config(entry, args) for entry in args.schemes]
    blocks = [config.pop("quantized_comm", None) for config in configs]
    assert blocks[0] is None
    assert blocks[1] != blocks[2]
    assert configs[0] == configs[1] == configs[2]


def test_demo_is_the_default() -> None:
    args = compare.parse_args([])
    assert [entry.name for entry in args.schemes] == ["full_precision", "qsdp", "sdp4bit"]
    assert (args.stage, args.world, args.node_size, args.steps) == (3, 4, 2, 150)
    compare.check(args)


@pytest.mark.parametrize("listing", ["qsdpp", "qsdp:weights.bitz=4", "qsdp:weights.bits=9"])
def test_wrong_block_is_refused_before_anything_runs(
    listing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(["--schemes", listing, "--out", str(tmp_path / "out")]) == 1
    assert "quantized_comm" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def job(tmp_path: Path, *, label: str = "qsdp", launcher: str = "deepspeed") -> launch.Job:
    return launch.Job(label=label, config={}, arguments=["--layers=1"], folder=tmp_path, world=3,
                      steps=5, device="cpu", launcher=launcher, timeout=1)  # fmt: skip


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_command_starts_every_rank_on_this_machine(tmp_path: Path, launcher: str) -> None:
    line = launch.command(job(tmp_path, launcher=launcher), port=1234, installed=True)
    assert "--master_port=1234" in line
    assert any(part in ("--num_accelerators=3", "--nproc_per_node=3") for part in line)
    assert "--plugin-import" not in line


def test_checkout_that_is_not_installed_imports_the_plugin_by_name(tmp_path: Path) -> None:
    assert "--plugin-import" in launch.command(job(tmp_path), port=1, installed=False)
    plain = job(tmp_path, label=launch.PLAIN)
    assert "--plugin-import" not in launch.command(plain, port=1, installed=False)
    path = launch.environment("cpu", installed=False)["PYTHONPATH"]
    assert path.split(":")[0] == str(BENCHMARKS.parent)


def test_progress_file_is_read_up_to_its_last_complete_line(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    assert launch.read_progress(path) == []
    path.write_text('{"step": 0, "loss": 5.5}\n{"step": 1, "lo', "utf-8")
    assert launch.read_progress(path) == [{"step": 0, "loss": 5.5}]


def finished(label: str, *, loss: float, received: int | None) -> dict:
    """A run of 100 steps and 10 parameters on two ranks, as train.py leaves it."""
    counters = {"weights": {"intra": received, "inter": 0}, "gradients": {"intra": 0, "inter": 500}}
    reports = None if received is None else [{"params": 10, "received_bytes": counters}] * 2
    result = {"losses": [9.0] * 50 + [loss] * 50, "seconds": [0.1] * 99 + [50.0],
              "validation_loss": 2.5, "reports": reports, "parameters": 10}  # fmt: skip
    return {"label": label, "run_seconds": 12.0, "block": None, "result": result}


def test_rows_give_final_loss_gap_and_counted_bytes() -> None:
    runs = [
        finished("full_precision", loss=2.0, received=2500),
        finished("x", loss=2.1, received=500),
    ]
    base, other = report.rows(runs)
    assert (base.final_loss, base.gap_percent) == (2.0, 0.0)
    assert other.gap_percent == pytest.approx(5.0)
    assert base.wire_bytes == 3.0  # (2500 + 500) bytes / 10 parameters / 100 steps
    assert base.inter_bytes == 0.5
    assert base.step_seconds == 0.1


def test_table_and_picture_do_without_counters_and_baseline(tmp_path: Path) -> None:
    from rich.console import Console

    console = Console(width=120, record=True, file=io.StringIO())
    runs = [finished("qsdp", loss=2.0, received=None)]
    console.print(report.table(report.rows(runs)))
    assert "n/a" in console.export_text()
    report.plot(runs, "title", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_table_fits_a_terminal_of_80_columns() -> None:
    from rich.console import Console

    console = Console(width=80, record=True, file=io.StringIO())
    label = "deepspeed_plain"  # as long as the names of the schemes are
    console.print(report.table(report.rows([finished(label, loss=2.0, received=2500)])))
    printed = console.export_text()
    assert label in printed and "2.0000" in printed and "3.000" in printed and "…" not in printed


def test_conclusions_name_what_was_saved_and_what_it_cost() -> None:
    runs = [
        finished("full_precision", loss=2.0, received=2500),
        finished("x", loss=2.1, received=500),
    ]
    for run in runs[:1]:
        run["result"]["reports"][0]["received_bytes"]["gradients"]["inter"] = 2000
    units, saved, _ = report.conclusions(report.rows(runs), world=4)
    assert "4/3 times" in units
    assert saved == "x: 4.0x fewer bytes between nodes than full_precision, loss +5.00 %."


def test_smoothing_leaves_a_spike_out() -> None:
    assert report.smoothed([3.0, 2.0, 9.0, 2.0, 1.0], window=3) == [3.0, 2.5, 3.0, 2.0, 2.0]


def test_progress_is_printed_where_there_is_no_terminal(capsys, monkeypatch) -> None:
    times = iter([1000.0, 1240.0, 1280.0, 1320.0, 1360.0, 1400.0])
    monkeypatch.setattr(launch.time, "monotonic", lambda: next(times))
    progress = launch.Progress(runs=2, steps=100)
    progress.begin("full_precision", world=4)
    progress.begin("qsdp", world=4)
    for step in range(10, 101, 10):
        progress.show(step, 2.5)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "2 of 2: qsdp, starting 4 ranks"
    # 120 of 200 steps in 240 s, 140 in 280 s: 2 s per step
    assert lines[2:4] == ["2 of 2: qsdp, step 20 of 100, loss 2.500, about 3 min left",
                          "2 of 2: qsdp, step 40 of 100, loss 2.500, about 2 min left"]  # fmt: skip
    assert lines[-1].endswith("step 100 of 100, loss 2.500, about 0 s left")
    assert len(lines) == 7


def test_provenance_is_json_and_names_versions_and_hardware() -> None:
    facts = json.loads(json.dumps(report.provenance()))
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["hardware"]["cores"] >= 1
