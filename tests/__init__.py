"""Tests of the package, its pages and benchmarks/.

Modules of benchmarks/ are scripts that import each other by their file names. Tests import them in
the same way: this package, which tests/conftest.py belongs to, puts the folder on the path.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
