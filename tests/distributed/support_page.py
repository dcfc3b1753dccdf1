"""Makes the tables of docs/support.md from the table of behaviours.

``python -m tests.distributed.support_page`` writes them; a test compares them with the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.distributed.behaviours import SECTIONS
from tests.distributed.cells import FRONTS, Cell, Row, Trains, Tries

PAGE = Path(__file__).resolve().parents[2] / "docs" / "support.md"
BEGIN = "<!-- The tables below are made: python -m tests.distributed.support_page -->\n"


def tables() -> str:
    """Return all tables in Markdown."""
    parts = []
    for title, rows in SECTIONS.items():
        lines = [f"## {title}", "", *_table(rows), ""]
        parts.append("\n".join(lines))
    return "\n".join(parts)


def page(text: str) -> str:
    """Return the text of the page with its tables made anew."""
    head, begin, _ = text.partition(BEGIN)
    if not begin:
        raise ValueError(f"{PAGE.name} has no line {BEGIN!r}")
    return f"{head}{BEGIN}\n{tables()}"


def _table(rows: tuple[Row, ...]) -> Iterator[str]:
    yield "| | " + " | ".join(FRONTS.values()) + " | FSDP2 on meshes | tested in |"
    yield "| --- |" + " --- |" * (len(FRONTS) + 2)
    for row in rows:
        columns = [_column(row.of(front)) for front in FRONTS]
        files: dict[str, None] = {}
        for front in FRONTS:
            for cell in row.of(front):
                files |= dict.fromkeys(cell.files)
        listed = ", ".join(f"`{file}`" for file in files)
        yield f"| {row.name} | {' | '.join(columns)} | {_meshes(row)} | {listed} |"


def _meshes(row: Row) -> str:
    """Return the meshes on which a behaviour was tried, besides one of all ranks."""
    trials = [cell.trial for cell in row.of("fsdp2") if isinstance(cell, Tries)]
    return ", ".join(mesh for trial in trials for mesh in trial.meshes)


def _column(cells: tuple[Cell, ...]) -> str:
    """Return the verdicts of a front, those without a remark as one."""
    plain = [cell for cell in cells if not _remark(cell) and cell.works]
    texts = [f"{cell.verdict}: {_remark(cell)}" for cell in cells if _remark(cell)]
    texts += [cell.verdict for cell in cells if not _remark(cell) and not cell.works]
    stages = sorted({stage for cell in plain for stage in cell.stages})
    if stages:
        texts.insert(0, ", ".join(map(str, stages)))
    elif plain and not texts:
        texts.append(plain[0].verdict)
    return " <br> ".join(texts)


def _remark(cell: Cell) -> str:
    remarks = [cell.remark] if cell.remark else []
    if isinstance(cell, Trains):
        for (major, minor), stages in cell.fails.items():
            failing = ", ".join(map(str, stages))
            remarks.append(f"DeepSpeed {major}.{minor} cannot under ZeRO-{failing}")
    return "; ".join(remarks)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
