"""Outputs of commands in golden/commands.yaml: whole as ``out``, or as ``contains`` the lines that
a case is about, with single spaces.

At most ten tables are whole, one per layout: every scheme, a block of one's own, one node, FSDP2,
a report of validate, with codecs, as JSON, of several files, and two files of migrate. All other
cases hold lines. After a deliberate change: python -m tests.unit.test_golden_commands, and read the
difference. It leaves ``contains`` as it is: change these lines by hand.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from ds_quant.tools.cli import main

GIVEN = ("run", "files", "environment")
GOLDEN = Path(__file__).with_name("golden") / "commands.yaml"
CASES: dict[str, dict[str, Any]] = yaml.safe_load(GOLDEN.read_text("utf-8"))


def played(case: dict[str, Any]) -> dict[str, Any]:
    """Exit code and output of a command, and JSON that it writes, in a folder with its files."""
    for name, content in case.get("files", {}).items():
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    given = {path: path.read_bytes() for path in Path().iterdir()}
    out, err = io.StringIO(), io.StringIO()
    streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with streams[0], streams[1], patch.dict(os.environ):
        os.environ.pop("RANK", None)
        os.environ.update(case.get("environment", {}))
        try:
            code = main(shlex.split(case["run"]))
        except SystemExit as exit:
            code = exit.code
    changed = [p for p in Path().glob("*.json") if p.read_bytes() != given.get(p)]
    said = {"code": code, "out": out.getvalue(), "err": err.getvalue()}
    return said | ({"written": {p.name: p.read_text("utf-8") for p in changed}} if changed else {})


def squeezed(line: str) -> str:
    """Return ``line`` with one space between words: widths of columns are not compared."""
    return " ".join(line.split())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_command_prints_what_is_recorded(case: dict[str, Any], tmp_path, monkeypatch) -> None:
    if "--model-config" in case["run"]:
        pytest.importorskip("transformers", reason="needs transformers")
    if case["run"].startswith("plot"):
        pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'ds_quant[bench]'")
    monkeypatch.chdir(tmp_path)
    found = played(case)
    lines = found["out"].splitlines()
    if case["run"].startswith("estimate") and not {"--all", "--ds-config"} & {*case["run"].split()}:
        assert max(map(len, ["", *lines])) <= 80, "fits a terminal"
    if "contains" in case:
        del found["out"]
        assert case["contains"], "a case is about one line or more"
        printed = [squeezed(line) for line in lines]
        found["contains"] = [line for line in case["contains"] if line in printed]
    assert found == {name: case[name] for name in case if name not in GIVEN}


def test_few_tables_are_whole() -> None:
    whole = [name for name, case in CASES.items() if case.get("out", "").count("\n") > 5]
    assert len(whole) <= 10, whole


def _literal(dumper: yaml.Dumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def write() -> None:
    """Write CASES to the golden file."""
    yaml.SafeDumper.add_representer(str, _literal)
    text = "# Outputs of commands; see test_golden_commands.py.\n"
    text += yaml.safe_dump(CASES, sort_keys=False, width=1000, allow_unicode=True)
    GOLDEN.write_text(text, "utf-8")


if __name__ == "__main__":
    for case in CASES.values():
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            found = played(case)
            if "contains" in case:
                del found["out"]
            case.update(found)
    write()
