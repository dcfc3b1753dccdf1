"""make docs: the site builds without a warning, and loads nothing from a network."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.integration.processes import run

ROOT = Path(__file__).resolve().parents[2]
# What a browser would fetch by itself; links to click on are not.
REMOTE = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=[\"']?(?:https?:)?//[^ >]*")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="needs mkdocs-material: pip install 'ds_quant[docs]'")
    folder = tmp_path_factory.mktemp("site")
    options = ("--strict", "-f", ".ci/mkdocs.yml", "--site-dir", folder)
    run(sys.executable, "-m", "mkdocs", "build", *options, cwd=ROOT)
    return folder


def test_every_page_is_on_the_site(site: Path) -> None:
    pages = {path.stem for path in site.glob("*.html")} - {"404"}
    assert pages == {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert "Weights and gradients in 3 to 8 bits" in (site / "index.html").read_text("utf-8")
    assert "what_is_sent.svg" in (site / "index.html").read_text("utf-8")


def test_the_picture_has_the_bytes_of_the_start_up_line() -> None:
    line = re.compile(r"\(([\d.]+) instead of ([\d.]+) per parameter and step\)")
    picture = (ROOT / "docs" / "what_is_sent.svg").read_text("utf-8")
    for page in ("README.md", "docs/index.md"):
        ((sent, instead),) = line.findall((ROOT / page).read_text("utf-8"))
        assert f"Between nodes: {sent} bytes" in picture
        assert f"instead of {instead} " in picture


def test_pictures_and_files_that_pages_lead_to_are_on_the_site(site: Path) -> None:
    for page in set(site.glob("*.html")) - {site / "404.html"}:
        for target in re.findall(r'(?:src|href)="?([^" >#]+)', page.read_text("utf-8")):
            if not re.match(r"https?:|mailto:|data:|\.$", target):
                assert (site / target).exists(), f"{page.name}: {target}"


def test_no_page_loads_anything_from_a_network(site: Path) -> None:
    for page in site.glob("**/*.html"):
        assert REMOTE.findall(page.read_text("utf-8")) == [], page
    for style in site.glob("**/*.css"):
        assert not re.search(r"(?:url\(|@import )[\"']?(?:https?:)?//", style.read_text("utf-8"))


def test_search_works_without_a_server(site: Path) -> None:
    """Browsers refuse workers and JSON files under file://."""
    assert 'src="iframe-worker.js"' in (site / "index.html").read_text("utf-8").replace("'", '"')
    assert (site / "iframe-worker.js").exists()
    assert (site / "search" / "search_index.js").read_text("utf-8").startswith("var __index = {")
