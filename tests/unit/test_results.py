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
from ds_quant.tools.forecast import block_cargo

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
sys.path.append(str(ROOT / "benchmarks"))

import convergence_page  # noqa: E402
import paired  # noqa: E402
import report  # noqa: E402
import sections  # noqa: E402


def test_every_committed_result_validates_and_says_where_it_comes_from() -> None:
    for path in RESULTS:
        found = json.loads(path.read_text("utf-8"))
        script = ROOT / found["command"].split()[1]
        assert found["command"].startswith("python benchmarks/") and script.is_file(), path
        assert found["created"].startswith("20") and found["arguments"], path
        assert found["versions"]["torch"] and found["hardware"]["cpu"], path


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
    assert report.command_line("s.py", arguments, commas=("schemes",)) == (
        "python s.py --schemes 'a,b:x=[1]' --seeds 0 1 --override k=true --lr 0.002 --quick "
        "--node-size 2"
    )


def test_pages_of_the_results_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert sections.main(["--check"]) == 0, capsys.readouterr().err


def test_pages_are_written_beside_their_files_and_stale_ones_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.txt"
    page.write_text(f"# By hand\n\n{sections.MARK}old\n", "utf-8")
    (tmp_path / "levels.json").write_bytes((sections.RESULTS / "levels_cpu.json").read_bytes())
    (tmp_path / "convergence.md").write_text("# Its own\n", "utf-8")
    arguments = ["--results", str(tmp_path), "--page", str(page)]
    assert sections.main([*arguments, "--check"]) == 1
    assert sections.main(arguments) == 0
    assert sections.main([*arguments, "--check"]) == 0
    text = (tmp_path / "levels.md").read_text("utf-8")
    assert text.startswith("# Learned levels\n") and "\n- Command: `python benchmarks/" in text
    assert page.read_text("utf-8") == (
        f"# By hand\n\n{sections.MARK}\n- [Its own](../benchmarks/results/convergence.md)\n"
        "- [Learned levels](../benchmarks/results/levels.md)\n"
    )
    (tmp_path / "levels.md").write_text(text + "x", "utf-8")
    assert sections.main([*arguments, "--check"]) == 1


README = (ROOT / "README.md").read_text("utf-8")
CHOOSING = (ROOT / "docs" / "choosing.md").read_text("utf-8")


class Keys(dict):
    """A JSON object whose keys are attributes, too."""

    __getattr__ = dict.__getitem__


def result(name: str) -> Any:
    return json.loads((sections.RESULTS / f"{name}.json").read_text("utf-8"), object_hook=Keys)


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
    for name in ("speed_2x2_fast_links_cpu", "speed_2x2_cpu"):  # more schemes: it counts
        for point in result(name).points:
            found |= {(point.stage, row.rate, row.scheme): row for row in point.rows}
    header, *rows = table(README, "| Mbit/s | stage |")
    schemes = [cell.strip("`") if "`" in cell else "deepspeed_plain" for cell in header[2:]]
    checked = 0
    for rate, stage, *cells in rows:
        place = int(stage.removeprefix("ZeRO-")), 0.0 if rate == "not shaped" else float(rate)
        for scheme, cell in zip(schemes, cells, strict=True):
            if not cell:
                assert (*place, scheme) not in found
                continue
            row = found[(*place, scheme)]
            expected = f"{row.speedup:.2f}"
            bound = f" ({row.bytes_bound:.2f})" if "(" in cell else ""
            assert cell == expected + bound, f"{stage}, {rate}: {scheme} is {expected}{bound}"
            checked += 1
    assert checked >= 30
    rows = {r.scheme: r for r in result("speed_kept_2x2_cpu").points[0].rows if r.rate == 50}
    kept = [f"{rows[scheme].speedup:.2f}" for scheme in ("qsdp", "zeropp", "sdp4bit")]
    said = f"at 50 Mbit/s {kept[0]}, {kept[1]} and {kept[2]} instead of"
    assert said in " ".join(README.split())


def table_of_results_is_that_of_the_files_and_formulas() -> None:
    """The first table of docs/results.md."""
    shown = {row.scheme: row for row in result("speed_2x2_cpu").points[0].rows if row.rate == 10}
    faster = {row.scheme: row for row in result("speed_2x2_cpu").points[0].rows if row.rate == 50}
    assert result("speed_2x2_cpu").points[0].stage == 3
    gap = {
        row.scheme: f"{row.gap.mean:+.2f} % +-{row.gap.half_width:.2f}"
        for row in result("convergence").rows
        if row.gap.half_width is not None
    }
    page = (ROOT / "docs" / "results.md").read_text("utf-8")
    rows = table(page, "| scheme | B/param/step, k = 1 |")[1:]
    assert len(rows) > 10
    for name, *cells in rows:
        scheme = name.strip("`")
        bill = cost.bill(
            parse_block({"scheme": scheme}).to_scheme(), 3,
            block_cargo(4096, dtype=torch.bfloat16), ranks=16, node_size=8,
            gradient_dtype=torch.bfloat16,
        )  # fmt: skip
        speed = [
            f"{rows[scheme].speedup:.2f}" if scheme in rows else "" for rows in (shown, faster)
        ]
        nbytes = [f"{bill.step_bytes(3, micro_steps=k):.2f}" for k in (1, 8)]
        assert cells == [*nbytes, *speed, gap.get(scheme, ""), f"{bill.memory:.2f}"], name


def pages_of_the_convergence_study_are_those_of_its_files() -> None:
    for path in sections.RESULTS.glob("convergence*.json"):
        page = path.with_suffix(".md").read_text("utf-8")
        assert page == convergence_page.page(result(path.stem), path.name), path


def losses_in_the_readme_are_those_of_the_result_file() -> None:
    gap = {row.scheme: f"{row.gap.mean:.2f} %" for row in result("convergence").rows}
    assert (
        f"rises by {gap['qsdp']} with `qsdp`, {gap['sdp4bit']} with `sdp4bit`, "
        f"{gap['lossless_g3']} with `lossless_g3` and {gap['zeropp']} with `zeropp`"
    ) in " ".join(README.split())


def losses_in_other_settings_are_those_of_the_result_files() -> None:
    """The table of docs/results.md, a file per column."""
    files = ("", "_k8", "_larger", "_3m", "_tuning", "_lora")
    found = [_gaps(f"convergence{name}") for name in files]
    page = (ROOT / "docs" / "results.md").read_text("utf-8")
    rows = table(page, "| scheme | 0.14 M, k = 1 |")[1:]
    assert len(rows) >= 5
    for name, *cells in rows:
        assert cells == [gaps.get(name.strip("`"), "") for gaps in found], name
    assert f"with k = 4 `sdp4bit` has {_gaps('convergence_k4')['sdp4bit']}" in " ".join(
        page.split()
    )
    sizes = [result(f"convergence{name}").parameters for name in ("", "_larger", "_3m")]
    assert [round(numel / 1e6, 2) for numel in sizes] == [0.14, 0.48, 3.3]
    assert round(result("convergence_3m").base.curve[-1].held_out, 2) == 1.72
    few = next(row.gap.pairs for row in result("convergence_10m").rows if row.scheme == "sdp4bit")
    said = f"three pairs of `sdp4bit` lie between {min(few):+.2f} and {max(few):+.2f} %"
    assert len(few) == 3 and said in " ".join(page.split())


def repeated_losses_are_those_of_the_result_file() -> None:
    """The second half of the pairs against the first one: docs/results.md."""
    pairs = {row.scheme: row.gap.pairs for row in result("convergence").rows}
    said = []
    for scheme in ("sdp4bit", "lossless_g3"):
        first, again = (paired.of_pairs(half) for half in (pairs[scheme][:8], pairs[scheme][8:]))
        assert abs(again.mean - first.mean) < min(again.half_width, first.half_width)
        before, now = (f"{gap.mean:+.3f} % +-{gap.half_width:.3f}" for gap in (first, again))
        said.append(f"{now} for `{scheme}`, after {before}")
    page = " ".join((ROOT / "docs" / "results.md").read_text("utf-8").split())
    assert f"Eight pairs with other data gave {said[0]}, and {said[1]}." in page


def _gaps(name: str) -> dict[str, str]:
    return {
        row.scheme.removesuffix(":min_numel=256"): (
            f"{row.gap.mean:+.3f} % +-{row.gap.half_width:.3f}"
        )
        for row in result(name).rows
        if row.gap.half_width is not None
    }


def losses_of_fine_tuning_are_those_of_the_result_file() -> None:
    found = result("convergence_tuning")
    assert found.tuning.lr == 2e-5 and all(len(row.gap.pairs) >= 5 for row in found.rows)
    gap = {row.scheme: f"{row.gap.mean:.3f} %" for row in found.rows}
    costs = f"`sdp4bit` costs {gap['sdp4bit']}, `lossless_g3` {gap['lossless_g3']} and"
    assert f"{costs} `lossless_g2` {gap['lossless_g2']}." in " ".join(CHOOSING.split())


def figures_in_running_text_are_those_of_the_result_files() -> None:
    runs = [run for run in result("errors_cpu").runs if run.scheme == "sdp4bit"]
    later = sorted(fmean(run.ratio[len(run.ratio) // 2 :]) for run in runs)
    assert f"{later[0]:.2f} to {later[-1]:.2f} times as far" in CHOOSING
    for run in runs:
        errors = {k: fmean(step[k] for step in run.gradients) for k in ("tlq_hs", "zeropp")}
        assert 5.5 < errors["zeropp"] / errors["tlq_hs"] < 8.5, "six to eight times"


def errors_of_gaussian_levels_are_those_of_the_result_file() -> None:
    rows, said = result("gradient_errors_cpu")["rows"], " ".join(CHOOSING.split())
    alone = {name: fmean(row["alone"][name] for row in rows) for name in rows[0]["alone"]}
    assert alone["eden4"] < 0.010 and alone["eden3"] < 0.038 and alone["eden2"] < 0.135
    figures = f"{alone['eden4']:.4f}, {alone['eden3']:.3f} and {alone['eden2']:.3f}"
    assert f"a message loses {figures} of its energy" in said
    assert all(s["common"] <= row["alone"][s["scheme"]] for row in rows for s in row["sums"])

    g = {row.scheme: f"{row.gap.mean:.3f} %" for row in result("convergence").rows}
    assert (
        f"rises by {g['eden4']} with `eden4`, {g['eden3']} with `eden3` and {g['eden2']} with "
        f"`eden2`, where it does by {g['sdp4bit']} with `sdp4bit`; with exact weights "
        f"(`lossless_g4`, `_g3`, `_g2`) by {g['lossless_g4']}, {g['lossless_g3']} and "
        f"{g['lossless_g2']}."
    ) in said

    def ratios(low: float, high: float, *schemes: str, steps: range) -> str:
        """Errors with common signs over those with own ones, of sums over eight nodes."""
        found = [
            s["common"] / s["own"]
            for row in rows
            if low < row["cosine"] < high and row["step"] in steps
            for s in row["sums"]
            if s["nodes"] == 8 and s["scheme"] in schemes
        ]
        return f"{min(found):.1f} to {max(found):.1f}"

    every, later = ("eden4", "eden3", "eden2"), range(100, 10_000)
    assert f"is {ratios(0.1, 0.2, *every, steps=later)} times as large" in said
    large = [ratios(0.5, 0.8, name, steps=later) for name in ("eden4", "eden2")]
    assert f"{large[0]} (4 bits) and {large[1]} times (2 bits) from 0.56 to 0.77" in said
    first = ratios(0.8, 1.0, *every, steps=range(100)).split(" to ")
    assert f"{round(float(first[0]))} to {round(float(first[1]))} times in the first steps" in said


def at_the_slow_end_every_scheme_comes_close_to_what_its_bytes_allow() -> None:
    for point in result("speed_2x2_cpu").points:
        for row in point.rows:
            if row.rate == 10:
                assert row.speedup >= 0.9 * row.bytes_bound, (point.title, row.scheme)


def speed_ups_with_accumulation_are_those_of_the_result_file() -> None:
    (point,) = result("speed_accumulation_2x2_cpu").points
    rows = {row.scheme: row for row in point.rows if row.rate == 50}
    shipped, often, kept, zeropp, each, once, g3 = (
        f"{rows[scheme].speedup:.2f}"
        for scheme in (
            "deepspeed_plain", "full_precision:gradients.cross=micro_step",
            "full_precision:node_shard=true", "zeropp", "sdp4bit:gradients.cross=micro_step",
            "sdp4bit", "lossless_g3",
        )
    )  # fmt: skip
    assert (
        f"DeepSpeed as shipped {shipped}, `full_precision` crossing in every micro-step {often}, "
        f"with a node shard {kept}, `zeropp` {zeropp}, "
        f"`sdp4bit` crossing in every micro-step {each}, once per step {once}, `lossless_g3` {g3}."
    ) in " ".join(CHOOSING.split())
    assert min(rows[name].bytes_bound for name in ("sdp4bit", "lossless_g3")) > 30


def on_a_slow_link_crossing_once_gains_what_its_bytes_allow() -> None:
    (point,) = result("speed_accumulation_slow_2x2_cpu").points
    rows = {row.scheme: row for row in point.rows if row.rate == 10}
    free = {row.scheme: row for row in point.rows if row.rate == 0}
    often = "sdp4bit:gradients.cross=micro_step"
    kept, zeropp, each, once, g3 = (
        f"{rows[scheme].speedup:.2f}"
        for scheme in ("full_precision:node_shard=true", "zeropp", often, "sdp4bit", "lossless_g3")
    )
    each_waits, once_waits = (
        rows[scheme].seconds - free[scheme].seconds for scheme in (often, "sdp4bit")
    )
    gained = each_waits / once_waits
    allowed = rows[often].interface_bytes / rows["sdp4bit"].interface_bytes
    assert gained > 0.9 * allowed
    said = " ".join(CHOOSING.split())
    assert (
        f"a node shard gives {kept}, `zeropp` {zeropp}, `sdp4bit` crossing in every micro-step "
        f"{each}, once per step {once}, `lossless_g3` {g3}."
    ) in said
    assert (
        f"waits {each_waits:.2f} s if it crosses in every micro-step and {once_waits:.2f} s if it "
        f"crosses once: {gained:.2f} times less, where the bytes allow {allowed:.2f}."
    ) in said


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
    table_of_results_is_that_of_the_files_and_formulas()
    pages_of_the_convergence_study_are_those_of_its_files()
    losses_in_the_readme_are_those_of_the_result_file()
    losses_in_other_settings_are_those_of_the_result_files()
    repeated_losses_are_those_of_the_result_file()
    losses_of_fine_tuning_are_those_of_the_result_file()
    figures_in_running_text_are_those_of_the_result_files()
    errors_of_gaussian_levels_are_those_of_the_result_file()
    at_the_slow_end_every_scheme_comes_close_to_what_its_bytes_allow()
    exposed_communication_is_that_of_the_result_file()
    speed_ups_with_accumulation_are_those_of_the_result_file()
    on_a_slow_link_crossing_once_gains_what_its_bytes_allow()
    autotune_took_the_best_without_a_rate_limit_or_one_close_to_it()
