"""The pages in docs/ and README, changelog, citation and the workflow of a public CI agree with the
sources; see also test_doc_commands.py.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
import yaml

import ds_quant
from ds_quant._autoload import DISABLE_VARIABLE
from ds_quant.config import environment
from ds_quant.config.presets import RENAMED, RENAMED_UNTIL, preset_names
from ds_quant.fsdp2.model import AttachedModel
from ds_quant.tools.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]+))?\)")
MESSAGE = re.compile(r"Message: `([^`]+)`")


def test_keys_page_is_what_the_models_say(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "keys.md").read_text("utf-8")
    assert main(["schema", "--markdown"]) == 0
    assert capsys.readouterr().out == page, "run: ds_quant schema --markdown > docs/keys.md"


@functools.cache
def strings_of_the_package() -> list[str]:
    """Every string constant, with the constant parts of an f-string one by one."""
    found = []
    for path in ROOT.glob("ds_quant/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


@pytest.mark.parametrize(
    "message", MESSAGE.findall((ROOT / "docs" / "troubleshooting.md").read_text("utf-8"))
)
def test_messages_of_the_troubleshooting_page_exist(message: str) -> None:
    strings = strings_of_the_package()
    # What stands for a value in an f-string or a format ends a fragment, as does the call named.
    fragments = re.split(r"\.\.\.|Accelerator\.get_state_dict", message)
    for fragment in filter(None, (fragment.strip() for fragment in fragments)):
        assert any(fragment in string for string in strings), fragment


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text("utf-8")):
        if target.startswith("http"):
            continue
        path = page.parent / target if target else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    text = (ROOT / ".ci" / "mkdocs.yml").read_text("utf-8")
    shown = re.findall(r"^ +- .+: ([\w.]+\.md)$", text, re.MULTILINE)
    assert sorted(shown) == sorted({"index.md"} | {page.name for page in PAGES[1:]})


def test_every_page_is_listed_in_the_readme_or_with_those_on_quality() -> None:
    first = (ROOT / "README.md").read_text("utf-8")
    quality = (ROOT / "docs" / "quality.md").read_text("utf-8")
    for page in ROOT.glob("docs/*.md"):
        assert f"](docs/{page.name})" in first or f"]({page.name})" in quality, page.name


@functools.cache
def defined_in(path: Path) -> set[str]:
    return set(re.findall(r"^def (test_\w+)\(", path.read_text("utf-8"), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_tests_named_in_backticks_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    files = r"`((?:configs|docs|benchmarks|ds_quant|tests)/[\w./]+\.\w+)(?:::(\w+))?`"
    for name, test in re.findall(files, text):
        assert (ROOT / name).exists(), name
        if test:
            assert test in defined_in(ROOT / name), f"{name}::{test}"
    known = set().union(*map(defined_in, ROOT.glob("tests/*/test_*.py")))
    assert set(re.findall(r"`(test_\w+)`", text)) <= known


# ---- the architecture page ----

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
BLOCKS = re.findall(r"^```text\n(.*?)^```", ARCHITECTURE, re.MULTILINE | re.DOTALL)
# "zero/fetch.py   Fetch.fetch" in a picture: a file and a name that is defined there.
FILE_AND_NAME = re.compile(r"\b(\w+/\w+\.py) +([A-Za-z_][\w.]*)(?![\w./])")
WALKS = [pair for block in BLOCKS for pair in FILE_AND_NAME.findall(block)]


def names_in(path: Path) -> set[str]:
    """Return the functions and classes of a module, and the methods as Class.method."""
    names = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
            names.update(f"{node.name}.{method}" for method in methods)
    return names


@pytest.mark.parametrize(("file", "name"), WALKS)
def test_a_walk_of_the_architecture_page_names_what_is_defined(file: str, name: str) -> None:
    assert name in names_in(ROOT / "ds_quant" / file)


def test_the_walks_are_found_on_the_page() -> None:
    assert ("zero/fetch.py", "Fetch.fetch") in WALKS and ("config/schema.py", "parse") in WALKS
    lines = [line for block in BLOCKS for line in block.splitlines()]
    first = lines.index("DeepSpeed fetches parameters")
    steps = [line for line in lines[first:] if ".py" in line]
    assert len(steps) == sum(bool(FILE_AND_NAME.search(line)) for line in steps) > 10


def test_files_of_the_architecture_page_exist() -> None:
    for name in re.findall(r"\b(?:ds_quant/)?((?:\w+/)?\w+\.py)\b", ARCHITECTURE):
        if name.startswith(("distributed/", "unit/")):
            continue  # tests: test_files_and_tests_named_in_backticks_exist
        assert list((ROOT / "ds_quant").rglob(name)), name


def test_words_of_the_architecture_page_stand_for_classes() -> None:
    """The glossary names a class per word, which the package defines under that name."""
    classes = {name for path in (ROOT / "ds_quant").rglob("*.py") for name in names_in(path)}
    words = re.findall(r"^\| [\w ,]+ \| `(\w+)` \|", ARCHITECTURE, re.MULTILINE)
    assert len(words) > 10 and set(words) <= classes


# ---- a release ----


def test_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## (\S+)$", (ROOT / "docs" / "changelog.md").read_text("utf-8"), re.M)
    if versions[0] == "Unreleased":
        del versions[0]
    assert versions[0] == ds_quant.__version__
    assert versions == sorted(versions, reverse=True)


def test_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == ds_quant.__version__
    assert citation["license"] == "Apache-2.0" and citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(citation)
    schemes = {entry["scope"].removeprefix("scheme ") for entry in citation["references"]}
    assert schemes <= set(preset_names())


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_commands_of_this_repository(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text("utf-8"))
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+)[\w -]*:(?!=)", makefile, re.M))
    for job in workflow["jobs"].values():
        choices = job.get("strategy", {}).get("matrix", {}).get("include", [{}])
        for choice in choices:
            for step in job["steps"]:
                command = step.get("run", "").replace(
                    "${{ matrix.target }}", choice.get("target", "")
                )
                made = re.findall(r"^make ([a-z-]+)", command, re.M)
                assert targets.issuperset(made), command


def test_public_ci_runs_the_whole_check() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    commands = [step.get("run") for step in workflow["jobs"]["check"]["steps"]]
    assert commands[-2:] == ["make install", ".ci/run"]


def test_public_ci_tries_every_python_that_is_allowed() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    rows = workflow["jobs"]["check"]["strategy"]["matrix"]["include"]
    assert [row["python"] for row in rows] == ["3.10", "3.11", "3.12", "3.13"]
    assert "python_requires = >=3.10" in (ROOT / "setup.cfg").read_text("utf-8")


def test_public_ci_tries_the_oldest_deepspeed_and_torch() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
    settings = (ROOT / "setup.cfg").read_text("utf-8")
    (deepspeed,) = re.findall(r"deepspeed>=([\d.]+)", settings)
    (torch,) = re.findall(r"^    torch>=([\d.]+)", settings, re.M)
    assert f"deepspeed=={deepspeed}" in workflow
    assert f"torch=={torch}.*" in workflow


PUBLIC = (ROOT / "docs" / "stability.md").read_text("utf-8")


def test_the_promise_names_what_exists() -> None:
    (row,) = [line for line in PUBLIC.splitlines() if line.startswith("| Python |")]
    names = set(re.findall(r"`(\w+)`", row)) - {"attach"}
    assert names >= {"detach", "state_dict", "found_nonfinite"}
    for name in names:
        assert hasattr(AttachedModel, name) or name == "step", name


def test_the_promise_names_every_variable() -> None:
    for variable in (environment.VARIABLE, environment.KILL_VARIABLE, DISABLE_VARIABLE):
        assert f"`{variable}`" in PUBLIC


def test_the_promise_lists_every_earlier_name() -> None:
    for earlier, today in RENAMED.items():
        assert f"`{earlier}`" in PUBLIC and f"`{today}`" in PUBLIC
    assert f"| {RENAMED_UNTIL} |" in PUBLIC
