"""The built wheel: its contents, and that it works where there is no checkout.

The wheel is installed into a new virtual environment that sees torch and deepspeed through a
.pth file, so that nothing is downloaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCES = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "results")

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Output of a command that sees none of the checkout; fails with what it printed."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    inherited.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    inherited.pop("DS_QUANT_DISABLE", None)
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because setuptools leaves build/ and *.egg-info behind."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=NOT_SOURCES)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder)
    run(*pip, "wheel", source, *options, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of an environment with the wheel and, through a .pth file, our packages."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    site = Path(run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder)[:-1])
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = ("install", "--no-deps", "--no-index", wheel)
    run(sys.executable, "-m", "pip", "--python", python, *install, cwd=folder)
    return python


def test_wheel_carries_sources_resources_and_entry_points(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (
            archive.read(name).decode() for name in names if name.endswith("entry_points.txt")
        )
    expected = {f"ds_quant/{p.relative_to(ROOT)}" for p in ROOT.glob("configs/*.*")}
    expected |= {f"ds_quant/{p.relative_to(ROOT)}" for p in ROOT.glob("cuda/**/*.cu*")}
    expected |= {str(p.relative_to(ROOT)) for p in ROOT.glob("ds_quant/**/*.py")}
    assert expected <= names, sorted(expected - names)
    assert any(name.startswith("ds_quant/cuda/") for name in names)
    assert any(name.endswith("/LICENSE") for name in names)
    outside = {name for name in names if name.split("/")[0].split("-")[0] != "ds_quant"}
    assert not outside, "the wheel must not claim other top-level names"
    assert "[torch.backends]\nds_quant = ds_quant._autoload:activate" in entry_points
    assert "[console_scripts]\nds_quant = ds_quant.cli:main" in entry_points


def test_import_torch_activates_the_installed_plugin(python: Path, tmp_path: Path) -> None:
    code = (
        "import sys, torch; assert 'ds_quant' in sys.modules; import ds_quant; "
        "print(ds_quant.__file__); assert not {'deepspeed', 'cupy'} & set(sys.modules)"
    )
    file = run(python, "-c", code, cwd=tmp_path)
    assert file.startswith(str(python.parents[1])), "imported from somewhere else"


def test_activation_can_be_left_to_an_import(python: Path, tmp_path: Path) -> None:
    code = "import sys, torch; assert 'ds_quant' not in sys.modules"
    run(python, "-c", code, cwd=tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def test_resources_are_found_in_the_installed_package(python: Path, tmp_path: Path) -> None:
    code = (
        "from ds_quant.config import parse_block; from ds_quant.presets import preset_names\n"
        "from ds_quant.resources import resource_dir\n"
        "[parse_block({'scheme': name}).to_scheme() for name in preset_names()]\n"
        "print(*preset_names(), resource_dir('cuda').is_dir(), resource_dir('configs'))"
    )
    *names, cuda, configs = run(python, "-c", code, cwd=tmp_path).split()
    assert names == ["full_precision", "qsdp", "qsdp_w4g4"] and cuda == "True"
    assert Path(configs).parts[-2:] == ("ds_quant", "configs")
    command = (python.parent / "ds_quant", "validate", f"{configs}/ds_qsdp_zero3.json")
    assert "valid" in run(*command, cwd=tmp_path)


def test_plain_deepspeed_reports_a_mistake_in_the_block(python: Path, tmp_path: Path) -> None:
    code = (
        "from deepspeed.runtime.config import DeepSpeedConfig\n"
        "try: DeepSpeedConfig({'train_batch_size': 1, 'quantised_comm': {}})\n"
        "except ValueError as error: print(type(error).__name__, error)"
    )
    out = run(python, "-c", code, cwd=tmp_path, DS_ACCELERATOR="cpu")
    assert "ConfigError quantised_comm" in out and "did you mean quantized_comm?" in out
