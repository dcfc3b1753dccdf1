"""Runs DeepSpeed's tests of ZeRO, or torch's of FSDP2, with the plugin, and compares with runs
without it.

    python benchmarks/peer_suite.py --tree PATH_TO_DEEPSPEED_SOURCE --json peer_suite.json
    python benchmarks/peer_suite.py --tree ... --select test_zero.py checkpoint --keyword Frozen
    python benchmarks/peer_suite.py --of fsdp2 --tree PATH_TO_TORCH_SOURCE --json peer_suite.json

Every file runs without the plugin and once per scheme, on the CPU. Quantized schemes get min_numel
0, because the models of these tests have a few dozen weights. DeepSpeed's tests are not changed:
peer/deepspeed/plugin.py puts the block into every config that enables ZeRO 1 to 3. Those of torch
name the CPU instead of CUDA, see peer/fsdp2/plugin.py, and need the package expecttest. Tests that
pass without the plugin only are listed with their explanations; the exit code is 1 if an
explanation is missing, or if a test has another outcome or number of fronts than in --baseline. A
file whose JUnit XML is in --work is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import launch
import report
import sections
from peer import notes
from peer.projects import PROJECTS, Project

BENCHMARKS = Path(__file__).resolve().parent
BUILD_SECONDS = 3600  # of two operators, on a busy machine
PACKAGE_NAMES = {"deepspeed": "DeepSpeed", "torch": "torch"}
PLAIN = "without"  # the runs without the plugin
REFUSAL = re.compile(r"quantized_comm cannot be used with .*")
COUNTS = (
    "collected",
    "passed",
    "failed",
    "refused",
    "skipped",
    "not_run",
    "with_plugin",
    "communicating",
)


class SuiteError(SystemExit):
    """The suite cannot run. The message names the remedy."""


class Ended(NamedTuple):
    """The result of one test under one scheme.

    outcome: passed, failed, refused or skipped. refused: the plugin has refused its settings, under
        FSDP2 those of all its models.
    error: of a skipped test the reason; the refusal.
    """

    outcome: str
    error: str = ""
    world: int = 0  # largest number of ranks with the block
    fronts: int = 0  # models that were attached under FSDP2


Found = dict[str, dict[str, dict[str, Ended]]]  # by file, scheme and test


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.parser(__doc__)
    add = parser.add_argument
    add("--of", choices=PROJECTS, default="deepspeed", help="the project whose tests run")
    add("--tree", type=Path, required=True, help="its sources")
    add("--schemes", nargs="+", help="default: those of the committed result")
    add("--select", nargs="+", default=[], help="parts of file names; default: all files")
    add("--keyword", help="pytest's -k")
    add("--ranks", type=int, default=4, help="tests that need more are skipped")
    add("--timeout", type=float, default=1200, help="seconds per file and scheme")
    add("--test-timeout", type=int, default=120, help="seconds of a test")
    add("--work", type=Path, help="folder that keeps JUnit files and logs")
    add("--baseline", type=Path, help="result file whose outcomes must repeat")
    add("--json", type=Path, help="result file")
    args = parser.parse_args(argv)
    args.schemes = args.schemes or list(PROJECTS[args.of].schemes)
    if PLAIN in args.schemes:
        parser.error(f"--schemes: {PLAIN!r} always runs")
    return args


def check_tree(tree: Path, project: Project) -> None:
    """Refuse a folder without tests.

    Raises:
        SuiteError: names the command that fetches the sources.
    """
    for part in project.needed:
        if not (tree / part).is_file():
            raise SuiteError(
                f"no {part} in {tree}: an installed package comes without tests. Give a source "
                f"tree with --tree, for example that of\n  {project.advice}"
            )


def choose(tree: Path, patterns: Sequence[str], project: Project) -> list[str]:
    """Return the files to run.

    Raises:
        SuiteError: no file is left.
    """
    files = project.selection["files"]
    wanted = [file for file in files if not patterns or any(part in file for part in patterns)]
    folder = tree / project.tests / project.files
    present = [file for file in wanted if (folder / file).is_file()]
    if not present:
        known = "\n  ".join(files)
        raise SuiteError(f"no test file left; --select {patterns}, known files:\n  {known}")
    return present


def tests_of(args: argparse.Namespace, project: Project) -> Path:
    """Return the folder from which tests run: that of the tree, or one with adapted copies."""
    folder: Path = args.tree / project.tests
    if project.adapted is None:
        return folder
    copies: Path = args.work / "tests"
    copies.mkdir(exist_ok=True)
    for file in folder.glob("*.py"):
        (copies / file.name).write_text(project.adapted(file.read_text("utf-8")), "utf-8")
    return copies


def block_of(scheme: str, project: Project) -> dict[str, Any] | None:
    """Return the block of a scheme, None without the plugin."""
    return None if scheme == PLAIN else project.block(scheme)


def run(
    command: Sequence[str], log: Path, scheme: str, args: argparse.Namespace, limit: float
) -> None:
    """Run Python with some arguments in the tree, for ``limit`` seconds at most."""
    block = block_of(scheme, PROJECTS[args.of])
    paths = [BENCHMARKS, BENCHMARKS.parent, args.tests, os.environ.get("PYTHONPATH", "")]
    environment = {
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
        "PYTHONDONTWRITEBYTECODE": "1",  # leave the source tree unchanged
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",  # several ranks share the cores
        "LOCAL_SIZE": str(args.ranks),  # DeepSpeed's number of accelerators
        "DS_UNITTEST_TIMEOUT": str(args.test_timeout),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(args.test_timeout),
        notes.RANKS: str(args.ranks),
        "DS_QUANT_DISABLE": "1" if block is None else "0",
        notes.BLOCK: "" if block is None else json.dumps(block),
        notes.NOTES: str(log.with_suffix(".notes")),
    }
    argv, env = [sys.executable, *command], os.environ | environment
    with launch.started([(argv, env)], log, args.tests) as (process,):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(limit)


def run_file(file: str, scheme: str, args: argparse.Namespace) -> dict[str, Ended]:
    """Return the results of a file's tests, none if it did not end in time."""
    project = PROJECTS[args.of]
    stem = str(args.work / scheme / file.replace("/", "_").removesuffix(".py"))
    xml, log = Path(f"{stem}.xml"), Path(f"{stem}.log")
    xml.parent.mkdir(parents=True, exist_ok=True)
    if not xml.exists():
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--show-capture=no"]
        command += ["-p", "peer.notes", "-p", project.plugin]
        command += [f"--basetemp={stem}.tmp", f"--junitxml={xml}"]
        if args.keyword:
            command += ["-k", args.keyword]
        for one in project.selection["left_out"]:
            command.append(f"--deselect={project.files}/{one['test']}")
        run([*command, f"{project.files}/{file}"], log, scheme, args, args.timeout)
    return read(xml) if xml.exists() else {}


def check_start(args: argparse.Namespace) -> None:
    """Import what the ranks import, and compile DeepSpeed's operators, to report errors early.

    Raises:
        SuiteError: an import failed. The message has the end of the output.
    """
    start = PROJECTS[args.of].start
    log, done = args.work / "start.log", f"{start} can be imported"
    run(["-c", f"import {start}; print({done!r})"], log, args.schemes[0], args, BUILD_SECONDS)
    printed = log.read_text("utf-8", "replace").splitlines()
    if done not in printed:
        tail = "\n".join(printed[-15:])
        raise SuiteError(
            f"{start} cannot be imported (a file 'lock' that an interrupted build left in torch's "
            f"extensions folder makes it wait, too):\n{tail}"
        )


# ---- results ----


def read(xml: Path) -> dict[str, Ended]:
    """Return the results of a JUnit file by test name. A test whose teardown fails has failed."""
    tests: dict[str, Ended] = {}
    for case in ElementTree.parse(xml).iter("testcase"):
        properties = {p.get("name", ""): p.get("value", "") for p in case.iter("property")}
        name = properties.get(notes.TEST, case.get("name", ""))
        earlier = tests.get(name)  # the call of a test whose teardown is a case of its own
        if earlier is None or earlier.outcome in ("passed", "skipped"):
            outcome, error = _outcome(case, properties)
            world, fronts = (int(properties.get(key, 0)) for key in (notes.WORLD, notes.FRONT))
            tests[name] = Ended(outcome, error, world, fronts)
    return tests


def _outcome(case: ElementTree.Element, properties: Mapping[str, str]) -> tuple[str, str]:
    """Return outcome and error of a test case. properties: what its ranks have noted."""
    rank_error = properties.get(notes.RANK_ERROR, "")
    parts = {part.tag: part for part in case}
    failure = parts.get("failure", parts.get("error"))
    if failure is not None:
        outcome = "failed"
        error = failure.get("message", "")
        if "exited with error code" in error and rank_error:
            error = rank_error  # else the traceback of a rank, which is longer
        elif rank_error not in error:
            error = f"{error}; before that, on a rank: {rank_error}"
        refusal = REFUSAL.search(error)
        if refusal:
            outcome = "refused"
            error = refusal.group()
    elif "skipped" in parts:
        outcome = "skipped"
        error = parts["skipped"].get("message", "")
    else:
        # A test that trains several models may have others that are attached.
        refused = properties.get(notes.REFUSAL, "")
        outcome = "refused" if refused and properties.get(notes.FRONT) == "0" else "passed"
        error = refused
    without_paths = re.sub(r"/\S*/tests/(?=unit/)", "", error)
    return outcome, " ".join(without_paths.split())[:400]


def counts(tests: Mapping[str, Mapping[str, Ended]]) -> dict[str, dict[str, int]]:
    """Count the outcomes of a file's tests by scheme, and the tests with the plugin."""
    names = set[str]().union(*tests.values())
    found = {}
    for scheme, by_name in tests.items():
        outcomes = Counter(test.outcome for test in by_name.values())
        found[scheme] = {
            "collected": len(names),
            "passed": outcomes["passed"],
            "failed": outcomes["failed"],
            "refused": outcomes["refused"],
            "skipped": outcomes["skipped"],
            "not_run": len(names - by_name.keys()),
            "with_plugin": sum(test.world > 0 for test in by_name.values()),
            "communicating": sum(test.world > 1 for test in by_name.values()),
        }
    return found


def differences(
    plain: Mapping[str, Ended], active: Mapping[str, Ended], scheme: str, known: Sequence[dict]
) -> list[dict[str, str | None]]:
    """Return the tests that pass without the plugin only, with their explanations.

    known: explanations.
    """
    rows: list[dict[str, str | None]] = []
    for name, before in plain.items():
        test = active.get(name, Ended("not_run"))
        if before.outcome != "passed" or test.outcome == "passed":
            continue
        rows.append(
            {
                "test": name,
                "scheme": scheme,
                "outcome": test.outcome,
                "error": test.error,
                "why": _explanation(name, test, scheme, known),
            }
        )
    return rows


def _explanation(name: str, test: Ended, scheme: str, known: Sequence[dict]) -> str | None:
    if test.outcome == "refused":
        return "refused by the plugin"
    for entry in known:
        if scheme not in entry["schemes"]:
            continue
        if re.search(entry["test"], name) and re.search(entry["error"], test.error):
            return entry["why"]
    return None


def content(found: Found, schemes: Sequence[str], project: Project) -> dict[str, Any]:
    """Return the content of the result file without its provenance."""
    known = project.explained
    plain: dict[str, Ended] = {}
    failing: list[dict[str, str | None]] = []
    for tests in found.values():
        plain |= tests[PLAIN]
        for scheme in schemes:
            failing += differences(tests[PLAIN], tests[scheme], scheme, known)
    skipped = Counter(test.error for test in plain.values() if test.outcome == "skipped")
    return {
        "blocks": {scheme: block_of(scheme, project) for scheme in (PLAIN, *schemes)},
        "files": [{"file": file, "counts": counts(tests)} for file, tests in found.items()],
        "differences": failing,
        "broken": [
            {"test": name, "error": test.error}
            for name, test in plain.items()
            if test.outcome == "failed"
        ],
        "skipped": dict(skipped.most_common()),
        "tests": by_test(found),
    }


def by_test(found: Found) -> dict[str, dict[str, list[Any]]]:
    """Return outcome and number of fronts by test and scheme."""
    rows: dict[str, dict[str, list[Any]]] = {}
    for tests in found.values():
        for scheme, by_name in tests.items():
            for name, test in by_name.items():
                rows.setdefault(name, {})[scheme] = [test.outcome, test.fronts]
    return rows


def changed(
    tests: Mapping[str, Mapping[str, list[Any]]], baseline: Mapping[str, Mapping[str, list[Any]]]
) -> list[str]:
    """Describe the tests with another outcome or number of fronts than in the baseline."""
    lines = []
    for name, by_scheme in tests.items():
        for scheme, now in by_scheme.items():
            before = baseline.get(name, {}).get(scheme)
            if now != before:
                lines.append(f"{scheme}: {name}: {now}, in the baseline {before}")
    return lines


def totals(result: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Add up the counts of all files, by scheme."""
    sums = {}
    for scheme in result["blocks"]:
        counts_of_files = [file["counts"][scheme] for file in result["files"]]
        sums[scheme] = {name: sum(count[name] for count in counts_of_files) for name in COUNTS}
    return sums


def cells(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table."""
    rows = []
    for scheme, sums in totals(result).items():
        rows.append([f"`{scheme}`", *(str(sums[name]) for name in COUNTS)])
    return ["scheme", *(name.replace("_", " ") for name in COUNTS)], rows


def section(result: dict[str, Any]) -> tuple[str, str]:
    """Return heading and body of the page: see sections.py."""
    project = PROJECTS[result["arguments"].get("of", "deepspeed")]
    return project.title, (
        f"Tests of {PACKAGE_NAMES[project.package]} {result['tree_version']} without and with the "
        "plugin; every difference is explained in\n[peer_suite.md](../../docs/peer_suite.md).\n\n"
        + sections.table(*cells(result))
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an exception ends the ranks
    arguments = {name: value for name, value in vars(args).items() if name != "work"}
    with tempfile.TemporaryDirectory() as scratch:
        args.work = (args.work or Path(scratch)).resolve()
        args.work.mkdir(parents=True, exist_ok=True)
        args.tree = args.tree.resolve()
        project = PROJECTS[args.of]
        check_tree(args.tree, project)
        files = choose(args.tree, args.select, project)
        args.tests = tests_of(args, project)
        check_start(args)
        found = {}
        for file in files:
            print(file, flush=True)
            found[file] = {
                scheme: run_file(file, scheme, args) for scheme in (PLAIN, *args.schemes)
            }
    result = content(found, args.schemes, project)
    report.show(*cells(result))
    for row in result["differences"]:
        print(f"{row['scheme']}: {row['outcome']}: {row['test']}")
        print(f"    {row['error']}\n    {row['why'] or 'UNEXPLAINED'}")
    moved = []
    if args.baseline is not None:
        before = json.loads(args.baseline.read_text("utf-8"))["tests"]
        moved = changed(result["tests"], before)
        print("\n".join(moved))
    if args.json is not None:
        path = args.tree / "version.txt"
        version = path.read_text("utf-8").strip() if path.exists() else "unknown"
        arguments["tree"] = f"PATH_TO_{project.package.upper()}_SOURCE"
        report.save(args.json, "peer_suite", arguments, tree_version=version, **result)
    surprises = [row for row in result["differences"] if row["why"] is None]
    return int(bool(surprises or moved))


if __name__ == "__main__":
    sys.exit(main())
