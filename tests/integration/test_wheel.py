"""The built wheel: its contents, and that it works where there is no checkout."""

from __future__ import annotations

import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.integration.processes import run

ROOT = Path(__file__).resolve().parents[2]


def test_wheel_carries_sources_resources_and_entry_points(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (
            archive.read(name).decode() for name in names if name.endswith("entry_points.txt")
        )
    expected = {f"ds_quant/{p.relative_to(ROOT)}" for p in ROOT.glob("configs/*.*")}
    expected |= {f"ds_quant/{p.relative_to(ROOT)}" for p in ROOT.glob("cuda/**/*.cu*")}
    expected |= {str(p.relative_to(ROOT)) for p in ROOT.glob("ds_quant/**/*.py")}
    expected.add("ds_quant/py.typed")
    assert expected <= names, sorted(expected - names)
    assert any(name.startswith("ds_quant/cuda/") for name in names)
    assert any(name.endswith("/LICENSE") for name in names)
    outside = {name for name in names if name.split("/")[0].split("-")[0] != "ds_quant"}
    assert not outside, "the wheel must not claim other top-level names"
    assert "[torch.backends]\nds_quant = ds_quant._autoload:activate" in entry_points
    assert "[console_scripts]\nds_quant = ds_quant.tools.cli:main" in entry_points
    assert "-py3-none-" in wheel.name, "ctypes loads the library, whatever the version of Python"
    libraries = {name for name in names if name.endswith(".so")}
    compiled = shutil.which("c++") is not None
    assert libraries == ({"ds_quant/kernels/_native.so"} if compiled else set())


def test_source_archive_holds_tests_and_docs_and_a_homepage_makes_links_absolute(
    wheel: Path, tmp_path: Path
) -> None:
    source = wheel.parent / "source"  # the copy that the wheel was built from
    code = (
        "import sys; sys.path.insert(0, '.ci'); "
        "import build_backend; build_backend.build_sdist(sys.argv[1])"
    )
    home = "https://example.org/ds_quant"
    run(sys.executable, "-c", code, tmp_path, cwd=source, DS_QUANT_HOMEPAGE=home)
    (packed,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        members = {m.name.partition("/")[2]: m for m in archive.getmembers()}
        text = archive.extractfile(members["PKG-INFO"]).read().decode()
    assert {"tests/conftest.py", "docs/install.md", "Makefile", "constraints.txt"} <= set(members)
    sources = {f"ds_quant/kernels/{name}" for name in ("native.cpp", "lossless.cpp", "native.hpp")}
    assert sources | {"cuda/encode.cu", "benchmarks/compare.py"} <= set(members)
    assert f"Project-URL: Issues, {home}/issues" in text
    assert f"]({home}/blob/main/docs/install.md)" in text and "](docs/" not in text
    assert f"git clone {home} ds_quant" in text and "HOMEPAGE" not in text


def test_import_torch_activates_the_installed_plugin(python: Path, tmp_path: Path) -> None:
    code = (
        "import sys, torch; assert 'ds_quant' in sys.modules; import ds_quant; "
        "print(ds_quant.__file__); assert not {'deepspeed', 'cupy'} & set(sys.modules)"
    )
    file = run(python, "-c", code, cwd=tmp_path)
    assert file.startswith(str(python.parents[1])), "imported from somewhere else"


def test_resources_are_found_in_the_installed_package(python: Path, tmp_path: Path) -> None:
    code = (
        "from ds_quant.config.schema import parse_block\n"
        "from ds_quant.config.presets import preset_names\n"
        "from ds_quant.resources import resource_dir\n"
        "[parse_block({'scheme': name}).to_scheme() for name in preset_names()]\n"
        "print(*preset_names(), resource_dir('cuda').is_dir(), resource_dir('configs'))"
    )
    *names, cuda, configs = run(python, "-c", code, cwd=tmp_path).split()
    assert {"full_precision", "qsdp", "sdp4bit", "zeropp"} <= set(names) and cuda == "True"
    assert Path(configs).parts[-2:] == ("ds_quant", "configs")
    command = (python.parent / "ds_quant", "validate", f"{configs}/ds_qsdp_zero3.json")
    assert "valid" in run(*command, cwd=tmp_path)


@pytest.mark.slow
def test_plain_deepspeed_reports_a_mistake_in_the_block(python: Path, tmp_path: Path) -> None:
    code = (
        "from deepspeed.runtime.config import DeepSpeedConfig\n"
        "try: DeepSpeedConfig({'train_batch_size': 1, 'quantised_comm': {}})\n"
        "except ValueError as error: print(type(error).__name__, error)"
    )
    out = run(python, "-c", code, cwd=tmp_path, DS_ACCELERATOR="cpu")
    assert "ConfigError quantised_comm" in out and "did you mean quantized_comm?" in out
