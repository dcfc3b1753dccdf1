"""The committed result files: readable, up to date, and what README and docs quote of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_quant.config.schema import parse_block
from ds_quant.policy import cost
from ds_quant.policy.model import block_cargo

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import paired  # noqa: E402
import report  # noqa: E402
import sections  # noqa: E402

PAGES = ("README.md", "docs/results.md", "docs/choosing.md")
README, RESULTS, CHOOSING = ((ROOT / page).read_text("utf-8") for page in PAGES)


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


def test_command_line_repeats_lists_and_drops_what_is_unset() -> None:
    arguments = {
        "schemes": ["a", "b:x=[1]"], "seeds": [0, 1], "lr": 2e-3, "text": None, "tied": False,
        "quick": True, "node_size": 2,
    }  # fmt: skip
    assert report.command_line("s.py", arguments, commas=("schemes",)) == (
        "python s.py --schemes 'a,b:x=[1]' --seeds 0 1 --lr 0.002 --quick --node-size 2"
    )


def test_pages_are_up_to_date_and_stale_ones_are_found(tmp_path: Path, capsys) -> None:
    """That of a finished study, whose script is gone, stays as it is."""
    assert sections.main(["--check"]) == 0, capsys.readouterr().err
    page = tmp_path / "page.txt"
    page.write_text(f"# By hand\n\n{sections.MARK}old\n", "utf-8")
    for name in ("peer_suite_cpu.json", "levels_cpu.json", "levels_cpu.md"):
        (tmp_path / name).write_bytes((sections.RESULTS / name).read_bytes())
    arguments = ["--results", str(tmp_path), "--page", str(page)]
    codes = [sections.main([*arguments, *check]) for check in (["--check"], [], ["--check"])]
    assert codes == [1, 0, 0]
    written = tmp_path / "peer_suite_cpu.md"
    text = written.read_text("utf-8")
    assert text.startswith("# DeepSpeed's own tests\n") and "\n- Command: `python bench" in text
    assert page.read_text("utf-8") == (
        f"# By hand\n\n{sections.MARK}\n"
        "- [Learned levels](../benchmarks/results/levels_cpu.md)\n"
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


def test_speed_ups_in_the_table_of_the_lab_are_those_of_the_result_file() -> None:
    """The table `| Mbit/s | stage |`: speed-up, in brackets what the bytes allow."""
    points = result("speed_2x2_cpu").points
    found = {(point.stage, row.rate, row.scheme): row for point in points for row in point.rows}
    header, *rows = table(RESULTS, "| Mbit/s | stage |")
    schemes = [cell.strip("`") if "`" in cell else "deepspeed_plain" for cell in header[2:]]
    checked = 0
    for rate, stage, *cells in rows:
        place = int(stage.removeprefix("ZeRO-")), 0.0 if rate == "not shaped" else float(rate)
        for scheme, cell in zip(schemes, cells, strict=True):
            row = found.get((*place, scheme))
            bound = f" ({row.bytes_bound:.2f})" if "(" in cell else ""
            assert cell == (f"{row.speedup:.2f}{bound}" if row else ""), (place, scheme)
            checked += row is not None
    assert checked >= 30
    of_base = [row.speedup / row.bytes_bound for row in found.values()
               if row.rate == 10 and row.scheme != "deepspeed_plain"]  # fmt: skip
    assert f"Measured up to {100 * (max(of_base) - 1):.0f} % above" in RESULTS
    slow = {row.scheme: f"{row.seconds:.1f} s" for row in points[0].rows if row.rate == 10}
    assert (
        f"a ZeRO-3 step at 10 Mbit/s takes {slow['sdp4bit']} with\n`sdp4bit`, "
        f"{slow['full_precision']} with this plugin in full precision and "
        f"{slow['deepspeed_plain']} with DeepSpeed as shipped"
    ) in README


def test_bytes_speed_ups_and_losses_in_the_table_of_results() -> None:
    point = result("speed_2x2_cpu").points[0]
    assert point.stage == 3
    speed = {(r.scheme, r.rate): f"{r.speedup:.2f}" for r in point.rows}
    gap = gaps("convergence", digits=2)
    rows = table(RESULTS, "| scheme | B/param/step, k = 1 |")[1:]
    assert len(rows) > 10
    for name, *cells in rows:
        scheme = name.strip("`")
        bill = cost.bill(
            parse_block({"scheme": scheme}).to_scheme(), 3,
            block_cargo(4096, dtype=torch.bfloat16), ranks=16, node_size=8,
            gradient_dtype=torch.bfloat16,
        )  # fmt: skip
        nbytes = [f"{bill.step_bytes(3, micro_steps=k):.2f}" for k in (1, 8)]
        measured = [speed.get((scheme, rate), "") for rate in (10, 50)]
        assert cells == [*nbytes, *measured, gap.get(scheme, ""), f"{bill.memory:.2f}"], name


def test_losses_in_other_settings_are_those_of_the_result_files() -> None:
    """A file per column."""
    files = ("", "_k8", "_larger", "_3m", "_tuning", "_lora")
    found = [gaps(f"convergence{name}") for name in files]
    rows = table(RESULTS, "| scheme | 0.14 M, k = 1 |")[1:]
    assert len(rows) >= 5
    for name, *cells in rows:
        assert cells == [of_file.get(name.strip("`"), "") for of_file in found], name
    sizes = [result(f"convergence{name}").parameters for name in ("", "_larger", "_3m")]
    assert [round(numel / 1e6, 2) for numel in sizes] == [0.14, 0.48, 3.3]


def gaps(name: str, *, digits: int = 3) -> dict[str, str]:
    return {
        row.scheme.removesuffix(":min_numel=256"): interval(row.gap, digits)
        for row in result(name).rows
        if row.gap.half_width is not None
    }


def interval(gap: Any, digits: int) -> str:
    return f"{gap.mean:+.{digits}f} % +-{gap.half_width:.{digits}f}"


# ---- sentences ----


def rises(name: str, digits: int) -> dict[str, str]:
    return {row.scheme: f"{row.gap.mean:.{digits}f} %" for row in result(name).rows}


def speed_ups(name: str, rate: int, schemes: Iterable[str]) -> list[str]:
    rows = {row.scheme: row for row in result(name).points[0].rows if row.rate == rate}
    return [f"{rows[scheme].speedup:.2f}" for scheme in schemes]


def sentences_on_losses() -> Iterator[str]:
    g = rises("convergence", 2)
    yield (
        f"loss is {g['qsdp']} higher with `qsdp`, {g['sdp4bit']} with `sdp4bit`, "
        f"{g['lossless_w_g3']} with `lossless_w_g3` and {g['zeropp']} with `zeropp`"
    )
    yield f"with k = 4 `sdp4bit` has {gaps('convergence_k4')['sdp4bit']}"
    assert round(result("convergence_3m").base.curve[-1].held_out, 2) == 1.72
    few = next(r.gap.pairs for r in result("convergence_10m").rows if r.scheme == "sdp4bit")
    assert len(few) == 3
    yield f"three pairs of `sdp4bit` lie between {min(few):+.2f} and {max(few):+.2f} %"
    pairs, said = {row.scheme: row.gap.pairs for row in result("convergence").rows}, []
    for scheme in (
        "sdp4bit",
        "lossless_w_g3",
    ):  # the second half of the pairs against the first one
        first, again = (paired.of_pairs(half) for half in (pairs[scheme][:8], pairs[scheme][8:]))
        assert abs(again.mean - first.mean) < min(again.half_width, first.half_width)
        said.append(f"{interval(again, 3)} for `{scheme}`, after {interval(first, 3)}")
    yield f"Eight pairs with other data gave {said[0]}, and {said[1]}."
    (found,) = result("convergence").constant
    assert found.scheme == "tlq_hs:gradients.bits=2" and len(found.decayed.pairs) == 3
    training, decayed = (interval(gap, 2) for gap in (found.training, found.decayed))
    yield (f"was {training} in training loss at a constant rate, and {decayed} in held-out loss")
    tuning, t = result("convergence_tuning"), rises("convergence_tuning", 3)
    assert tuning.tuning.lr == 2e-5 and all(len(row.gap.pairs) >= 5 for row in tuning.rows)
    yield (
        f"`sdp4bit` costs {t['sdp4bit']}, `lossless_w_g3` {t['lossless_w_g3']} and `lossless_w_g2` "
        f"{t['lossless_w_g2']}."
    )
    g = rises("convergence", 3)
    yield (
        f"rises by {g['eden4']} with `eden4`, {g['eden3']} with `eden3` and {g['eden2']} with "
        f"`eden2`, where it does by {g['sdp4bit']} with `sdp4bit`; with exact weights "
        f"(`lossless_w_g4`, `_g3`, `_g2`) by {g['lossless_w_g4']}, {g['lossless_w_g3']} and "
        f"{g['lossless_w_g2']}."
    )


OFTEN, SHARD = "sdp4bit:gradients.cross=micro_step", "full_precision:node_shard=true"


def sentences_on_speed() -> Iterator[str]:
    kept = speed_ups("speed_kept_2x2_cpu", 50, ("qsdp", "zeropp", "sdp4bit"))
    yield f"then qsdp/zeropp/sdp4bit gain {'/'.join(kept)} at 50 Mbit/s"
    exact = "full_precision:gradients.cross=micro_step"
    plain, often, shard, zeropp, each, once, g3 = speed_ups(
        "speed_accumulation_2x2_cpu", 50,
        ("deepspeed_plain", exact, SHARD, "zeropp", OFTEN, "sdp4bit", "lossless_w_g3"),
    )  # fmt: skip
    yield (
        f"DeepSpeed as shipped {plain}, `full_precision` crossing in every micro-step {often}, "
        f"with a node shard {shard}, `zeropp` {zeropp}, "
        f"`sdp4bit` crossing in every micro-step {each}, once per step {once}, "
        f"`lossless_w_g3` {g3}."
    )
    slow = "speed_accumulation_slow_2x2_cpu"
    shard, zeropp, each, once, g3 = speed_ups(
        slow, 10, (SHARD, "zeropp", OFTEN, "sdp4bit", "lossless_w_g3")
    )
    yield (
        f"a node shard gives {shard}, `zeropp` {zeropp}, `sdp4bit` crossing in every micro-step "
        f"{each}, once per step {once}, `lossless_w_g3` {g3}."
    )
    found = {(row.scheme, row.rate): row for row in result(slow).points[0].rows}
    each, once = (found[s, 10].seconds - found[s, 0].seconds for s in (OFTEN, "sdp4bit"))
    allowed = found[OFTEN, 10].interface_bytes / found["sdp4bit", 10].interface_bytes
    assert each / once > 0.9 * allowed
    yield (
        f"waits {each:.2f} s if it crosses in every micro-step and {once:.2f} s if it "
        f"crosses once: {each / once:.2f} times less, where the bytes allow {allowed:.2f}."
    )
    hidden = {
        (row.scheme, row.rate): f"{100 * (1 - row.ratio):.0f} %"
        for row in result("overlap_cpu").rows
    }
    yield f"`sdp4bit` hides {hidden['sdp4bit', 50]} of its communication"
    yield f"`qsdp` hides {hidden['qsdp', 50]}, and {hidden['qsdp', 200]} at 200 Mbit/s"
    worst = 1.0
    for point in result("speed_autotune_cpu").points:
        speedup = {row.scheme: row.speedup for row in point.rows}
        taken = point.lines["autotune"].split(" on ")[0]
        assert (taken == "sdp4bit") == (point.stage == 3), point.title
        tried = ("full_precision", "qsdp", "sdp4bit")  # as autotune had them then
        worst = max(worst, *(speedup[name] / speedup[taken] for name in tried))
    assert worst < 1.05
    yield f"missed the best candidate by {100 * (worst - 1):.0f} % at most"


@pytest.mark.parametrize("said", [sentences_on_losses, sentences_on_speed])
def test_figures_in_sentences_are_those_of_the_result_files(said: Any) -> None:
    pages = " ".join((README + RESULTS + CHOOSING).split())
    missing = [text for text in said() if text not in pages]
    assert missing == []


def test_speed_ups_come_close_to_what_the_bytes_allow() -> None:
    for point in result("speed_2x2_cpu").points:
        for row in point.rows:
            if row.rate == 10:
                assert row.speedup >= 0.9 * row.bytes_bound, (point.title, row.scheme)
    rows = {r.scheme: r for r in result("speed_accumulation_2x2_cpu").points[0].rows if r.rate}
    assert min(rows[name].bytes_bound for name in ("sdp4bit", "lossless_w_g3")) > 30
