"""Writes a Markdown page and a plot for every result file, and the list of pages, docs/results.md.

    python benchmarks/sections.py            # write (make report)
    python benchmarks/sections.py --check    # exit 1 if a page is not up to date

Every benchmark has a function ``section(result)``, which turns its result file into the heading and
the body of the page. Pages of finished studies stay as they are; they name the commit that has
their script. May import the standard library and, by name, the benchmark of a file's "command".
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
    """Draw the plot of a page again, if it has one and its study is not finished."""
    path = page.with_suffix(".json")
    picture = page.with_suffix(".png")
    if picture.exists() and not is_finished(page):
        result = json.loads(path.read_text("utf-8"))
        _drawn_by(result).draw(result, picture)


def is_finished(page: Path) -> bool:
    """Return True if the page belongs to a finished study."""
    return page.exists() and FINISHED in page.read_text("utf-8")


def _drawn_by(result: dict[str, Any]) -> Any:
    """Return the module with the ``section`` of a result file: NAME_page.py or else the script."""
    script = ROOT / result["command"].split()[1]
    page_module = script.with_name(f"{script.stem}_page.py")
    return importlib.import_module(page_module.stem if page_module.exists() else script.stem)


def origin(result: dict[str, Any], name: str) -> str:
    """Return the provenance of a result: file, date, hardware, versions and command."""
    machine = result["hardware"]
    devices = ", ".join([f"{machine['cores']} cores of {machine['cpu']}", *machine["gpus"]])
    hardware = f"{devices}; load {machine['load_average']:g}"
    versions = ", ".join(f"{package} {found}" for package, found in result["versions"].items())
    return (
        f"- File: [`{name}`]({name})\n- Date: {result['created']}\n- Hardware: {hardware}\n"
        f"- Versions: {versions}\n- Command: `{result['command']}`\n"
    )


def written(results: Path, page: Path) -> dict[Path, str]:
    """Return the text of the page of every result file in ``results``, and of the list ``page``."""
    texts = {}
    for path in sorted(results.glob("*.json")):
        result_page = path.with_suffix(".md")
        if is_finished(result_page):
            texts[result_page] = result_page.read_text("utf-8")
        else:
            texts[result_page] = section_of(path)
    links = []
    for path, text in texts.items():
        heading = text.partition("\n")[0].lstrip("# ")
        links.append(f"- [{heading}](../benchmarks/results/{path.name})")
    above = page.read_text("utf-8").partition(MARK)[0]
    return {**texts, page: above + MARK + "\n" + "\n".join(links) + "\n"}


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
