"""Runs the sections of one part of benchmarks/gpu_suite.sh under one deadline; see there.

summary_PART.json is written before the first section and after every one, so that a part that is
killed leaves what it has found. A section that fails, takes too long or lacks a package is reported
and the next one runs. Standard library only: the machine may have nothing else.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import plan
import table
from plan import Section

LEAST = 5.0  # seconds; with less left no section is started
GRACE = 5.0  # seconds that a program gets to write its file before its section ends


@dataclass
class Part:
    """What one part has found so far, and where it goes."""

    name: str
    out: Path
    work: Path
    dry: bool
    seconds: float
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)

    def results(self) -> dict[str, Any]:
        """Name of a section -> what it wrote as JSON, None if nothing."""
        return {name: _read(self.work / f"{name}.json") for name in self.sections}

    def write(self) -> None:
        """Summary and archive, each replaced as a whole."""
        document = {"part": self.name, "dry": self.dry, "seconds": self.seconds}
        document |= {"sections": self.sections, "results": self.results()}
        self._replace(
            f"summary_{self.name}.json",
            lambda path: path.write_text(json.dumps(document, indent=1) + "\n", "utf-8"),
        )
        self._replace(f"{self.name}.tar.gz", self._pack)

    def _pack(self, path: Path) -> None:
        with tarfile.open(path, "w:gz") as archive:
            for file in sorted(self.work.iterdir()):
                archive.add(file, f"{self.name}/{file.name}")

    def _replace(self, name: str, write: Callable[[Path], object]) -> None:
        beside = self.work.parent / f"{name}.part"
        write(beside)
        shutil.move(beside, self.out / f"{name}.part")
        os.replace(self.out / f"{name}.part", self.out / name)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _tail(log: Path, lines: int) -> list[str]:
    """The end of a log; nothing if the section did not run."""
    text = log.read_text("utf-8", "replace") if log.exists() else ""
    return [line[:300] for line in text.splitlines()[-lines:]]


def missing(section: Section) -> str | None:
    """What the section needs and this machine lacks."""
    packages = [name for name in section.packages if importlib.util.find_spec(name) is None]
    programs = [name for name in section.programs if shutil.which(name) is None]
    return ", ".join([*packages, *programs]) or None


def run(section: Section, part: Part, seconds: float) -> str:
    """Run a section for at most so long, its whole process group ends with it; the verdict."""
    limit = max(seconds - GRACE, 1.0)
    values = {"{work}": str(part.work), "{name}": section.name, "{limit}": f"{limit:.0f}"}
    command = [_filled(word, values) for word in section.command]
    log = part.work / f"{section.name}.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **section.environment},
        )  # fmt: skip
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "time limit"
        finally:
            _end(process)
    print("\n".join(_tail(log, 4)))
    return "passed" if code == 0 else f"failed ({code})"


def _filled(word: str, values: dict[str, str]) -> str:
    """A word of a command; braces of anything else stay."""
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def _end(process: subprocess.Popen) -> None:
    """End what is left of a section, ranks that it started included."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def run_all(sections: Sequence[Section], part: Part) -> None:
    """All sections in order, each with its budget or what is left of the part's time."""
    deadline = time.monotonic() + part.seconds
    for section in sections:
        part.sections[section.name] = {"result": "not reached", "budget": section.seconds}
    part.write()
    for section in sections:
        entry, start = part.sections[section.name], time.monotonic()
        left = deadline - start
        lacking = missing(section)
        if lacking is not None:
            entry["result"] = f"needs {lacking}"
        elif left < LEAST:
            entry["result"] = "no time left"
        else:
            entry |= {"result": "running", "limit": round(min(section.seconds, left), 1)}
            part.write()
            print(f"== {section.name} (at most {entry['limit']:.0f} s)", flush=True)
            entry["result"] = run(section, part, entry["limit"])
        entry["seconds"] = round(time.monotonic() - start, 1)
        if entry["result"] != "passed" or _read(part.work / f"{section.name}.json") is None:
            entry["tail"] = _tail(part.work / f"{section.name}.log", 40)
        print(f"{section.name}: {entry['result']}, {entry['seconds']} s", flush=True)
        part.write()


def _stop(*_: object) -> None:
    raise SystemExit("gpu_suite: ended by a signal; the summary has what was found")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one part; 1 if a section failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=sorted(plan.PARTS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="emptied first")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _stop)
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    part = Part(args.part, args.out, args.work, args.dry, args.seconds)
    run_all(plan.PARTS[args.part](args.dry), part)
    print("\n".join(table.lines(part.sections, part.results())))
    results = [entry["result"] for entry in part.sections.values()]
    return int(any(result.startswith(("failed", "time limit")) for result in results))


if __name__ == "__main__":
    sys.exit(main())
