"""Hooks of mkdocs.yml: add to the site what lies outside docs/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def on_files(files: Files, config: Any) -> Files:
    """Bring the plots and result files that pages show."""
    for path in sorted(RESULTS.glob("*.*")):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to where these files are on the site."""
    if page.file.src_uri.startswith("benchmarks/"):
        return markdown.replace("](../../docs/", "](../../")
    return markdown.replace("](../benchmarks/", "](benchmarks/")
