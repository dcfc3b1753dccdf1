"""Tests of the package, of its pages and of what is in benchmarks/, whose modules they import."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
