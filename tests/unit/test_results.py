"""The committed result files: every one is readable, wrong ones are named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from ds_quant.config.presets import CANDIDATES
from ds_quant.config.schema import parse_block
from ds_quant.policy import cost
from ds_quant.tools import measured
from ds_quant.tools.forecast import block_cargo

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
sys.path.append(str(ROOT / "benchmarks"))

import make_report  # noqa: E402
import results_common  # noqa: E402
import results_schema  # noqa: E402


def test_every_committed_result_validates_and_says_where_it_comes_from() -> None:
    for path in RESULTS:
        about = results_schema.load(path).about()
        assert all(about), path
        assert about.date.startswith("20")
        assert about.command.startswith("python benchmarks/")


def changed(tmp_path: Path, **changes: Any) -> Path:
    source = next(path for path in RESULTS if path.stem == "convergence_sdp4bit_cpu")
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(json.loads(source.read_text("utf-8")) | changes), "utf-8")
    return path


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"version": 2}, "version=2: expected 1"),
        ({"kind": "colour"}, "kind='colour': expected one of collectives, convergence"),
        ({"gaps": [{"label": "x"}]}, r"key 'gaps.0.gaps': field required \(and 2 more\)|more"),
        ({"extra": 1}, "key 'extra': no such key"),
        ({"hardware": None}, "key 'hardware'"),
    ],
)
def test_wrong_file_is_refused_with_its_name_and_key(
    changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(results_schema.ResultError, match=rf"changed\.json: .*({expected})"):
        results_schema.load(changed(tmp_path, **changes))


@pytest.mark.parametrize("content", ["", "[1]", '{"a": 1}'])
def test_file_that_is_no_result_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(content, "utf-8")
    with pytest.raises(results_schema.ResultError, match="other.json"):
        results_schema.load(path)


def test_command_line_repeats_lists_and_drops_what_is_unset() -> None:
    arguments = {
        "schemes": ["a", "b:x=[1]"],
        "seeds": [0, 1],
        "override": [["k", True]],
        "lr": 2e-3,
        "text": None,
        "tied": False,
        "quick": True,
        "node_size": 2,
    }
    assert results_common.command_line("s.py", arguments, commas=("schemes",)) == (
        "python s.py --schemes 'a,b:x=[1]' --seeds 0 1 --override k=true --lr 0.002 --quick "
        "--node-size 2"
    )


def test_page_of_results_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert make_report.main(["--check"]) == 0, capsys.readouterr().err


def test_page_says_where_every_file_comes_from_and_stale_ones_are_found(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    assert make_report.main(["--out", str(page)]) == 0
    text = page.read_text("utf-8")
    assert text.count("- Command: ") == text.count("- Hardware: ") == len(RESULTS)
    page.write_text(text + "x", "utf-8")
    assert make_report.main(["--out", str(page), "--check"]) == 1


README = (ROOT / "README.md").read_text("utf-8")
CHOOSING = (ROOT / "docs" / "choosing.md").read_text("utf-8")


def result(name: str) -> Any:
    return results_schema.load(ROOT / "benchmarks" / "results" / f"{name}.json")


def table(page: str, header: str) -> list[list[str]]:
    """Cells of the table whose first line begins with ``header``, that line first."""
    lines = page.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(header))
    rows = [[cell.strip() for cell in lines[start].strip("|").split("|")]]
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line[1:-1].split("|")])
    return rows


def speed_ups_in_the_readme_are_those_of_the_result_file() -> None:
    """The table `| Mbit/s | stage |`: speed-up, in brackets what the bytes allow."""
    found = {}
    for name in ("speed_2x2_cpu", "speed_2x2_fast_links_cpu"):  # more blocks: it counts
        for point in result(name).points:
            found |= {(point.stage, row.rate, row.scheme): row for row in point.rows}
    header, *rows = table(README, "| Mbit/s | stage |")
    schemes = [cell.strip("`") if "`" in cell else "deepspeed_plain" for cell in header[2:]]
    checked = 0
    for rate, stage, *cells in rows:
        place = int(stage.removeprefix("ZeRO-")), 0.0 if rate == "not shaped" else float(rate)
        for scheme, cell in zip(schemes, cells, strict=True):
            row = found[(*place, scheme)]
            expected = f"{row.speedup:.2f}"
            bound = f" ({row.bytes_bound:.2f})" if "(" in cell else ""
            assert cell == expected + bound, f"{stage}, {rate}: {scheme} is {expected}{bound}"
            checked += 1
    assert checked >= 20


def gaps(name: str) -> dict[str, tuple[str, str]]:
    """Mean gap and 95 % interval by label, as the pages show them."""
    return {
        gap.label: (f"{gap.mean:+.2f} %", f"+-{gap.half_width:.2f}") for gap in result(name).gaps
    }


def gaps_of_the_schemes_are_those_of_the_result_file() -> None:
    given, found = result("convergence_sdp4bit_cpu").arguments, gaps("convergence_sdp4bit_cpu")
    away = 1 - given["node_size"] / given["world"]  # what enters a node of the volume by formula
    rows = table(CHOOSING, "| scheme | mean gap |")[1:]
    assert len(rows) == len(found) - 1, "all but the baseline"
    for name, *cells in rows:
        bill = cost.bill(
            parse_block({"scheme": name.strip("`")}).to_scheme(), given["stage"],
            block_cargo(given["width"], dtype=torch.bfloat16), ranks=given["world"],
            node_size=given["node_size"], gradient_dtype=torch.bfloat16,
        )  # fmt: skip
        between = f"{away * bill.step_bytes(given['stage']):.2f}"
        assert tuple(cells) == (*found[name.strip("`")], between), name


def gaps_by_group_size_are_those_of_the_result_file() -> None:
    found = gaps("convergence_sdp4bit_groups_cpu")
    default = parse_block({"scheme": "qw4"}).to_scheme().weights.group_size
    rows = table(CHOOSING, "| scheme | group size |")[1:]
    assert len(rows) == sum(label.startswith("qw4") for label in found)
    for name, size, *cells in rows:
        plain = name.strip("`")
        label = plain if int(size) == default else f"{plain}:weights.group_size={size}"
        assert tuple(cells) == found[label]


QSDP = {
    "8 / 8 (`qsdp`)": "qsdp:weights.bits=8,gradients.bits=8",
    "6 / 4": "qsdp:weights.bits=6,gradients.bits=4",
    "5 / 4": "qsdp:weights.bits=5,gradients.bits=4",
    "4 / 4, random shift (`qsdp_w4g4`)": "qsdp:weights.bits=4,gradients.bits=4",
    "4 / 4, nearest": "qsdp_w4g4:weights.rounding=nearest",
    "4 / 4, stochastic": "qsdp_w4g4:weights.rounding=stochastic",
}


def gaps_of_qsdp_are_those_of_the_result_file() -> None:
    found = gaps("convergence_qsdp_cpu")
    rows = table(CHOOSING, "| weights / gradients |")[1:]
    assert [row[0] for row in rows] == list(QSDP)
    for name, *cells in rows:
        learned = next((v for k, v in found.items() if k.startswith(QSDP[name] + ",w")), ("", ""))
        assert tuple(cells) == (*found[QSDP[name]], *learned), name


def figures_in_running_text_are_those_of_the_result_files() -> None:
    found = gaps("convergence_qsdp_cpu") | gaps("convergence_sdp4bit_cpu")
    found["qsdp"] = found[QSDP["8 / 8 (`qsdp`)"]]
    for scheme in ("qsdp", "sdp4bit"):
        assert f"`{scheme}` {' '.join(found[scheme])}" in README
    (w4g4,) = (s for s in result("demo_zero3_cpu").summary if s.label == "qsdp_w4g4")
    assert f"`qsdp_w4g4` loses\n{w4g4.gap_percent:.2f} %" in CHOOSING
    runs = [run for run in result("errors_cpu").runs if run.scheme == "sdp4bit"]
    later = sorted(fmean(run.ratio[len(run.ratio) // 2 :]) for run in runs)
    assert f"{later[0]:.2f} to {later[-1]:.2f} times as far" in CHOOSING
    for run in runs:
        errors = {k: fmean(step[k] for step in run.gradients) for k in ("tlq_hs", "zeropp")}
        assert 5.5 < errors["zeropp"] / errors["tlq_hs"] < 8.5, "six to eight times"


def errors_of_gaussian_levels_are_those_of_the_result_file() -> None:
    rows, said = result("gradient_errors_cpu").rows, " ".join(CHOOSING.split())
    alone = {name: fmean(row.alone[name] for row in rows) for name in rows[0].alone}
    assert alone["eden4"] < 0.010 and alone["eden3"] < 0.038 and alone["eden2"] < 0.135
    figures = f"{alone['eden4']:.4f}, {alone['eden3']:.3f} and {alone['eden2']:.3f}"
    assert f"a message loses {figures} of its energy" in said
    assert all(s.common <= row.alone[s.scheme] for row in rows for s in row.sums)

    def ratios(low: float, high: float, *schemes: str, steps: range) -> str:
        """Errors with common signs over those with own ones, of sums over eight nodes."""
        found = [
            s.common / s.own
            for row in rows
            if low < row.cosine < high and row.step in steps
            for s in row.sums
            if s.nodes == 8 and s.scheme in schemes
        ]
        return f"{min(found):.1f} to {max(found):.1f}"

    every, later = ("eden4", "eden3", "eden2"), range(100, 10_000)
    assert f"is {ratios(0.1, 0.2, *every, steps=later)} times as large" in said
    large = [ratios(0.5, 0.8, name, steps=later) for name in ("eden4", "eden2")]
    assert f"{large[0]} (4 bits) and {large[1]} times (2 bits) from 0.56 to 0.77" in said
    first = ratios(0.8, 1.0, *every, steps=range(100)).split(" to ")
    assert f"{round(float(first[0]))} to {round(float(first[1]))} times in the first steps" in said


def predictions_are_as_close_as_the_page_says() -> None:
    errors = []
    for path in RESULTS:
        if path.stem.startswith("speed_"):
            errors += [abs(point.error) for point in measured.compare(path)[0]]
    assert len(errors) > 50 and max(errors) < measured.CLOSE
    said = f"at all {len(errors)} points (mean error {100 * fmean(errors):.1f} %, largest"
    assert f"{said} {100 * max(errors):.1f} %" in " ".join(CHOOSING.split())


def at_the_slow_end_every_scheme_comes_close_to_what_its_bytes_allow() -> None:
    for point in result("speed_2x2_cpu").points:
        for row in point.rows:
            if row.rate == 10:
                assert row.speedup >= 0.9 * row.bytes_bound, (point.title, row.scheme)


def exposed_communication_is_that_of_the_result_file() -> None:
    found = {(row.scheme, row.rate): f"{row.ratio:.2f}" for row in result("overlap_cpu").rows}
    said = " ".join(CHOOSING.split())
    assert f"`sdp4bit` leaves {found['sdp4bit', 50]} of the communication exposed" in said
    assert f"step computes, {found['qsdp', 50]}, and {found['qsdp', 200]} at 200 Mbit/s" in said


def autotune_took_the_best_without_a_rate_limit_or_one_close_to_it() -> None:
    worst = 1.0
    for point in result("speed_autotune_cpu").points:
        speedup = {row.scheme: row.speedup for row in point.rows}
        taken = point.lines["autotune"].split(" on ")[0]
        assert (taken == "sdp4bit") == (point.stage == 3), point.title
        worst = max(worst, *(speedup[name] / speedup[taken] for name in CANDIDATES))
    assert worst < 1.05
    said = " ".join(CHOOSING.split())
    assert f"missed the best candidate by {100 * (worst - 1):.0f} % at most" in said


def test_figures_on_the_pages_are_those_of_the_result_files() -> None:
    speed_ups_in_the_readme_are_those_of_the_result_file()
    gaps_of_the_schemes_are_those_of_the_result_file()
    gaps_by_group_size_are_those_of_the_result_file()
    gaps_of_qsdp_are_those_of_the_result_file()
    figures_in_running_text_are_those_of_the_result_files()
    errors_of_gaussian_levels_are_those_of_the_result_file()
    predictions_are_as_close_as_the_page_says()
    at_the_slow_end_every_scheme_comes_close_to_what_its_bytes_allow()
    exposed_communication_is_that_of_the_result_file()
    autotune_took_the_best_without_a_rate_limit_or_one_close_to_it()
