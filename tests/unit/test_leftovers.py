"""Build locks that ended runs left behind are found; those of running builds are not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds_quant import leftovers
from ds_quant.tools import doctor

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's /proc")


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    path = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    path.parent.mkdir(parents=True)
    return path


def test_a_lock_that_nobody_holds_is_named_with_its_operator_and_remedy(lock: Path) -> None:
    assert doctor.builds().status == "ok"
    lock.touch()
    assert leftovers.idle_locks() == [lock]
    check = doctor.builds()
    assert check.status == "note" and check.fix == f"rm {lock}"
    assert "operator cpu_adam that did not end" in check.found


def test_a_lock_that_goes_while_locks_are_compared_is_not_named(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock.touch()

    def end_of_build() -> list[str]:
        lock.unlink()
        return []

    monkeypatch.setattr(leftovers, "_open_files", end_of_build)
    assert leftovers.idle_locks() == []


def test_a_lock_of_a_build_that_goes_on_is_left_alone(lock: Path) -> None:
    """torch opens it so, and closes it when the operator is built."""
    descriptor = os.open(lock, os.O_CREAT | os.O_EXCL)
    try:
        assert leftovers.idle_locks() == []
    finally:
        os.close(descriptor)
    assert leftovers.idle_locks() == [lock]


def test_builds_lie_where_torch_puts_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch.utils import cpp_extension

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    assert str(leftovers.build_folder()) == cpp_extension.get_default_build_root()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert str(leftovers.build_folder()) == cpp_extension.get_default_build_root()
