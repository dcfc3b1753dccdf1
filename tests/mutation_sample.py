"""Draw mutants of the package at random and see how many of them a test kills.

    TEST_COVERAGE=FOLDER python -m pytest -p tests.mutation_coverage -m "QUICK"
    python -m tests.mutation_sample --coverage FOLDER --results FILE [--rooms ROOM ...] [--seed N]

QUICK is ``not (gpu or slow or clients or alone)``: tests that compare times would fail by chance.
The mutants are those of mutmut (``pip install mutmut coverage``) and of three operators below. One
mutant is made at a place, and places are drawn without preference. A mutant is tried on the tests
that run its line, fastest first, until one fails or their time is spent. FILE gets a line of JSON
per mutant; those that are in it already are not tried again.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import coverage
import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_string

from tests.mutants import ROOT, copied
from tests.mutation_trial import Trial, import_once, verdicts

BUDGET = 60  # seconds of the tests that one mutant is tried on
NOT_CODE = (cst.Annotation, cst.Import, cst.ImportFrom)


# ---- mutants ----


def left_out_call(node: cst.Expr) -> Iterable[cst.CSTNode]:
    """Leave out a statement that is one call."""
    if isinstance(node.value, cst.Call):
        yield cst.Pass()


def left_out_method(node: cst.Call) -> Iterable[cst.CSTNode]:
    """Leave out a method without arguments: ``x.clone()`` becomes ``x``."""
    if isinstance(node.func, cst.Attribute) and not node.args:
        yield node.func.value


def left_out_element(node: cst.Tuple) -> Iterable[cst.CSTNode]:
    """Leave out an element of a tuple, such as a part of a key."""
    for place in range(len(node.elements)):
        others = [e for i, e in enumerate(node.elements) if i != place]
        if others:
            others[-1] = others[-1].with_changes(comma=cst.Comma())
            yield node.with_changes(elements=others)


OPERATORS = (
    *mutation_operators,
    (cst.Expr, left_out_call),
    (cst.Call, left_out_method),
    (cst.Tuple, left_out_element),
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A node of a module with what one operator makes of it."""

    file: str
    module: cst.Module
    line: int
    node: cst.CSTNode
    operator: str
    changed: Sequence[cst.CSTNode]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change. file: below the checkout; old and new: the code of the node; code: the file's."""

    number: int
    file: str
    line: int
    operator: str
    old: str
    new: str
    code: str


class _Places(cst.CSTVisitor):
    """Collect the places of a module."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, file: str, module: cst.Module) -> None:
        super().__init__()
        self.file, self.module, self.found = file, module, list[Place]()
        self.targets = set[int]()

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, NOT_CODE):
            return False
        if isinstance(node, (cst.AssignTarget, cst.For, cst.CompFor)):
            self.targets.add(id(node.target))
        for kind, operator in OPERATORS:
            if isinstance(node, kind) and not self._is_left(node, operator):
                if changed := list(operator(node)):
                    line = self.get_metadata(PositionProvider, node).start.line
                    self.found.append(
                        Place(
                            file=self.file,
                            module=self.module,
                            line=line,
                            node=node,
                            operator=operator.__name__,
                            changed=changed,
                        )
                    )
        return True

    def _is_left(self, node: cst.CSTNode, operator: object) -> bool:
        """Return True for sentences, whose words no test compares, and for targets."""
        sentence = operator is operator_string and " " in getattr(node, "value", "")
        return sentence or id(node) in self.targets


def places(files: Iterable[Path]) -> list[Place]:
    """Every place of some files, in their order."""
    found = []
    for path in sorted(files):
        wrapper = MetadataWrapper(cst.parse_module(path.read_text("utf-8")))
        visitor = _Places(path.relative_to(ROOT).as_posix(), wrapper.module)
        wrapper.visit(visitor)
        found += visitor.found
    return found


def sample(found: list[Place], seed: int, count: int) -> Iterator[Mutant]:
    """Draw ``count`` mutants, the same for the same seed; a smaller count is the beginning."""
    draw = random.Random(seed)
    draw.shuffle(found)
    number = 0
    for place in found:
        changed = draw.choice(place.changed)
        if number == count:
            return
        code = place.module.deep_replace(place.node, changed).code
        if not _differs(place.module.code, code):
            continue
        yield Mutant(
            number=number,
            file=place.file,
            line=place.line,
            operator=place.operator,
            old=place.module.code_for_node(place.node).strip(),
            new=place.module.code_for_node(changed).strip(),
            code=code,
        )
        number += 1


def _differs(old: str, new: str) -> bool:
    """Return True if the new code is Python and another program."""
    try:
        return ast.dump(ast.parse(old)) != ast.dump(ast.parse(new))
    except SyntaxError:
        return False


# ---- tests ----


class Covered:
    """Which tests run a line, by a folder that ``mutation_coverage`` has filled."""

    def __init__(self, folder: Path) -> None:
        together = folder / "all"
        if not together.exists():
            parts = [str(path) for path in folder.rglob("lines.*")]
            joined = coverage.Coverage(data_file=str(together))
            joined.combine(parts, keep=True)
            joined.save()
        self.data = coverage.CoverageData(str(together))
        self.data.read()
        self.files = {f[f.rindex("/ds_quant/") + 1 :]: f for f in self.data.measured_files()}
        self.seconds: dict[str, float] = {}
        for path in folder.rglob("seconds.json"):
            self.seconds |= json.loads(path.read_text())

    def tests(self, file: str, line: int) -> list[str]:
        """Tests that run the statement of a line, fastest first, within the budget of time.

        A statement that runs when its module is imported belongs to the tests that run something
        of its function or class, else of its module.
        """
        by_line = self._by_line(file)
        for first, last in _ranges(ROOT / file, line):
            lines = [tests for at, tests in by_line.items() if first <= at <= last]
            if not any(lines):
                return []
            if named := {test for tests in lines for test in tests if test in self.seconds}:
                return self._affordable(named)
        return []

    @cache  # noqa: B019
    def _by_line(self, file: str) -> dict[int, list[str]]:
        return self.data.contexts_by_lineno(self.files[file]) if file in self.files else {}

    def _affordable(self, tests: set[str]) -> list[str]:
        chosen, total = [], 0.0
        for test in sorted(tests, key=lambda name: (self.seconds[name], name)):
            total += self.seconds[test]
            if chosen and total > BUDGET:
                break
            chosen.append(test)
        return chosen


def _ranges(path: Path, line: int) -> list[tuple[int, int]]:
    """First and last lines of the statement at a line, of what it stands in, and of the module."""
    text = path.read_text("utf-8")
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.stmt, ast.ExceptHandler)):
            continue
        first, last = node.lineno, node.end_lineno or node.lineno
        if decorators := getattr(node, "decorator_list", []):
            first = min(decorator.lineno for decorator in decorators)
        if not first <= line <= last:
            continue
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.append((first, last))
        body = getattr(node, "body", None)
        if not body:
            found.append((first, last))
        elif line < body[0].lineno:
            found.append((first, max(first, body[0].lineno - 1)))
    found.sort(key=lambda lines: lines[1] - lines[0])
    return [*found, (1, text.count("\n") + 1)]


# ---- the run ----


def score(killed: int, count: int) -> str:
    """Killed share with its interval of 95 % after Wilson."""
    if not count:
        return "no mutant"
    z, share = 1.96, killed / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    reach = (
        z * math.sqrt(share * (1 - share) / count + z * z / (4 * count**2)) / (1 + z * z / count)
    )
    low, high = 100 * (middle - reach), 100 * (middle + reach)
    return f"{killed} of {count} killed, {100 * share:.1f} % ({low:.1f} to {high:.1f} %)"


def run(mutants: Sequence[Mutant], covered: Covered, results: Path, workers: int) -> None:
    """Try the mutants that the results lack and add them."""
    done = {row["number"] for row in _rows(results)}
    waiting = {mutant.number: mutant for mutant in mutants if mutant.number not in done}
    trials = []
    for mutant in waiting.values():
        if tests := covered.tests(mutant.file, mutant.line):
            seconds = sum(covered.seconds[test] for test in tests)
            trials.append(
                Trial(
                    number=mutant.number,
                    file=mutant.file,
                    code=mutant.code,
                    tests=tests,
                    seconds=seconds,
                )
            )
        else:
            how = {"killed": False, "by": "no test runs it", "failed": False}
            _note(results, mutant, **how, seconds=0, tests=0)
    with tempfile.TemporaryDirectory() as folder:
        folders = _compiled_copies(Path(folder), workers)
        for trial, verdict in verdicts(trials, folders):
            _note(results, waiting[trial.number], tests=len(trial.tests), **vars(verdict))


def _compiled_copies(folder: Path, count: int) -> list[Path]:
    """Copies of the checkout, in which pytest has compiled every test once for all trials."""
    first, *others = [folder / str(number) for number in range(count)]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(copied(first))}
    subprocess.run(command, cwd=first, env=environment, stdout=subprocess.DEVNULL, check=True)
    for other in others:
        shutil.copytree(first, other)
    return [first, *others]


def _rows(results: Path) -> list[dict]:
    return (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )


def _note(results: Path, mutant: Mutant, **outcome: object) -> None:
    row = {name: value for name, value in vars(mutant).items() if name != "code"} | outcome
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")
    verdict = "killed  " if outcome["killed"] else "SURVIVED"
    print(
        f"{verdict} {outcome['seconds']:5.1f} s  {mutant.number} {mutant.file}:{mutant.line} "
        f"{mutant.operator}: {mutant.old!r} -> {mutant.new!r}  {outcome['by']}",
        flush=True,
    )


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation_sample", description=__doc__)
    parser.add_argument("--coverage", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE")
    paths = list(ROOT.glob("ds_quant/**/*.py"))
    rooms = sorted({path.parent.name for path in paths})
    but_tools = [room for room in rooms if room != "tools"]
    parser.add_argument("--rooms", nargs="+", choices=rooms, default=but_tools)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first that is tried")
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--workers", type=int, default=2, help="mutants tried at once")
    arguments = parser.parse_args()
    files = [path for path in paths if path.parent.name in arguments.rooms]
    mutants = list(sample(places(files), arguments.seed, arguments.count))[arguments.first :]
    import_once()
    run(mutants, Covered(arguments.coverage), arguments.results, arguments.workers)
    drawn = range(arguments.first, arguments.count)
    rows = [row for row in _rows(arguments.results) if row["number"] in drawn]
    print(f"seed {arguments.seed}: {score(sum(row['killed'] for row in rows), len(rows))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
