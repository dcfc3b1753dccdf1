"""Rehearses benchmarks/gpu_suite.sh without a GPU: Python and the tools of NVIDIA are fakes.

    python -m tests.kernels.fake_gpu_machine             # in real time, 13 minutes at most
    python -m tests.kernels.fake_gpu_machine --speed 20

A fake takes as long as its section is expected to, and writes the file that ``--json`` names.
Prints when every section began and ended.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SUITE = ROOT / "benchmarks" / "gpu_suite.sh"
PROGRAMS = ("python3", "nvidia-smi", "ncu", "compute-sanitizer")

# Seconds that a section is expected to take on a machine that has compiled nothing yet.
EXPECTED = {
    "1": {"driver": 2, "doctor": 18, "equality": 90, "one_size": 50, "prediction": 3},
    "2": {
        "fsdp2_2": 35,
        "precompile": 25,
        "zero3_2": 50,
        "fsdp2_2x2": 50,
        "memcheck": 75,
        "racecheck": 55,
        "counters": 30,
        "stores": 30,
        "priority": 15,
        "zero2_2": 45,
        "fsdp2_replicas": 30,
        "loss": 600,
    },
}
# `python -c` asks for packages, `python -m pip` installs them: at once.
_FAKE = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>"$FAKE_CALLS"
case "$1 ${2:-}" in "-c "* | "-m pip") exit 0 ;; esac
name="$(sed -n 's/^== \\([a-z0-9_]*\\) .*/\\1/p' "$CACHE"/work_*/running)"
while [ $# -gt 0 ]; do
    [ "$1" = --json ] && case "${2:-}" in /*) echo '{"fake": true}' >"$2" ;; esac
    shift
done
sleep "$(awk -v name="$name" '$1 == name {print $2}' "$FAKE_SECONDS")"
echo "last words of $name"
"""


class Section(NamedTuple):
    """A section that was run. start, end: seconds since the begin of its call."""

    name: str
    limit: int
    start: float
    end: float
    verdict: str


class Rehearsal(NamedTuple):
    """Both calls. calls: command lines that fakes were started with."""

    sections: dict[str, list[Section]]
    exit_codes: dict[str, int]
    calls: list[str]
    out: Path


def rehearse(folder: Path, *, speed: float) -> Rehearsal:
    """Run both calls in a folder. speed: how many times faster than expected; inf: at once."""
    programs, wheels, out = folder / "bin", folder / "wheels", folder / "out"
    for each in (programs, wheels):
        each.mkdir()
    (wheels / "deepspeed-0-py3-none-any.whl").touch()
    for program in PROGRAMS:
        (programs / program).write_text(_FAKE)
        (programs / program).chmod(0o755)
    seconds, calls = folder / "seconds", folder / "calls"
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CACHE": str(folder / "cache"),
        "WHEELS": str(wheels),
        "FAKE_SECONDS": str(seconds),
        "FAKE_CALLS": str(calls),
    }
    for variable in ("PYTHON", "LIMIT", "DRY"):
        environment.pop(variable, None)
    sections = {}
    exit_codes = {}
    for part, expected in EXPECTED.items():
        lines = (f"{name} {number / speed:.3f}\n" for name, number in expected.items())
        seconds.write_text("".join(lines))
        sections[part], exit_codes[part] = _call(part, out, environment)
    return Rehearsal(sections, exit_codes, calls.read_text().splitlines(), out)


def _call(part: str, out: Path, environment: dict[str, str]) -> tuple[list[Section], int]:
    begin = monotonic()
    sections: list[Section] = []
    start, name, limit = 0.0, "", 0
    with subprocess.Popen(
        [str(SUITE), part, str(out)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.match(r"== (\w+) \(at most (\d+) s\)", line):
                name, limit, start = found[1], int(found[2]), monotonic() - begin
            elif name and line.startswith(f"{name}: "):
                verdict = line.strip().partition(": ")[2].partition(",")[0]
                sections.append(Section(name, limit, start, monotonic() - begin, verdict))
            elif found := re.match(r"(\w+): (no time left|needs .*)", line):
                now = monotonic() - begin
                sections.append(Section(found[1], 0, now, now, found[2]))
    return sections, process.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--speed", type=float, default=1.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = rehearse(Path(folder), speed=args.speed)
        for part, sections in found.sections.items():
            for section in sections:
                times = f"{section.start:6.1f} to {section.end:6.1f} s, at most {section.limit:3}"
                print(f"call {part}  {section.name:<16}{times}  {section.verdict}")
        print(*(f"{path.name} {path.stat().st_size} bytes" for path in sorted(found.out.iterdir())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
