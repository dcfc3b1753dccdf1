"""From the facts of the runs to counts, and to the tests that fail only with the plugin.

Pure; may import facts and the standard library.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peer.facts import Facts

PLAIN = "without"  # the runs without the plugin
REFUSAL = re.compile(r"quantized_comm cannot be used with .*")


@dataclass(frozen=True, kw_only=True)
class Test:
    """One test under one scheme."""

    name: str
    outcome: str  # passed, failed, refused, skipped, not_run
    error: str  # of failed and refused ones; of skipped ones the reason
    engines: bool  # some engine or config of it had the block
    world: int  # largest number of ranks with the block, 0 without one


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why some tests cannot pass with the plugin; patterns are regular expressions."""

    test: str
    error: str
    schemes: Sequence[str]
    why: str

    def covers(self, test: Test, scheme: str) -> bool:
        return (
            scheme in self.schemes
            and re.search(self.test, test.name) is not None
            and re.search(self.error, test.error) is not None
        )


def tests(facts: Facts) -> dict[str, Test]:
    """The tests under one scheme, by name."""
    about: dict[str, list[Mapping[str, Any]]] = {}
    current = ""
    for fact in facts:
        if fact["event"] == "collected":
            about |= {name: about.get(name, []) for name in fact["tests"]}
        current = fact.get("test", current)
        if fact["event"] in ("end", "block", "rank_error") and current in about:
            about[current].append(fact)
    return {name: _test(name, own) for name, own in about.items()}


def tests_of(file: str, facts: Facts) -> dict[str, Test]:
    """Those of one file, named as in files.py."""
    return {name: test for name, test in tests(facts).items() if name.startswith(f"unit/{file}::")}


def _test(name: str, facts: Facts) -> Test:
    ends = [fact for fact in facts if fact["event"] == "end"]
    by_outcome = {fact["outcome"]: fact["error"] for fact in reversed(ends)}
    worst = next((o for o in ("failed", "skipped", "passed") if o in by_outcome), "not_run")
    error = by_outcome.get(worst, "")
    if worst == "failed":
        of_ranks = [fact["error"] for fact in facts if fact["event"] == "rank_error"]
        if of_ranks and error.startswith("hung"):
            error = f"{error}; before that, on a rank: {of_ranks[0]}"
        refusals = [found for text in (error, *of_ranks) if (found := REFUSAL.search(text))]
        if refusals:
            worst, error = "refused", refusals[0].group()
    worlds = [fact["world"] for fact in facts if fact["event"] == "block"]
    return Test(
        name=name,
        outcome=worst,
        error=error,
        engines=bool(worlds),
        world=max(worlds, default=0),
    )


def counts(found: Iterable[Test]) -> dict[str, int]:
    """How many tests ended how, and how many the plugin took part in."""
    found = list(found)
    by_outcome = Counter(test.outcome for test in found)
    return {
        "collected": len(found),
        **{name: by_outcome[name] for name in ("passed", "failed", "refused", "skipped")},
        "not_run": by_outcome["not_run"],
        "with_plugin": sum(test.engines for test in found),
        "communicating": sum(test.world > 1 for test in found),
    }


def differences(
    plain: Mapping[str, Test],
    active: Mapping[str, Test],
    scheme: str,
    explanations: Sequence[Explanation],
) -> list[dict[str, str | None]]:
    """Tests that pass without the plugin and do not with it; a refusal is its own reason."""
    rows: list[dict[str, str | None]] = []
    for name, test in active.items():
        before = plain.get(name)
        if before is None or before.outcome != "passed" or test.outcome in ("passed", "not_run"):
            continue
        whys = [entry.why for entry in explanations if entry.covers(test, scheme)]
        why = "refused by the plugin" if test.outcome == "refused" else (whys or [None])[0]
        rows.append(
            {
                "test": name,
                "scheme": scheme,
                "outcome": test.outcome,
                "error": test.error,
                "why": why,
            }
        )
    return rows


def broken(plain: Mapping[str, Test]) -> list[dict[str, str]]:
    """Tests that fail without the plugin too: of another version, or not for this machine."""
    return [
        {"test": test.name, "error": test.error}
        for test in plain.values()
        if test.outcome == "failed"
    ]
