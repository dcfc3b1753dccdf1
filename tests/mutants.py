"""Breaks one line at a time and checks that a test fails.

``mutants.yaml`` has a row per mutant, by file. ``says`` describes the error, ``old`` and ``new``
are texts of the line, ``test`` is the file or node id below tests/ that must fail. Run it from the
checkout:

    python -m tests.mutants [--only WORD] [--check]

Every test runs on the unchanged code first, because a test that fails anyway kills nothing.
``--check`` runs no test: it lists the rows that no longer fit the code.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".yaml")
LIMIT = 300  # seconds of the tests of one mutant
LIBRARY = "ds_quant/kernels/_native.so"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One wrong line. file: path in the checkout. test: file or node id below tests/."""

    file: str
    says: str
    old: str
    new: str
    test: str

    def problem(self) -> str | None:
        """Return the reason why the row does not fit the code, None if it fits."""
        path, (test, *names) = ROOT / self.file, self.test.split("[")[0].split("::")
        if not path.is_file():
            return f"no file {self.file}"
        if (count := path.read_text("utf-8").count(self.old)) != 1:
            return f"{self.file} has its old text {count} times, allowed: once"
        if self.new == self.old:
            return "old and new text are equal"
        source = ROOT / "tests" / test
        if not source.is_file() or not all(f"def {name}(" in _text(source) for name in names):
            return f"no test {self.test}"
        return None

    def apply(self, copy: Path) -> None:
        """Break the code in a copy of the checkout."""
        path = copy / self.file
        path.write_text(path.read_text("utf-8").replace(self.old, self.new), "utf-8")
        if path.suffix in (".cpp", ".hpp"):
            build(copy)


@cache
def _text(path: Path) -> str:
    return path.read_text("utf-8")


def rows() -> list[Mutant]:
    """Return the rows of the table."""
    table = yaml.safe_load(TABLE.read_text("utf-8"))
    return [Mutant(file=file, **row) for file, found in table.items() for row in found]


def problems() -> list[str]:
    """Return a message for every row that does not fit the code."""
    return [
        f"{TABLE.name}: {row.says!r}: {problem}; write the row anew, or drop it with its behaviour"
        for row in rows()
        if (problem := row.problem()) is not None
    ]


# ---- the run ----


def build(copy: Path) -> None:
    """Compile the C++ kernels of a copy."""
    sys.path.insert(0, str(ROOT / ".ci"))
    from build_backend import NATIVE

    flags = [*NATIVE.extra_compile_args, "-shared", "-fPIC", "-o", LIBRARY]
    subprocess.run(["g++", *NATIVE.sources, *flags], cwd=copy, check=True)


def copied(folder: Path) -> Path:
    """Copy the tracked and untracked files, and the compiled kernels. Return the folder."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in (*filter(None, names.split("\0")), LIBRARY):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def outcome(copy: Path, *tests: str) -> str:
    """Run tests in a copy. Return "passed", "failed", or the reason for another end."""
    more = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += [f"tests/{test}" for test in tests]
    try:
        done = subprocess.run(
            command, cwd=copy, env=os.environ | more, timeout=LIMIT,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no end in {LIMIT} s"
    if done.returncode == 0:
        return "passed" if re.search(r"\d+ passed", done.stdout) else "skipped"
    if done.returncode == 1 and re.search(r"\d+ failed", done.stdout):
        return "failed"
    return f"pytest ended with {done.returncode}"


def run(chosen: list[Mutant]) -> int:
    """Run the mutants and print a line for each. Return the number of those not killed."""
    lost = 0
    healthy: dict[str, str] = {}  # outcome of every test on the unchanged code
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder))
        for row in chosen:
            if row.test not in healthy:
                healthy[row.test] = outcome(copy, row.test)
            verdict, start = f"test {healthy[row.test]} without it", time.monotonic()
            if healthy[row.test] == "passed":
                row.apply(copy)
                found = outcome(copy, row.test)
                verdict = {"failed": "killed", "passed": "survived"}.get(found, found)
                for name in {row.file, LIBRARY}:
                    if (ROOT / name).is_file():
                        shutil.copy2(ROOT / name, copy / name)
            lost += verdict != "killed"
            print(f"{verdict:9} {time.monotonic() - start:5.1f} s  {row.says}", flush=True)
    print(f"{len(chosen) - lost} of {len(chosen)} killed")
    return lost


def main() -> int:
    """Check the table, then run the chosen mutants."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="rows with this word in file, text or test")
    parser.add_argument("--check", action="store_true", help="compare the table with the code")
    arguments = parser.parse_args()
    if found := problems():
        print("\n".join(found), file=sys.stderr)
        return 2
    chosen = [r for r in rows() if arguments.only in f"{r.file} {r.says} {r.test}"]
    return 0 if arguments.check else int(run(chosen) > 0)


if __name__ == "__main__":
    sys.exit(main())
