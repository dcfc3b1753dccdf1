"""Draw mutants of the package at random and count those that a test kills.

    pip install mutmut
    python -m tests.mutation_sample --rooms policy --tests unit/test_cost.py [--count N]

The operators are those of mutmut and three below. A place in the code has one mutant, and places
are drawn without preference. Every mutant is tried on the same tests, whose files are given below
tests/. They run on the unchanged code first, because tests that fail anyway kill nothing.
"""

from __future__ import annotations

import argparse
import ast
import math
import random
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_string

from tests.mutants import ROOT, copied, outcome

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
    """A node of a module, and the nodes that one operator puts in its stead."""

    file: str
    module: cst.Module
    line: int
    node: cst.CSTNode
    operator: str
    changed: Sequence[cst.CSTNode]


@dataclass(frozen=True, kw_only=True)
class RandomMutant:
    """One change. file: below the checkout; old and new: code of the node; code: of the file."""

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
        self.file = file
        self.module = module
        self.found: list[Place] = []
        self.targets: set[int] = set()  # ids of nodes

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, NOT_CODE):
            return False
        if isinstance(node, (cst.AssignTarget, cst.For, cst.CompFor)):
            self.targets.add(id(node.target))
        for kind, operator in OPERATORS:
            if not isinstance(node, kind) or self._is_left(node, operator):
                continue
            changed = list(operator(node))
            if not changed:
                continue
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
        is_sentence = operator is operator_string and " " in getattr(node, "value", "")
        return is_sentence or id(node) in self.targets


def places(files: Iterable[Path]) -> list[Place]:
    """Return every place of some files, in their order."""
    found: list[Place] = []
    for path in sorted(files):
        wrapper = MetadataWrapper(cst.parse_module(path.read_text("utf-8")))
        visitor = _Places(path.relative_to(ROOT).as_posix(), wrapper.module)
        wrapper.visit(visitor)
        found += visitor.found
    return found


def sample(found: Sequence[Place], seed: int) -> Iterator[RandomMutant]:
    """Draw mutants, in an order that the seed gives."""
    draw = random.Random(seed)
    for place in draw.sample(found, len(found)):
        changed = draw.choice(place.changed)
        code = place.module.deep_replace(place.node, changed).code
        if not _differs(place.module.code, code):
            continue
        yield RandomMutant(
            file=place.file,
            line=place.line,
            operator=place.operator,
            old=place.module.code_for_node(place.node).strip(),
            new=place.module.code_for_node(changed).strip(),
            code=code,
        )


def _differs(old: str, new: str) -> bool:
    """Return True if the new code is Python and another program."""
    try:
        return ast.dump(ast.parse(old)) != ast.dump(ast.parse(new))
    except SyntaxError:
        return False


# ---- the run ----


def score(killed: int, count: int) -> str:
    """Return the killed share with its 95 % interval after Wilson."""
    z = 1.96
    share = killed / count
    scale = 1 + z * z / count
    middle = (share + z * z / (2 * count)) / scale
    reach = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count**2)) / scale
    low = 100 * (middle - reach)
    high = 100 * (middle + reach)
    return f"{killed} of {count} killed, {100 * share:.1f} % ({low:.1f} to {high:.1f} %)"


def run(mutants: Sequence[RandomMutant], tests: Sequence[str]) -> int:
    """Try the mutants and print a line for each. Return the number of those killed."""
    killed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder))
        unchanged = outcome(copy, *tests)
        if unchanged != "passed":
            raise RuntimeError(f"without a mutant: {unchanged}, allowed: passed; choose --tests")
        for mutant in mutants:
            (copy / mutant.file).write_text(mutant.code, "utf-8")
            found = outcome(copy, *tests)
            shutil.copy2(ROOT / mutant.file, copy / mutant.file)
            verdict = "SURVIVED" if found == "passed" else "killed"
            killed += verdict == "killed"
            change = f"{mutant.operator}: {mutant.old!r} -> {mutant.new!r}"
            print(f"{verdict:8} {mutant.file}:{mutant.line} {change}  {found}", flush=True)
    return killed


def main() -> int:
    """See the module."""
    paths = list(ROOT.glob("ds_quant/**/*.py"))
    rooms = sorted({path.parent.name for path in paths})
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation_sample",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rooms", nargs="+", choices=rooms, required=True)
    parser.add_argument("--tests", nargs="+", required=True, help="patterns of files below tests/")
    parser.add_argument("--count", type=int, default=60, help="mutants to try")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    folder = ROOT / "tests"
    tests = sorted(
        {
            path.relative_to(folder).as_posix()
            for pattern in arguments.tests
            for path in folder.glob(pattern)
        }
    )
    if not tests:
        parser.error(f"no file below tests/ fits --tests {' '.join(arguments.tests)}")
    files = [path for path in paths if path.parent.name in arguments.rooms]
    mutants = list(islice(sample(places(files), arguments.seed), arguments.count))
    print(f"seed {arguments.seed}: {score(run(mutants, tests), len(mutants))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
