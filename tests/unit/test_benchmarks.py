"""Benchmarks: batches and configs of the demo, pairs of runs, whole studies of tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import compare
import convergence
import paired
import pytest
import report
import schemes
import speed
import text
import torch

# ---- the demo ----


def batch(**address: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(4096).remainder(251).to(torch.uint8)
    address = {"seed": 0, "step": 0, "rank": 0} | address
    return text.batch(tokens, batch_size=4, seq_len=16, **address)


def test_batch_is_a_function_of_all_parts_of_its_address() -> None:
    first = batch(seed=3, step=5, rank=1)[0]
    torch.rand(7)  # nothing is drawn from a shared generator
    assert torch.equal(batch(seed=3, step=5, rank=1)[0], first)
    for other in ({"seed": 1}, {"step": 1}, {"rank": 1}):
        assert not torch.equal(batch()[0], batch(**other)[0])


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


# ---- benchmarks/speed.py ----


def block(scheme: str, index: int, seconds: float, nbytes: float, foreign: float = 0.0) -> dict:
    return {
        "rate": 100.0, "block": index, "scheme": scheme, "seconds": seconds,
        "interface_bytes": nbytes, "counted_bytes": nbytes, "foreign_cores": foreign, "loss": 2.0,
    }  # fmt: skip


def test_speed_ups_pair_neighbouring_blocks_and_leave_out_disturbed_ones() -> None:
    result = {
        "plan": {"rates": [100.0]},
        "parameters": 100,
        "blocks": [
            block("full_precision", 0, 4.0, 600), block("sdp4bit", 0, 1.0, 100),
            block("full_precision", 1, 6.0, 600), block("sdp4bit", 1, 2.0, 100),
            block("full_precision", 2, 6.0, 600), block("sdp4bit", 2, 6.0, 100, foreign=0.9),
        ],
    }  # fmt: skip
    exact, ours = speed.summary(result, max_foreign=0.25)
    assert (exact["speedup"], exact["bytes_bound"], exact["interface_bytes"]) == (1, 1, 6)
    assert (ours["speedup_min"], ours["speedup"], ours["speedup_max"]) == (3, 3.5, 4)
    assert (ours["seconds"], ours["bytes_bound"], ours["clean_blocks"]) == (1.5, 6, 2)
    exact, ours = speed.summary(result, max_foreign=0.25, baseline="sdp4bit")
    assert (exact["speedup"], ours["speedup"]) == (1 / 3, 1)


def test_a_share_of_communication_is_hidden_if_less_is_exposed_than_without_overlap() -> None:
    twin = f"sdp4bit{speed.WAITING}"
    blocks = []
    for rate, seconds in ((100.0, {"sdp4bit": 2.0, twin: 5.0}), (0, {"sdp4bit": 1.0, twin: 1.5})):
        for index, more in enumerate((0.0, 0.5, 9.0)):
            for scheme, step in seconds.items():
                # The third block is disturbed. In the second only the shaped link is slower.
                found = block(scheme, index, step + (more if rate else 0.0), 100, more / 10)
                blocks.append(found | {"rate": rate})
    rows = speed.hidden({"blocks": blocks}, max_foreign=0.25)
    assert rows == [
        {
            "rate": 100.0,
            "scheme": "sdp4bit",
            "compute_seconds": 1.0,
            "exposed_seconds": 1.25,
            "hidden": pytest.approx((1 - 1 / 3.5 + 1 - 1.5 / 4) / 2),
            "hidden_min": pytest.approx(1 - 1.5 / 4),
            "hidden_max": pytest.approx(1 - 1 / 3.5),
        }
    ]
    assert speed.hidden({"blocks": blocks[:6]}, max_foreign=0.25) == []  # no compute measured
    args = speed.parse_args(["--overlap", "--rates", "50"])
    assert args.rates == [50, 0]


def test_baselines_of_the_papers_differ_in_dtypes_only() -> None:
    args = speed.parse_args([])
    exact = speed.config_of("full_precision", 3, 2, args)
    found = speed.config_of("sdp4bit_baseline", 3, 2, args)
    assert found == exact | {"communication_data_type": "fp32"}
    found = speed.config_of("qsdp_baseline", 3, 2, args)
    assert found == exact | {"communication_data_type": "fp16", "bf16": {"enabled": False}}


def test_engines_differ_in_their_block_only() -> None:
    args = speed.parse_args([])
    plain = speed.config_of("deepspeed_plain", 3, 2, args)
    ours = speed.config_of("sdp4bit", 3, 2, args)
    assert ours.pop("quantized_comm")["node_size"] == 2
    assert ours == plain
    keyed = speed.config_of("qsdp:weights.bits=4", 3, 2, args)["quantized_comm"]
    assert keyed["scheme"] == "qsdp" and keyed["weights"] == {"bits": 4}
    hpz = speed.config_of("deepspeed_hpz", 3, 2, args)
    assert hpz["zero_optimization"].pop("zero_hpz_partition_size") == 2
    assert hpz == plain
    assert plain["zero_optimization"]["stage3_max_reuse_distance"] == 0, "released after forward"


def test_fsdp2_runs_as_shipped_and_with_the_block_of_a_scheme() -> None:
    args = speed.parse_args([])
    block = speed.config_of("sdp4bit", 3, 2, args)["quantized_comm"]
    plain = speed.config_of("deepspeed_plain", 3, 2, args)
    assert speed.config_of("fsdp2", 3, 2, args) == plain | {"fsdp2": "flat"}
    assert speed.config_of("fsdp2_hsdp", 3, 2, args) == plain | {"fsdp2": "hsdp"}
    ours = speed.config_of("fsdp2:sdp4bit", 3, 2, args)
    assert ours == plain | {"fsdp2": "flat", "quantized_comm": block}
    keyed = speed.config_of("fsdp2_hsdp:sdp4bit:gradients.bits=3", 3, 2, args)
    assert keyed["fsdp2"] == "hsdp"
    assert keyed["quantized_comm"] == block | {"gradients": {"bits": 3}}


def test_ddp_runs_with_hooks_of_torch_and_with_the_block_of_a_scheme() -> None:
    args = speed.parse_args([])
    block = speed.config_of("sdp4bit", 0, 2, args)["quantized_comm"]
    plain = speed.config_of("deepspeed_plain", 0, 2, args)
    for scheme, hook in (("ddp", "plain"), ("ddp_bf16", "bf16"), ("ddp_powersgd", "powersgd")):
        assert speed.config_of(scheme, 0, 2, args) == plain | {"ddp": hook}
        assert speed.is_measured(scheme, 0, 1) and not speed.is_measured(scheme, 1, 2)
    ours = speed.config_of("ddp:sdp4bit", 0, 2, args)
    assert ours == plain | {"ddp": "plain", "quantized_comm": block}
    assert not speed.is_measured("sdp4bit", 0, 2)


def test_points_leave_out_schemes_that_they_cannot_have(tmp_path: Path) -> None:
    labels = ["sdp4bit", "deepspeed_hpz", "fsdp2:sdp4bit", "fsdp2_hsdp", "fsdp2_hsdp:sdp4bit"]
    measured = {
        point: [label for label in labels if speed.is_measured(label, *point)]
        for point in ((3, 2), (3, 1), (2, 2))
    }
    assert measured == {(3, 2): labels, (3, 1): ["sdp4bit", "fsdp2:sdp4bit"], (2, 2): ["sdp4bit"]}
    flags = ["--schemes", "sdp4bit", "fsdp2", "--baseline", "fsdp2", "--out", str(tmp_path)]
    with pytest.raises(speed.LabError, match="--baseline fsdp2: ZeRO-2 with 2x2 ranks measures sd"):
        speed.run_point(2, "2x2", speed.parse_args(flags))


@pytest.mark.slow
def test_ddp_is_measured_over_loopback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(speed, "obstacle", lambda: "needs root")
    flags = ["--stages", "0", "--topologies", "2x1", "--blocks", "1", "--warmup", "3"]
    argv = [*flags, *MODEL, "--out", str(tmp_path), "--accumulation", "2"]
    argv += ["--schemes", "ddp:full_precision", "ddp:eden4", "--baseline", "ddp:full_precision"]
    assert speed.main(argv) == 0
    (point,) = json.loads((tmp_path / "speed.json").read_text("utf-8"))["points"]
    rows = {row["scheme"]: row for row in point["rows"]}
    assert list(rows) == ["ddp:full_precision", "ddp:eden4"]
    exact, ours = rows["ddp:full_precision"], rows["ddp:eden4"]
    # A step has two micro-steps, of which the last one sends.
    assert 4 < exact["counted_bytes"] / ours["counted_bytes"] < 8
    assert "Step times: DDP, 2x1 ranks" in (tmp_path / "speed.md").read_text("utf-8")


MODEL = ["--layers", "1", "--width", "64", "--heads", "2", "--seq-len", "16", "--batch", "1"]


@pytest.mark.slow
def test_without_a_lab_one_point_over_loopback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speed, "obstacle", lambda: "needs root")
    flags = ["--stages", "3", "--topologies", "2x1", "--blocks", "1", "--warmup", "1"]
    argv = [*flags, *MODEL, "--out", str(tmp_path)]
    argv += ["--schemes", "full_precision", "qsdp", "fsdp2:qsdp", "fsdp2", "deepspeed_plain"]
    assert speed.main(argv) == 0
    assert "warning: no network lab: needs root" in " ".join(capsys.readouterr().out.split())
    (point,) = json.loads((tmp_path / "speed.json").read_text("utf-8"))["points"]
    assert [row["scheme"] for row in point["rows"]] == ["full_precision", "qsdp", "fsdp2:qsdp"]
    exact, ours, _ = point["rows"]
    assert exact["rate"] == 0 and ours["interface_bytes"] == ours["counted_bytes"]
    assert 1.7 < ours["bytes_bound"] < 2
    assert "| not shaped | " in (tmp_path / "speed.md").read_text("utf-8")


# ---- benchmarks/convergence.py: pairs ----

TINY = [
    "--layers=1", "--width=8", "--heads=1", "--seq-len=8", "--batch=1", "--base-steps=3",
    "--steps=2", "--nodes=2", "--node-size=1", "--pairs=2", "--most-pairs=3", "--interval=0.0001",
]  # fmt: skip


@pytest.mark.parametrize("columns", ["80", "300"])
def test_a_table_folds_no_label_and_no_range(columns: str, capsys, monkeypatch) -> None:
    """Also where the terminal is narrower than the table."""
    monkeypatch.setenv("COLUMNS", columns)
    cells = ["fsdp2:lossless_w_g4", *["1.23 (1.20-1.26)"] * 6]
    report.show(["`scheme`", *["speed up"] * 6], [cells, ["`qsdp`", *cells[1:]]], "a title")
    lines = capsys.readouterr().out.splitlines()
    for label in ("fsdp2:lossless_w_g4", "qsdp"):
        (line,) = [line for line in lines if label in line]
        assert line.count("1.23 (1.20-1.26)") == 6


def test_gaps_are_paired_by_seed() -> None:
    """Seeds differ by 10 %, schemes by 1 % and 3 %: mean 2 %, spread sqrt(2), t of one degree."""
    found = paired.gap({1: 2.266, 0: 2.02, 7: 9.0}, {0: 2.0, 1: 2.2, 5: 1.0})
    assert found.pairs == pytest.approx([1, 3])
    assert found.mean == pytest.approx(2) and found.half_width == pytest.approx(12.706)
    assert paired.student(9) == 2.306 and paired.student(31) == 2.042
    assert paired.student(100_001) == pytest.approx(1.96, abs=1e-3)


@pytest.mark.parametrize(
    ("pairs", "least", "settled"),
    [
        ([0.0, 0.1, 0.0, 0.1], 4, False),  # +-0.09
        ([0.0, 0.02, 0.0, 0.02], 4, True),
        ([0.0, 0.02, 0.0, 0.02], 8, False),  # too few
        ([5.0, 5.1, 5.0, 5.1], 4, True),  # narrow against the gap
    ],
)
def test_an_interval_settles_when_it_is_narrow(
    pairs: list[float], least: int, settled: bool
) -> None:
    assert paired.of_pairs(pairs).is_settled(interval=0.05, least=least) == settled


# ---- a whole study ----


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    """A tiny study of sdp4bit; everything in ``tmp_path``, another text beside its own."""
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 40)
    (tmp_path / "other").write_bytes(b"pack my box with five dozen liquor jugs; " * 40)
    files = [
        f"--out={tmp_path}",
        f"--json={tmp_path / 'found.json'}",
        f"--text={tmp_path / 'text'}",
    ]
    return [*TINY, *files, "--schemes=sdp4bit:min_numel=0"]


def study(argv: list[str]) -> dict[str, Any]:
    """Return the content of its file afterwards."""
    assert convergence.main(argv) == 0
    path = next(word for word in argv if word.startswith("--json=")).removeprefix("--json=")
    return json.loads(Path(path).read_text("utf-8"))


def test_a_study_that_was_interrupted_goes_on_where_it_was(argv, tmp_path: Path) -> None:
    study(argv)
    runs = tmp_path / "runs.jsonl"
    whole = runs.read_text("utf-8").splitlines()
    assert len(whole) == 6  # three pairs of a gap that is never narrow enough
    runs.write_text("\n".join(whole[:4]) + "\n", "utf-8")
    found = study(argv)
    assert runs.read_text("utf-8").splitlines() == whole  # bit by bit
    exact, ours = ([json.loads(r)["held_out"] for r in whole[i::2]] for i in (0, 1))
    gaps = [100 * (a / b - 1) for a, b in zip(ours, exact, strict=True)]
    (row,) = found["rows"]
    assert row["gap"]["pairs"] == pytest.approx(gaps)
    page = (tmp_path / "found.md").read_text("utf-8")
    assert f"| `sdp4bit:min_numel=0` | {row['gap']['mean']:+.3f} % |" in page
    assert str(tmp_path) not in found["command"]


LEARNED = "weights.levels=learned,weights.rounding=nearest,weights.level_steps=[1,2]"


@pytest.mark.parametrize(
    ("sums", "scheme"),
    [("zero3", f"qsdp_w4g4:min_numel=0,{LEARNED}"), ("zero3", "sdp4bit:min_numel=0"),
     ("hsdp", "eden4:min_numel=0"), ("ddp", "powersgd:rank=1")],
)  # fmt: skip
def test_a_run_that_ran_out_of_time_goes_on_with_equal_bits(
    sums: str, scheme: str, argv, tmp_path: Path, capsys
) -> None:
    """A call with no time left takes one step. Levels, node rows, moments and errors are kept."""
    more = [f"--sums={sums}", "--node-size=2", f"--schemes={scheme}"]
    whole = study([*argv, *more, "--pairs=1", "--most-pairs=1"])
    runs = tmp_path / "runs.jsonl"
    expected = runs.read_text("utf-8")
    for path in (runs, *tmp_path.glob("base-*.pt")):
        path.unlink()
    calls = 0
    while convergence.main([*argv, *more, "--pairs=1", "--most-pairs=1", "--limit=0"]):
        calls += 1
        assert "the time is over in the run" in capsys.readouterr().err
    assert calls == 3 + 2 * len(whole["runs"])  # steps of the base model and of the runs
    assert runs.read_text("utf-8") == expected
    assert not list(tmp_path.glob("run-*.pt"))


def test_a_study_from_the_first_step_has_no_base_model(argv, tmp_path: Path) -> None:
    found = study([*argv, "--base-steps=0", "--steps=20"])
    assert found["base"]["curve"] == []
    curve = found["runs"][0]["curve"]
    assert [point["step"] for point in curve] == list(range(5, 21, 5))
    assert curve[-1]["held_out"] == found["runs"][0]["held_out"] < curve[0]["held_out"]
    page = (tmp_path / "found.md").read_text("utf-8")
    assert page.startswith("# What a scheme costs in loss from the first step: ")
    settings = convergence.Settings(base_steps=0, steps=80, lr=1.0)
    rates = [settings.rate(step, 1.0) for step in (0, 1, 2, 79)]
    assert rates == pytest.approx([0.494, 0.97575, 0.963625, 0.03], rel=1e-2)


@pytest.mark.gpu
def test_a_study_on_a_gpu_ends_near_that_of_the_cpu(argv) -> None:
    """Under autocast in bf16, so not with its bits."""
    on_cpu, on_gpu = (study([*argv, f"--device={device}"]) for device in ("cpu", "cuda"))
    for ours, other in zip(on_gpu["runs"], on_cpu["runs"], strict=True):
        assert ours["scheme"] == other["scheme"]
        assert ours["held_out"] == pytest.approx(other["held_out"], rel=0.02)


def test_ways_of_summing_begin_at_one_base_model(argv, tmp_path: Path) -> None:
    digests = set()
    for sums in ("zero3", "hsdp"):
        found = study([*argv, f"--sums={sums}", "--node-size=2", "--pairs=1", "--most-pairs=1"])
        digests.add(found["base"]["sha256"])
    assert len(digests) == len(list(tmp_path.glob("base-*.pt"))) == 1


def test_replicas_need_several_nodes_of_several_ranks(argv, capsys) -> None:
    assert convergence.main([*argv, "--sums=ddp"]) == 1
    assert "sums='ddp' with 2 x 1 ranks: allowed: several nodes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("entry", "more", "message"),
    [
        ("powersgd", [], "'powersgd': allowed: powersgd:rank=R"),
        ("powersgd:rank=0", [], "'powersgd:rank=0': allowed: powersgd:rank=R"),
        ("powersgd:rank=1", ["--sums=zero3"], "--sums zero3 --micro-steps 1: allowed: --sums ddp"),
        ("powersgd:rank=1", ["--micro-steps=2"], "--sums ddp --micro-steps 2: allowed: --sums ddp"),
    ],
)
def test_power_sgd_needs_ddp_and_a_rank(
    entry: str, more: list[str], message: str, argv, capsys
) -> None:
    assert (
        convergence.main([*argv, "--sums=ddp", "--node-size=2", f"--schemes={entry}", *more]) == 1
    )
    assert message in capsys.readouterr().err


def test_sums_that_come_back_in_more_bits_have_less_error(argv) -> None:
    """Under DDP as under HSDP, whose weights are exact with eden4."""
    errors = {}
    schemes = ["eden4:min_numel=0"]
    schemes += [f"eden4:min_numel=0,gradients.returned_bits={bits}" for bits in (4, 8)]
    for sums in ("hsdp", "ddp"):
        more = [f"--sums={sums}", "--node-size=2", "--width=32", "--schemes=" + ",".join(schemes)]
        rows = study([*argv, *more, "--pairs=1", "--most-pairs=1"])["rows"]
        for row, bits in zip(rows, (5, 4, 8), strict=True):
            errors[sums, bits] = row["gradient_error"]
            assert row["weight_bits"] == 0
            assert row["gradient_bits"] == pytest.approx(4.1 + bits + 0.2, abs=0.5)
    assert errors["hsdp", 8] < errors["hsdp", 5] < 0.7 * errors["hsdp", 4]
    assert errors["ddp", 5] == errors["hsdp", 5]
