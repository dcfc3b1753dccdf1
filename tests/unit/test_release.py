"""Version, changelog, citation and the workflow of a public CI agree with the sources."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

import ds_quant
from ds_quant.config.presets import preset_names

ROOT = Path(__file__).resolve().parents[2]


def test_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## (\S+)$", (ROOT / "docs" / "changelog.md").read_text("utf-8"), re.M)
    assert versions[0] == ds_quant.__version__
    assert versions == sorted(versions, reverse=True)


def test_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "docs" / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == ds_quant.__version__
    assert citation["license"] == "Apache-2.0" and citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(citation)
    schemes = {entry["scope"].removeprefix("scheme ") for entry in citation["references"]}
    assert schemes <= set(preset_names())


def test_public_ci_runs_what_this_repository_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".ci" / "github.yml").read_text("utf-8"))
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert ".ci/run" in commands
    targets = set(
        re.findall(r"^([a-z-]+)[\w -]*:(?!=)", (ROOT / "Makefile").read_text("utf-8"), re.M)
    )
    for command in commands:
        assert command == ".ci/run" or command.removeprefix("make ") in targets, command
    assert commands.index("make install") == 0
