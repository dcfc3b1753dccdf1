"""A Markdown page beside every result file, its picture, and the list of pages in docs/results.md.

    python benchmarks/sections.py            # write (make report)
    python benchmarks/sections.py --check    # exit 1 where something is not up to date

Every benchmark owns its page: ``section(result)`` turns what it has written as JSON into a heading
and a body. Pages of finished studies, which name the commit that has their script, stay as they
are. May import the standard library and, by name, the benchmark of a file's "command".
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
MARK = "<!-- below: make report -->\n"
FINISHED = "- Command, after `git checkout "


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table; the first column is text, the others are numbers."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    lines = [header, rule, *[[cell.replace("|", "\\|") for cell in row] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def section_of(path: Path) -> str:
    """Return the page of a result file."""
    result = json.loads(path.read_text("utf-8"))
    heading, body = _drawn_by(result).section(result)
    picture = path.with_suffix(".png")
    shown = f"![{heading}]({picture.name})\n\n" if picture.exists() else ""
    return f"# {heading}\n\n{body}\n\n{shown}{origin(result, path.name)}"


def redraw(page: Path) -> None:
    """Draw the picture beside a page anew, if it has one and its study goes on."""
    path, picture = page.with_suffix(".json"), page.with_suffix(".png")
    if picture.exists() and not is_finished(page):
        result = json.loads(path.read_text("utf-8"))
        _drawn_by(result).draw(result, picture)


def is_finished(page: Path) -> bool:
    """Whether a page is that of a finished study."""
    return page.exists() and FINISHED in page.read_text("utf-8")


def _drawn_by(result: dict[str, Any]) -> Any:
    """Return the module with the page of a result file: what shows need not load what measures."""
    script = ROOT / result["command"].split()[1]
    apart = script.with_name(f"{script.stem}_page.py")
    return importlib.import_module(apart.stem if apart.exists() else script.stem)


def origin(result: dict[str, Any], name: str) -> str:
    """Return what a number needs to be quoted."""
    machine = result["hardware"]
    devices = ", ".join([f"{machine['cores']} cores of {machine['cpu']}", *machine["gpus"]])
    hardware = f"{devices}; load {machine['load_average']:g}"
    versions = ", ".join(f"{package} {found}" for package, found in result["versions"].items())
    return (
        f"- File: [`{name}`]({name})\n- Date: {result['created']}\n- Hardware: {hardware}\n"
        f"- Versions: {versions}\n- Command: `{result['command']}`\n"
    )


def written(results: Path, page: Path) -> dict[Path, str]:
    """Return the text of every page beside a result file in ``results``, and of ``page``."""
    found = {}
    for path in sorted(results.glob("*.json")):
        beside = path.with_suffix(".md")
        found[beside] = beside.read_text("utf-8") if is_finished(beside) else section_of(path)
    headings = {path.name: text.partition("\n")[0].lstrip("# ") for path, text in found.items()}
    links = [f"- [{heading}](../benchmarks/results/{name})" for name, heading in headings.items()]
    above = page.read_text("utf-8").partition(MARK)[0]
    return {**found, page: above + MARK + "\n" + "\n".join(links) + "\n"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result files")
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args(argv)
    stale = 0
    for path, text in written(args.results, args.page).items():
        if not args.check:
            path.write_text(text, "utf-8")
            redraw(path)
        elif not path.exists() or path.read_text("utf-8") != text:
            stale = 1
            print(f"sections.py: {path} is not up to date: run make report", file=sys.stderr)
    return stale


if __name__ == "__main__":
    sys.exit(main())
