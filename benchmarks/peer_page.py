"""docs/peer_suite.md from the result file of peer_suite.py.

    python benchmarks/peer_page.py            # write
    python benchmarks/peer_page.py --check    # exit 1 if the page is not up to date

May import make_report (for tables), results_schema and the standard library.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import results_schema as schema
from make_report import RESULTS, ROOT, peer_totals, table

RESULT = RESULTS / "peer_suite_cpu.json"
PAGE = ROOT / "docs" / "peer_suite.md"


def introduction(result: schema.PeerSuite) -> str:
    about = result.about()
    blocks = "\n".join(
        f"- `{scheme}`: `{json.dumps(block)}`"
        for scheme, block in result.blocks.items()
        if block is not None
    )
    return f"""\
# DeepSpeed's own tests with the plugin

Made by `make report` from `benchmarks/results/{RESULT.name}`; do not edit. The ZeRO tests of
DeepSpeed {result.tree_version} that fit a CPU run unchanged, from DeepSpeed's source tree: first \
without the
plugin, then with this block in every config that enables ZeRO 1 to 3:

{blocks}

The models of these tests are so small that the default `min_numel` would leave them in full
precision. With 8 bits a test may differ that compares weights or losses exactly, or with a
reference; each is listed with its reason. Tests of 0.19.6 compare one attribute of the engine that
0.19.8 no longer has; `benchmarks/peer/ranks.py` gives it back, with and without the plugin.

- Command: `{about.command}`
- Date: {about.date}
- Hardware: {about.hardware}
- Versions: {about.versions}
"""


def page(result: schema.PeerSuite) -> str:
    parts = [introduction(result), "## Totals\n", peer_totals(result), LEGEND]
    parts += ["## Tests that pass without the plugin and not with it\n", _differences(result)]
    parts += ["## Files\n", _files(result), "\n## Tests that fail without the plugin\n"]
    parts += [_broken(result)]
    reasons = [[reason, str(count)] for reason, count in result.skipped.items()]
    parts += [
        "\n## Tests that DeepSpeed skips on this machine\n",
        table(["reason", "tests"], reasons),
    ]
    return "\n".join(parts) + "\n"


LEGEND = """
*refused*: the plugin does not support a setting of the test and says so; *skipped*: by DeepSpeed;
*not run*: the time limit of the file came first; *with plugin*: at least one config of the test had
the block; *communicating*: and it ran on more than one rank.
"""


def _differences(result: schema.PeerSuite) -> str:
    if not result.differences:
        return "None.\n"
    by_why: dict[str, list[schema.PeerDifference]] = {}
    for row in result.differences:
        why = row.error if row.outcome == "refused" else row.why or "UNEXPLAINED"
        by_why.setdefault(why, []).append(row)
    parts = []
    for why, rows in by_why.items():
        parts.append(f"{'Refused: ' if rows[0].outcome == 'refused' else ''}{why}\n")
        for row in rows:
            error = "" if row.outcome == "refused" else f": `{row.error.replace('`', '')}`"
            parts.append(f"- `{row.scheme}`, {row.outcome}: `{row.test}`{error}")
        parts.append("")
    return "\n".join(parts)


def _broken(result: schema.PeerSuite) -> str:
    """One line per file and error, which many tests may share."""
    by_error: dict[tuple[str, str], list[str]] = {}
    for row in result.broken:
        file, _, name = row.test.partition("::")
        by_error.setdefault((file, row.error), []).append(name)
    lines = [
        f"- `{file}`, {f'`{names[0]}`' if len(names) == 1 else f'{len(names)} tests'}: `{error}`"
        for (file, error), names in by_error.items()
    ]
    return "\n".join(lines) or "None."


def _files(result: schema.PeerSuite) -> str:
    rows = [
        [f"`{file.file}`", *[_passed(file.counts[scheme]) for scheme in result.blocks]]
        for file in result.files
    ]
    header = ["passed / failed or refused / skipped", *[f"`{scheme}`" for scheme in result.blocks]]
    return table(header, rows)


def _passed(counts: schema.PeerCounts) -> str:
    return f"{counts.passed} / {counts.failed + counts.refused} / {counts.skipped}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--out", type=Path, default=PAGE)
    args = parser.parse_args(argv)
    try:
        result = schema.load(args.result)
    except schema.ResultError as error:
        print(f"peer_page.py: {error}", file=sys.stderr)
        return 1
    if not isinstance(result, schema.PeerSuite):
        print(f"peer_page.py: {args.result}: expected kind='peer_suite'", file=sys.stderr)
        return 1
    text = page(result)
    if args.check:
        current = args.out.read_text("utf-8") if args.out.exists() else ""
        if current != text:
            print(f"peer_page.py: {args.out} is not up to date: run make report", file=sys.stderr)
        return int(current != text)
    args.out.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
