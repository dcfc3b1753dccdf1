"""Fixtures: the wheel, built once, and a new virtual environment with it.

The environment finds torch and deepspeed by a .pth file, so nothing is downloaded.
"""

from __future__ import annotations

import fcntl
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.integration.processes import run

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCES = shutil.ignore_patterns(
    *(".git*", ".venv", ".*_cache", ".hypothesis"),
    *("build", "dist", "*.egg-info", "__pycache__", "results"),
)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Return the wheel. The first worker that needs it builds it, the others wait."""
    pytest.importorskip("setuptools", minversion="77")
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "wheel"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return next(folder.glob("*.whl"), None) or build(folder)


def build(folder: Path) -> Path:
    """Build the wheel from a copy of the sources, because setuptools leaves files behind.

    The C++ library is compiled with -Og, as -O3 takes four times as long.
    """
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=NOT_SOURCES)
    backend = source / ".ci" / "build_backend.py"
    code = backend.read_text("utf-8")
    assert '"-O3"' in code
    backend.write_text(code.replace('"-O3"', '"-Og"'), "utf-8")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder)
    run(*pip, "wheel", source, *options, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of a new environment with the wheel and our packages by .pth file."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    site = Path(run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder)[:-1])
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # The outer environment may have ds_quant, too, if it was installed without -e.
    install = ("install", "--no-deps", "--no-index", "--ignore-installed", wheel)
    run(sys.executable, "-m", "pip", "--python", python, *install, cwd=folder)
    return python
