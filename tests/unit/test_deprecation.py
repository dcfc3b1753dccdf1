"""Earlier names of the public interface work, and warn of their removal."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings

import pytest
from packaging.version import Version

import ds_quant
from ds_quant.config import environment
from ds_quant.config.presets import RENAMED, RENAMED_UNTIL, preset_names
from ds_quant.config.schema import parse_block


@pytest.mark.parametrize("earlier", RENAMED)
def test_an_earlier_name_of_a_scheme_warns_and_works(earlier: str) -> None:
    with pytest.warns(FutureWarning, match=f'"{earlier}" is now called "{RENAMED[earlier]}"'):
        config = parse_block({"scheme": earlier})
    assert config == parse_block({"scheme": RENAMED[earlier]})


def test_an_earlier_name_is_no_name_of_today() -> None:
    assert RENAMED.keys().isdisjoint(preset_names())
    assert set(RENAMED.values()) <= set(preset_names())


def test_the_release_that_removes_a_name_is_to_come() -> None:
    assert Version(ds_quant.__version__) < Version(RENAMED_UNTIL)


def test_one_process_of_a_job_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parse_block({"scheme": "lossless_g3"})


def test_a_user_sees_the_warning_without_asking_for_it() -> None:
    """Python hides a DeprecationWarning that the main program does not raise itself."""
    block = json.dumps({"scheme": "lossless_g3"})
    program = f"from ds_quant.config.schema import parse_block; parse_block({block})"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert '"lossless_g3" is now called "lossless_w_g3"' in ended.stderr
    assert f"ds_quant {RENAMED_UNTIL} removes" in ended.stderr


def test_the_variable_warns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.VARIABLE, "lossless_g3")
    with pytest.warns(FutureWarning, match="lossless_w_g3"):
        config = environment.parse({"zero_optimization": {"stage": 2}})
    assert config is not None and config.scheme == "lossless_w_g3"
