"""A reference such as ``see [Note: late shards]`` leads to one note."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("ds_quant", "cuda", "benchmarks", "tests")
ENDINGS = {".py", ".cu", ".cuh", ".cpp", ".hpp", ".md"}
TITLE = re.compile(r"\[Note: ([^\]\n]+)\]")
# A note begins a paragraph, in a docstring or a comment, and its first sentence follows.
BEGIN = re.compile(r"^[\s#/*\"]*\[Note: ([^\]\n]+)\](?=\s+(?!of )\S)", re.MULTILINE)


def paths() -> list[Path]:
    """Return all sources; the results are written by programs."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    return [path for path in found if path.suffix in ENDINGS and "results" not in path.parts]


def one_line(text: str) -> str:
    """Join a title that a comment or docstring breaks over two lines."""
    return re.sub(r"(\[Note:[^\]\n]*)\n[\s#/*]*", r"\1 ", text)


def notes() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the files of the notes, and those that mention them, by title."""
    begun: dict[str, list[str]] = defaultdict(list)
    mentioned: dict[str, list[str]] = defaultdict(list)
    for path in paths():
        if path == Path(__file__):
            continue
        text = one_line(path.read_text("utf-8"))
        name = str(path.relative_to(ROOT))
        for title in BEGIN.findall(text):
            begun[title].append(name)
        for title in TITLE.findall(text):
            mentioned[title].append(name)
    return begun, mentioned


BEGUN, MENTIONED = notes()


def test_there_are_notes() -> None:
    assert len(BEGUN) > 40


@pytest.mark.parametrize("title", sorted(MENTIONED))
def test_a_reference_leads_to_one_note(title: str) -> None:
    assert len(BEGUN[title]) == 1, f"notes in {BEGUN[title]}, mentioned in {MENTIONED[title]}"
