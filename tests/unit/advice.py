"""Finds the advice of README and docs/: every scheme that a clause or a table names beside a ZeRO
stage, with the nodes that its heading, column or clause is about.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ds_quant.config.presets import preset_names

ROOT = Path(__file__).resolve().parents[2]
NO_ADVICE = {"changelog", "results", "peer_suite", "reproducing", "wire_format", "architecture"}
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
PAGES = [page for page in PAGES if page.stem not in NO_ADVICE]

CLAUSE = re.compile(r"(?<=[.:;])\s+|, (?:or )?(?=`)")
STAGES = re.compile(r"(?:ZeRO-|`?zero_optimization\.stage`? )([123](?:(?:/| or | and )[123])*)")
ALONE = re.compile(r"(?:one|1) (?:GPU|rank)s? per (?:node|machine)|\b\d+ x 1\b", re.IGNORECASE)


class Advice(NamedTuple):
    """A scheme under a stage, on two nodes of so many ranks; replica: with allow_full_replica."""

    page: str
    scheme: str
    stage: int
    node_size: int
    replica: bool = False


def advice_of(text: str, about: str, page: str) -> Iterator[Advice]:
    """Pair every scheme of a clause with the stages that the clause names."""
    names = {*preset_names(), "autotune"}
    schemes = [name for name in re.findall(r'`"?(\w+)"?`', text) if name in names]
    stages = {int(stage) for found in STAGES.findall(text) for stage in re.findall(r"\d", found)}
    node_size = 1 if ALONE.search(f"{about} {text}") else 2
    for scheme in schemes:
        for stage in sorted(stages):
            yield Advice(page, scheme, stage, node_size, "`allow_full_replica`" in text)


def rows(lines: list[str]) -> Iterator[tuple[str, str]]:
    """(head of its column or beginning of its row, cell) of the cells of a table."""
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    head, _, *body = cells
    for row in body:
        yield from zip(head, row, strict=False)
        yield "", " ".join(row)


def advices(page: Path) -> Iterator[Advice]:
    heading = ""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for paragraph in re.split(r"\n\s*\n|\n(?=- )", text):
        lines = paragraph.strip().splitlines()
        if lines and lines[0].startswith("#"):
            heading = lines.pop(0)
        if lines and lines[0].startswith("|"):
            for title, cell in rows(lines):
                for clause in cell.split(";"):
                    stated = clause if STAGES.search(clause) else f"{title} {clause}"
                    yield from advice_of(stated, f"{heading} {title}", page.name)
            continue
        for clause in CLAUSE.split(" ".join(lines)):
            yield from advice_of(clause, heading, page.name)
