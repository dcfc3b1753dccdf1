"""The committed result files: readable, up to date, and what README and docs quote of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import sections
import torch
import yaml

from ds_quant.config.schema import parse_block
from ds_quant.policy import cost
from ds_quant.policy.model import block_param_specs

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/results.md", "docs/choosing.md", "docs/fsdp2.md")
QUOTED = Path(__file__).parent / "golden" / "quoted.yaml"
README, RESULTS, CHOOSING, FSDP2 = ((ROOT / page).read_text("utf-8") for page in PAGES)


class Keys(dict):
    """A JSON object whose keys are attributes, too."""

    __getattr__ = dict.__getitem__


def result(name: str) -> Any:
    """A file, with the names that schemes have now."""
    text = (sections.RESULTS / f"{name}.json").read_text("utf-8")
    return json.loads(text.replace("lossless_g", "lossless_w_g"), object_hook=Keys)


def test_every_committed_result_says_where_it_comes_from() -> None:
    for path in sections.RESULTS.glob("*.json"):
        found = result(path.stem)
        assert found.command.startswith("python benchmarks/"), path
        assert found.created.startswith("20") and found.arguments, path
        assert found.versions.torch and found.hardware.cpu, path


def test_pages_are_up_to_date_and_stale_ones_are_found(tmp_path: Path, capsys) -> None:
    """That of a finished study, whose script is gone, stays as it is."""
    assert sections.main(["--check"]) == 0, capsys.readouterr().err
    page = tmp_path / "page.txt"
    page.write_text(f"# By hand\n\n{sections.MARK}old\n", "utf-8")
    for name in ("peer_suite_cpu.json", "overlap_cpu.json", "overlap_cpu.md"):
        (tmp_path / name).write_bytes((sections.RESULTS / name).read_bytes())
    arguments = ["--results", str(tmp_path), "--page", str(page)]
    codes = [sections.main([*arguments, *check]) for check in (["--check"], [], ["--check"])]
    assert codes == [1, 0, 0]
    written = tmp_path / "peer_suite_cpu.md"
    text = written.read_text("utf-8")
    assert text.startswith("# DeepSpeed's own tests\n") and "\n- Command: `python bench" in text
    assert page.read_text("utf-8") == (
        f"# By hand\n\n{sections.MARK}\n"
        "- [Exposed communication](../benchmarks/results/overlap_cpu.md)\n"
        "- [DeepSpeed's own tests](../benchmarks/results/peer_suite_cpu.md)\n"
    )
    written.write_text(text + "x", "utf-8")
    assert sections.main([*arguments, "--check"]) == 1


# ---- tables ----


def table(page: str, header: str) -> list[list[str]]:
    """Cells of the table whose first line begins with ``header``, that line first."""
    _, _, after = page.partition(f"\n{header}")
    lines = f"{header}{after}".partition("\n\n")[0].splitlines()
    return [[c.strip() for c in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]


def test_bytes_speed_ups_and_losses_in_the_table_of_results() -> None:
    point = result("speed_2x2_cpu").points[0]
    assert point.stage == 3
    speed = {(r.scheme, r.rate): f"{r.speedup:.2f}" for r in point.rows}
    gap = gaps("convergence", digits=2)
    rows = table(RESULTS, "| scheme | B/param/step, k = 1 |")[1:]
    assert len(rows) > 10
    for name, *cells in rows:
        scheme = name.strip("`")
        comm_volume = cost.comm_volume(
            parse_block({"scheme": scheme}).to_scheme(), 3,
            block_param_specs(4096, dtype=torch.bfloat16), ranks=16, node_size=8,
            gradient_dtype=torch.bfloat16,
        )  # fmt: skip
        nbytes = [f"{comm_volume.step_bytes(3, micro_steps=k):.2f}" for k in (1, 8)]
        measured = [speed.get((scheme, rate), "-") for rate in (10, 50)]
        lost = gap.get(scheme, "baseline" if scheme == "full_precision" else "-")
        assert cells == [*nbytes, *measured, lost, f"{comm_volume.memory:.2f}"], name


NODES = "_4_nodes", "_8_nodes", "_4_nodes_larger_batch", "_8_nodes_larger_batch"
COLUMNS = {  # of a table, a file each
    (RESULTS, "| scheme | 0.14 M, k = 1 |"): ("", "_k8", "_larger", "_3m", "_tuning", "_lora"),
    (CHOOSING, "| scheme, signs |"): ("", *NODES),
}


def test_losses_by_setting_are_those_of_the_result_files() -> None:
    for (page, header), files in COLUMNS.items():
        found = [gaps(f"convergence{name}") for name in files]
        rows = table(page, header)[1:]
        assert len(rows) >= 5
        for name, *cells in rows:
            label = name.strip("`").replace("`, `", ":gradients.rotation_signs=")
            none = "-" if page is RESULTS else ""
            assert cells == [of_file.get(label, none) for of_file in found], name
    sizes = [result(f"convergence{name}").parameters for name in ("", "_larger", "_3m")]
    assert [round(numel / 1e6, 2) for numel in sizes] == [0.14, 0.48, 3.3]


FSDP2_FILES = {  # by link in Mbit/s and micro-steps
    ("10", "1"): "speed_fsdp2_2x2_cpu",
    ("50", "1"): "speed_fsdp2_2x2_cpu",
    ("200", "1"): "speed_fsdp2_2x2_cpu",
    ("10", "8"): "speed_fsdp2_accumulation_slow_2x2_cpu",
    ("50", "8"): "speed_fsdp2_accumulation_2x2_cpu",
    ("200", "8"): "speed_fsdp2_accumulation_2x2_cpu",
}


def test_speed_ups_under_fsdp2_are_those_of_the_result_files() -> None:
    header, *rows = table(FSDP2, "| Mbit/s, k |")
    schemes = [cell.strip("`") for cell in header[1:]]
    assert {tuple(link.split(", ")) for link, *_ in rows} == set(FSDP2_FILES)
    for link, *cells in rows:
        rate, k = link.split(", ")
        found = result(FSDP2_FILES[rate, k])
        assert found.arguments.accumulation == int(k)
        assert found.arguments.baseline == "fsdp2_hsdp"
        by_scheme = {
            row.scheme: f"{row.speedup:.2f} ({row.speedup_min:.2f}-{row.speedup_max:.2f})"
            for row in found.points[0].rows
            if row.rate == int(rate)
        }
        assert cells == [by_scheme.get(scheme, "") for scheme in schemes], link


def gaps(name: str, *, digits: int = 3) -> dict[str, str]:
    return {
        row.scheme.removesuffix(":min_numel=256"): f"{row.gap.mean:+.{digits}f} % "
        f"+-{row.gap.half_width:.{digits}f}"
        for row in result(name).rows
        if row.gap.half_width is not None
    }


# ---- sentences ----


class Figures(dict):
    """A figure by file, "NAME" or "NAME POINT", then by scheme, and by link in Mbit/s behind it."""

    def __init__(self, figure: Callable[[Any], float]) -> None:
        self._figure = figure

    def __missing__(self, file: str) -> dict[str, float]:
        name, _, point = file.partition(" ")
        found = result(name)
        rows = found.points[int(point or 0)].rows if "points" in found else found.rows
        keys = (f"{r.scheme} {r.rate:g}" if "rate" in r else r.scheme for r in rows)
        return {key: self._figure(row) for key, row in zip(keys, rows, strict=True)}


FIGURES = {
    "gap": Figures(lambda row: row.gap.mean),
    "half": Figures(lambda row: row.gap.half_width),
    "hidden": Figures(lambda row: 100 * (1 - row.ratio)),
    **{name: Figures(itemgetter(name)) for name in ("seconds", "speedup", "bytes_bound")},
}


@pytest.mark.parametrize("quoted", yaml.safe_load(QUOTED.read_text("utf-8")))
def test_figures_that_pages_quote_are_those_of_the_result_files(quoted: str) -> None:
    assert quoted.format(**FIGURES) in " ".join((README + RESULTS + CHOOSING).split())


def test_speed_ups_come_close_to_what_the_bytes_allow() -> None:
    rows = [row for point in result("speed_2x2_cpu").points for row in point.rows if row.rate == 10]
    assert rows and all(row.speedup >= 0.9 * row.bytes_bound for row in rows)
