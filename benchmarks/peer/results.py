"""The result file of peer_suite.py, and what it shows on a terminal.

May import outcomes, report, results_schema and rich.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import report
import results_schema
from rich.console import Console
from rich.table import Table

from peer import outcomes
from peer.outcomes import PLAIN, Explanation, Test

EXPLAINED = Path(__file__).resolve().parent / "explained.json"
Found = dict[str, dict[str, dict[str, Test]]]  # by file, scheme and test


def result_of(
    found: Found,
    *,
    arguments: dict[str, Any],
    blocks: Mapping[str, dict[str, Any] | None],
    tree_version: str,
) -> results_schema.PeerSuite:
    """What the result file holds; the first of `blocks` is that of the runs without plugin."""
    active = [scheme for scheme in blocks if scheme != PLAIN]
    known = [Explanation(**entry) for entry in json.loads(EXPLAINED.read_text("utf-8"))]
    skipped = Counter(
        test.error.removeprefix("Skipped: ")
        for by_scheme in found.values()
        for test in by_scheme[PLAIN].values()
        if test.outcome == "skipped"
    )
    content = {
        "kind": "peer_suite",
        "version": 1,
        "command": "python benchmarks/peer_suite.py",
        **report.provenance(),
        "arguments": arguments,
        "tree_version": tree_version,
        "blocks": dict(blocks),
        "files": [
            {
                "file": file,
                "counts": {s: outcomes.counts(by_scheme[s].values()) for s in blocks},
            }
            for file, by_scheme in found.items()
        ],
        "differences": [
            row
            for by_scheme in found.values()
            for scheme in active
            for row in outcomes.differences(by_scheme[PLAIN], by_scheme[scheme], scheme, known)
        ],
        "broken": [row for tests in found.values() for row in outcomes.broken(tests[PLAIN])],
        "skipped": dict(skipped.most_common()),
    }
    return results_schema.PeerSuite.model_validate(content)


def show(result: results_schema.PeerSuite, console: Console) -> None:
    """One table of counts, then every difference."""
    table = Table(title="DeepSpeed's own tests")
    names = list(results_schema.PeerCounts.model_fields)
    for name in ("file", "scheme", *names):
        table.add_column(name, justify="left" if name in ("file", "scheme") else "right")
    for entry in result.files:
        for scheme, counts in entry.counts.items():
            table.add_row(entry.file, scheme, *[str(getattr(counts, name)) for name in names])
    for scheme, total in result.totals().items():
        table.add_row("total", scheme, *[str(total[name]) for name in names], style="bold")
    console.print(table)
    for row in result.differences:
        console.print(f"{row.scheme}: {row.outcome}: {row.test}", markup=False)
        console.print(f"    {row.error}\n    {row.why or 'UNEXPLAINED'}", markup=False)
