"""The lines that a part of benchmarks/gpu_suite.sh prints last. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def lines(sections: dict[str, dict[str, Any]], results: dict[str, Any]) -> list[str]:
    """Sections with their verdicts, then figures, the shares of copy bandwidth last."""
    found = [
        f"{name:<16}{entry['result']:<28}{entry.get('seconds', 0):>7} s of {entry['budget']:.0f}"
        for name, entry in sections.items()
    ]
    for name, document in results.items():
        for line in _figures(name, document):
            found.append(f"{name:<16}{line}")
    return found


def _figures(name: str, document: Any) -> Iterator[str]:
    if not isinstance(document, dict):
        return
    yield from document.get("shown", ())  # lines that a section has made itself
    for label, seconds in document.get("launch_overhead_s", {}).items():
        yield f"launch overhead, {label}: {seconds * 1e6:.1f} us"
    for label, losses in document.get("losses", {}).items():
        yield f"{label}: loss {losses[0]:.4f} -> {losses[-1]:.4f}"
    for label, why in document.get("failed", {}).items():
        yield f"{label}: {why.strip().splitlines()[-1][:200]}"
    for row in document.get("rows", ()):
        label = f"{row['operation']}, {row['codec']}, {row['dtype']}"
        head = f"{label:<66}{row['bytes'] / 1e6:>8.1f} MB {row['way']:<16}"
        yield f"{head}{row['share_of_copy']:.2f} of copy"
