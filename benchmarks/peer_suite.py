"""Runs DeepSpeed's own ZeRO tests with the plugin active and compares with runs without it.

    python benchmarks/peer_suite.py --tree PATH_TO_DEEPSPEED_SOURCE --json peer_suite.json
    python benchmarks/peer_suite.py --tree ... --select test_zero.py checkpoint --keyword Frozen

Every file runs without the plugin and once per scheme, on the CPU. The tests stay as they are and
where they are: a pytest plugin puts the block into every config that enables ZeRO 1 to 3. Quantized
schemes get min_numel 0, because the models of these tests have a few dozen weights. Listed is
every test that passes without the plugin and does not with it, with its explanation from
peer/explained.json; the exit code is 1 if one has none. With --work, what has been run is kept
there and not run again. May import the package peer and rich.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from peer import block, facts, outcomes, process, results
from peer.files import FILES
from peer.outcomes import PLAIN, Test
from peer.process import Setting, SuiteError
from peer.runner import Runner
from rich.console import Console

BLOCKS: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    "full_precision": {"scheme": "full_precision"},
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tree", type=Path, help="DeepSpeed's sources; default: those of an editable install")
    add("--schemes", nargs="+", default=["full_precision", "qsdp"])
    add("--select", nargs="+", default=[], help="parts of file names; default: all files")
    add("--keyword", help="pytest's -k")
    add("--ranks", type=int, default=4, help="tests that need more are skipped")
    add("--timeout", type=float, default=1200, help="seconds per file and scheme")
    add("--test-timeout", type=float, default=120, help="seconds without news from a test")
    add("--build-timeout", type=float, default=1800, help="seconds to compile CPU operators")
    add("--jobs", type=int, default=1, help="schemes that run at the same time")
    add("--work", type=Path, help="folder that keeps what has been run, logs too")
    add("--json", type=Path, help="result file")
    args = parser.parse_args(argv)
    if PLAIN in args.schemes:
        parser.error(f"--schemes: {PLAIN!r} always runs")
    return args


# ---- the tree ----


def find_tree(given: Path | None) -> Path:
    """The folder of DeepSpeed's sources.

    Raises:
        SuiteError: there are no tests in it.
    """
    installed = metadata.version("deepspeed")
    if given is None:
        spec = importlib.util.find_spec("deepspeed")
        given = Path(spec.origin or "").parents[1]
        hint = "an installed package comes without tests"
    else:
        hint = "not a source tree of DeepSpeed"
    tree = given.resolve()
    for part in ("tests/conftest.py", "tests/unit/common.py"):
        if not (tree / part).is_file():
            raise SuiteError(
                f"no {part} in {tree}: {hint}. Give one with --tree, for example that of\n"
                f"  git clone --depth 1 --branch v{installed} "
                "https://github.com/deepspeedai/DeepSpeed"
            )
    return tree


def version_of(tree: Path) -> str:
    path = tree / "version.txt"
    return path.read_text("utf-8").strip() if path.exists() else "unknown"


def require_pytest() -> None:
    if importlib.util.find_spec("pytest") is None:
        raise SuiteError('pytest is not installed: pip install ".[dev]"')


def choose(tree: Path, patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """Files to run, and those that this version of DeepSpeed lacks.

    Raises:
        SuiteError: no file is left.
    """
    wanted = [file for file in FILES if not patterns or any(part in file for part in patterns)]
    present = [file for file in wanted if (tree / "tests" / "unit" / file).is_file()]
    if not present:
        raise SuiteError(f"no test file left; --select {patterns}, known files:\n{_lines(FILES)}")
    return present, [file for file in wanted if file not in present]


def _lines(words: Sequence[str]) -> str:
    return "\n".join(f"  {word}" for word in words)


# ---- running ----


def block_of(scheme: str) -> dict[str, Any] | None:
    """The block of a scheme; quantized ones reach the smallest matrices."""
    return BLOCKS[scheme] if scheme in BLOCKS else {"scheme": scheme, "min_numel": 0}


def run(
    args: argparse.Namespace, tree: Path, files: Sequence[str], console: Console
) -> results.Found:
    """All files without the plugin and under all schemes."""
    settings = {
        scheme: Setting(
            tree=tree,
            block=block_of(scheme),
            ranks=args.ranks,
            file_limit=args.timeout,
            test_limit=args.test_timeout,
            keyword=args.keyword,
        )
        for scheme in (PLAIN, *args.schemes)
    }
    process.check_start(settings[args.schemes[0]], args.build_timeout)
    stop = threading.Event()

    def run_scheme(scheme: str) -> dict[str, dict[str, Test]]:
        events = _events(args, tree, scheme)
        Runner(setting=settings[scheme], events=events, stop=stop).run(files)
        found = facts.read(events)
        _tell(console, scheme, found)
        return {file: outcomes.tests_of(file, found) for file in files}

    with ThreadPoolExecutor(args.jobs) as pool:
        try:
            by_scheme = dict(zip(settings, pool.map(run_scheme, settings), strict=True))
        finally:
            stop.set()  # when interrupted: the threads end their processes
    return {file: {scheme: by_scheme[scheme][file] for scheme in settings} for file in files}


def _events(args: argparse.Namespace, tree: Path, scheme: str) -> Path:
    """The file of facts of a scheme; with another tree, version or setting it begins anew."""
    from ds_quant import __version__

    how = {
        "event": "how",
        "versions": [version_of(tree), metadata.version("deepspeed"), __version__],
        "block": block_of(scheme),
        "keyword": args.keyword,
        "ranks": args.ranks,
    }
    events = args.work / f"{scheme}.jsonl"
    if facts.read(events)[:1] != [how]:
        events.parent.mkdir(parents=True, exist_ok=True)
        events.unlink(missing_ok=True)
        block.append(events, **how)
    return events


def _tell(console: Console, scheme: str, found: facts.Facts) -> None:
    numbers = outcomes.counts(outcomes.tests(found).values())
    shown = ", ".join(f"{count} {name}" for name, count in numbers.items() if count)
    console.print(f"{scheme}: {shown or 'nothing'}")
    for fact in found:
        if fact["event"] == "unreadable":
            console.print(f"[yellow]{fact['file']} cannot be collected: {fact['error']}")
        if fact["event"] == "given_up":
            console.print(f"[yellow]{fact['file']} was not finished within --timeout")
        if fact["event"] == "left_behind":
            console.print(f"[yellow]{fact['processes']} processes outlived pytest and were ended")


def _arguments(args: argparse.Namespace) -> dict[str, Any]:
    """What made the result, without this machine's paths."""
    given = {
        k: v for k, v in vars(args).items() if k not in ("work", "json", "build_timeout", "jobs")
    }
    return {**given, "tree": "PATH_TO_DEEPSPEED_SOURCE"}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    console = Console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that nothing is left behind
    with tempfile.TemporaryDirectory() as scratch:
        args.work = (args.work or Path(scratch)).resolve()
        try:
            require_pytest()
            tree = find_tree(args.tree)
            files, missing = choose(tree, args.select)
            installed = metadata.version("deepspeed")
            if version_of(tree) != installed:
                console.print(f"[yellow]tests of {version_of(tree)}, DeepSpeed {installed}: some "
                              "may fail without the plugin too")  # fmt: skip
            if missing:
                console.print(f"[yellow]not in this tree: {', '.join(missing)}")
            found = run(args, tree, files, console)
        except SuiteError as error:
            print(f"peer_suite.py: {error}", file=sys.stderr)
            return 2
    result = results.result_of(
        found,
        arguments=_arguments(args),
        blocks={scheme: block_of(scheme) for scheme in (PLAIN, *args.schemes)},
        tree_version=version_of(tree),
    )
    results.show(result, console)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(result.model_dump_json(indent=1) + "\n", "utf-8")
    return int(any(row.why is None for row in result.differences))


if __name__ == "__main__":
    sys.exit(main())
