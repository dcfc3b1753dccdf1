"""The files beside the code, and what is said where they are missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_quant import resources
from ds_quant.resources import NAMES, resource_dir


@pytest.mark.parametrize("name", NAMES)
def test_an_installed_folder_goes_before_that_of_a_checkout(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "ds_quant"
    monkeypatch.setattr(resources, "__file__", str(package / "resources.py"))
    with pytest.raises(FileNotFoundError, match=f"without its {name}/ folder .*: reinstall"):
        resource_dir(name)
    (tmp_path / name).mkdir()
    assert resource_dir(name) == tmp_path / name
    (package / name).mkdir(parents=True)
    assert resource_dir(name) == package / name


def test_another_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="'docs': allowed: configs, cuda"):
        resource_dir("docs")
