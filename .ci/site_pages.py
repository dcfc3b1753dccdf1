"""Hooks of mkdocs.yml: add to the site what lies outside docs/, and the repository's address."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def on_files(files: Files, config: Any) -> Files:
    """Make the README the first page, and bring the plots and result files that pages show."""
    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / "README.md")))
    for path in sorted(RESULTS.glob("*.*")):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to where these files are on the site."""
    if page.file.src_uri == "index.md":
        homepage = os.environ.get("DS_QUANT_HOMEPAGE") or "HOMEPAGE"
        return markdown.replace("](docs/", "](").replace("HOMEPAGE", homepage)
    if page.file.src_uri.startswith("benchmarks/"):
        return markdown.replace("](../../docs/", "](../../")
    return markdown.replace("](../README.md", "](index.md").replace(
        "](../benchmarks/", "](benchmarks/"
    )
