"""benchmarks/convergence.py: statistics of pairs, the order of runs, going on, and the page."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import convergence  # noqa: E402
import convergence_page  # noqa: E402
import paired  # noqa: E402
from schemes import parse_schemes  # noqa: E402

TINY = [
    "--layers=1", "--width=8", "--heads=1", "--seq-len=8", "--batch=1", "--base-steps=3",
    "--steps=2", "--nodes=2", "--node-size=1", "--pairs=2", "--most-pairs=3", "--interval=0.0001",
]  # fmt: skip


# ---- pairs ----


def test_gaps_are_paired_by_seed() -> None:
    """Seeds differ by 10 %, schemes by 1 % and 3 %: mean 2 %, spread sqrt(2), t of one degree."""
    found = paired.gap({1: 2.266, 0: 2.02, 7: 9.0}, {0: 2.0, 1: 2.2, 5: 1.0})
    assert found.pairs == pytest.approx([1, 3])
    assert found.mean == pytest.approx(2) and found.half_width == pytest.approx(12.706)


def test_one_pair_has_no_interval_and_none_no_gap() -> None:
    assert paired.of_pairs([0.5]) == paired.Gap(pairs=[0.5], mean=0.5, half_width=None)
    assert paired.gap({0: 1.0}, {1: 1.0}) is None


def test_students_t_falls_to_that_of_the_normal_distribution() -> None:
    assert paired.student(9) == 2.306 and paired.student(31) == 2.042
    assert paired.student(61) == pytest.approx(2.0003, abs=1e-3)
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


# ---- the order of runs ----


def order(tmp_path: Path, losses: dict[str, list[float]], **given: float) -> list[tuple[str, int]]:
    """Runs in their order, if every run of a scheme finds these losses one after the other."""
    args = {"constant": False, "pairs": 2, "most_pairs": 3, "interval": 0.05} | given
    ledger, found = convergence.Ledger(tmp_path / "runs.jsonl", "study"), []
    labels = [label for label in losses if label != convergence.BASELINE]
    for label, seed in convergence.missing_runs(ledger, labels, argparse.Namespace(**args)):
        found.append((label, seed))
        loss = losses[label][seed]
        ledger.add({"scheme": label, "seed": seed, "constant": False, "held_out": loss})
    return found


def test_every_scheme_gets_the_least_number_then_the_widest_interval_one_more(
    tmp_path: Path,
) -> None:
    losses = {
        "full_precision": [2.0] * 4,
        "narrow": [2.0002, 2.0001, 2.0],
        "wide": [2.0, 2.1, 2.0],
        "wider": [2.0, 2.5, 2.0],
    }
    assert order(tmp_path, losses) == [
        ("full_precision", 0), ("narrow", 0), ("full_precision", 1), ("narrow", 1),
        ("wide", 0), ("wide", 1), ("wider", 0), ("wider", 1),
        ("full_precision", 2), ("wider", 2), ("wide", 2),
    ]  # fmt: skip
    assert order(tmp_path, losses) == []  # all of it is in the file
    assert order(tmp_path, losses, pairs=3) == [("narrow", 2)]


def test_runs_of_another_study_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    run = {"scheme": "qsdp", "seed": 0, "constant": False, "held_out": 2.0}
    convergence.Ledger(path, "one").add(run)
    assert convergence.Ledger(path, "one").runs == [run]
    assert convergence.Ledger(path, "other").runs == []


def test_the_page_says_which_order_differs_from_the_papers() -> None:
    ours = {name: {"mean": mean} for name, mean in {"qwd": 0.0, "tlq": 0.2, "sdp4bit": 0.3}.items()}
    said = convergence_page.directions(ours)
    assert "Of 3 pairs" in said and "2 are in the paper's order" in said
    assert said.endswith("125 M; not `tlq` and `sdp4bit`.")


def test_a_plot_is_drawn_of_many_schemes_and_named_on_the_page(tmp_path: Path) -> None:
    names = ("qsdp", "sdp4bit", "zeropp", "eden4", "eden3", "eden2", "qwd", "tlq")
    gap = {"mean": 0.1, "half_width": 0.2, "pairs": [0.1]}
    row = {"gap": gap, "weight_bits": 4.0, "gradient_bits": 4.0}
    rows = [{"scheme": name, **row} for name in names]
    path = tmp_path / "found.png"
    convergence_page.plot({"rows": rows[1:]}, path)
    assert not path.exists(), "few are read faster in the table"
    convergence_page.plot({"rows": rows}, path)
    assert path.read_bytes().startswith(b"\x89PNG")


# ---- a whole study ----


def test_a_study_that_was_interrupted_goes_on_where_it_was(tmp_path: Path, capsys) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 40)
    argv = [*TINY, f"--text={text}", f"--out={tmp_path}", "--schemes=sdp4bit"]
    argv = [*argv, f"--json={tmp_path / 'found.json'}"]
    assert convergence.main(argv) == 0
    runs = tmp_path / "runs.jsonl"
    whole = runs.read_text("utf-8").splitlines()
    assert len(whole) == 6  # three pairs of a gap that is never narrow enough
    runs.write_text("\n".join(whole[:4]) + "\n", "utf-8")
    assert convergence.main(argv) == 0
    assert runs.read_text("utf-8").splitlines() == whole  # bit by bit
    assert convergence.main([*argv, "--constant"]) == 0
    assert convergence.main([*argv, "--constant", "--base-steps=1"]) == 0
    assert convergence.main([*argv, "--report"]) == 0
    found = json.loads((tmp_path / "found.json").read_text("utf-8"))
    (row,), (both,), (former,) = (found[k] for k in ("rows", "constant", "from_first_weights"))
    exact, ours = ([json.loads(r)["held_out"] for r in whole[i::2]] for i in (0, 1))
    gaps = [100 * (a / b - 1) for a, b in zip(ours, exact, strict=True)]
    assert row["gap"]["pairs"] == pytest.approx(gaps)
    assert both["decayed"] == row["gap"] != both["held_out"] != former["held_out"]
    page = (tmp_path / "found.md").read_text("utf-8")
    assert page == convergence_page.page(found, "found.json")
    assert f"| `sdp4bit` | {row['gap']['mean']:+.3f} % |" in page


def test_fine_tuning_goes_on_from_the_weights_on_another_text(tmp_path: Path, capsys) -> None:
    text, other = tmp_path / "text", tmp_path / "other"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 40)
    other.write_bytes(b"pack my box with five dozen liquor jugs; " * 40)
    argv = [*TINY, f"--text={text}", f"--out={tmp_path}", "--schemes=sdp4bit"]
    argv = [*argv, f"--json={tmp_path / 'found.json'}"]
    assert convergence.main([*argv, f"--tune={other}", "--tune-lr=0.003"]) == 0
    found = json.loads((tmp_path / "found.json").read_text("utf-8"))
    exact = [run["held_out"] for run in found["runs"] if run["scheme"] == "full_precision"]
    assert max(exact) < found["tuning"]["before"], "it learns the other text"
    assert found["tuning"]["text"] != found["text"]
    assert convergence.main(argv) == 0, "runs of a study that does not tune are others"
    went_on = json.loads((tmp_path / "found.json").read_text("utf-8"))
    assert "tuning" not in went_on and went_on["base"] == found["base"]
    assert not {run["held_out"] for run in went_on["runs"]} & set(exact)


def test_adapters_learn_and_the_base_model_stays(tmp_path: Path, capsys) -> None:
    text, other = tmp_path / "text", tmp_path / "other"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 40)
    other.write_bytes(b"pack my box with five dozen liquor jugs; " * 40)
    argv = [*TINY, f"--text={text}", f"--out={tmp_path}", "--schemes=sdp4bit:min_numel=0"]
    argv = [*argv, f"--json={tmp_path / 'found.json'}", "--lora=2"]
    with pytest.raises(SystemExit):
        convergence.main(argv)
    assert "--lora=2: allowed: with --tune FILE" in capsys.readouterr().err
    assert convergence.main([*argv, f"--tune={other}", "--tune-lr=0.03"]) == 0
    found = json.loads((tmp_path / "found.json").read_text("utf-8"))
    losses = {run["scheme"]: run["held_out"] for run in found["runs"]}
    assert max(losses.values()) < found["tuning"]["before"] and len(set(losses.values())) == 2
    assert "--lora 2" in found["command"] and "adapters (rank 2)" in capsys.readouterr().out


def test_adapters_are_all_that_is_trained() -> None:
    _, settings = convergence.parse_args(TINY)
    (entry,) = parse_schemes("qsdp")
    base = {"master": settings.simulation(entry, 0).master.detach() + 0.5}
    simulation = convergence.tuned(settings, base, entry, 0, convergence.Tuning(lr=0.1, lora=2))
    before = [w.clone() for w in simulation.exact_weights()]
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    simulation.set_rate(0.1)
    simulation.step(lambda micro_step, rank: (tokens, tokens + 1))
    names = [name for name, _ in simulation.module.named_parameters()]
    for name, old, new in zip(names, before, simulation.exact_weights(), strict=True):
        assert torch.equal(old, new) != (".weight.0." in name), name
    weights = dict(zip(names, before, strict=True))
    first = weights["embedding.weight"].float()
    assert torch.equal(first, base["master"][: first.numel()].bfloat16().float())


def test_a_wrong_scheme_or_text_is_refused_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*TINY, f"--out={tmp_path}", f"--text={tmp_path / 'none'}"]
    assert convergence.main(argv) == 1
    assert "none" in capsys.readouterr().err
    text = tmp_path / "text"
    text.write_bytes(b"abc " * 400)
    argv = [*TINY, f"--out={tmp_path}", f"--text={text}"]
    assert convergence.main([*argv, "--schemes=qsdp:weights.bits=9"]) == 1
    assert "weights.bits" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        convergence.main([*argv, "--steps=0"])
    assert "--steps=0: allowed: above 0" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.pt"))


def test_every_scheme_of_a_study_is_a_valid_configuration() -> None:
    for entry in parse_schemes(convergence.SCHEMES):
        convergence.Settings().scheme(entry, seed=3)
