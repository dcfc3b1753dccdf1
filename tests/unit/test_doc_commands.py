"""Every command of README and docs/ runs in this suite: here, or in the test that
golden/covered_commands.yaml names.

Commands are the lines of code blocks marked ``bash``. A new one fails until it runs here or has an
entry; an entry whose command or test has gone fails too.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ds_quant.tools.cli import _parser, main
from tests.unit.test_estimate import QWEN3_30B_A3B

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = (
    "git", "make", "sbatch", "pip", "python", "ds_quant", "deepspeed", "accelerate", "torchrun",
    "sudo", "benchmarks/",
)  # fmt: skip
TESTS = yaml.safe_load(
    (Path(__file__).parent / "golden" / "covered_commands.yaml").read_text("utf-8")
)
COVERED = tuple(begin for begins in TESTS.values() for begin in begins)


def commands() -> list[str]:
    """Without comments, in the order of the pages."""
    found = []
    for page in PAGES:
        for language, body in BLOCK.findall(page.read_text("utf-8")):
            if language == "bash":
                lines = (re.sub(r"\s+#.*", "", line).strip() for line in body.splitlines())
                found += [line for line in lines if line and not line.startswith("#")]
    return list(dict.fromkeys(found))


HERE = [command for command in commands() if not command.startswith(COVERED)]


def test_entries_are_commands_of_a_page_and_name_tests_that_exist() -> None:
    assert not [begin for begin in COVERED if not any(c.startswith(begin) for c in commands())]
    for name in TESTS:
        path, _, function = name.partition("::")
        assert f"\ndef {function}(" in (ROOT / "tests" / path).read_text("utf-8"), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_with_commands_are_marked_as_such(page: Path) -> None:
    for language, body in BLOCK.findall(page.read_text("utf-8")):
        assert language, f"a block without a language: {body}"
        lines = body.splitlines() if language != "bash" else []
        assert not [line for line in lines if line.startswith(tuple(f"{p} " for p in PROGRAMS))]


@pytest.mark.parametrize("command", HERE)
def test_command_runs(command: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """In a folder that looks like the user's and like the checkout at once."""
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    rate = {"bytes_per_second": 1e9, "latency": 1e-4}
    facts = {"kind": "probe", "version": 1, "nodes": 2, "node_size": 8, "backend": "nccl",
             "intra": rate, "inter": rate}  # fmt: skip
    (tmp_path / "probe.json").write_text(json.dumps(facts))
    (tmp_path / "metrics.jsonl").write_text('{"step": 100, "weights/inter/bytes": 1e6}\n')
    (tmp_path / "ds_config.json").write_text(
        '{"zero_optimization": {"mics_shard_size": 2, "stage": 3}}'
    )
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    (tmp_path / "new.json").write_text('{"quantized_comm": {}, "zero_optimization": {"stage": 2}}')
    monkeypatch.chdir(tmp_path)
    program, *arguments = shlex.split(command)
    if program == "ds_quant":
        assert main(arguments) == 0, capsys.readouterr().err
    else:
        assert program == "python", (
            f"run {command!r} here, or name its test in covered_commands.yaml"
        )
        subprocess.run([sys.executable, *arguments], check=True, timeout=120)


def test_ds_quant_commands_outside_of_blocks_parse() -> None:
    """Those in running text, with what stands for a value or the rest left out."""
    tools = "validate|schema|doctor|migrate|probe|estimate|plot"
    for page in PAGES:
        for command in re.findall(rf"`(ds_quant (?:{tools}) [^`]*)`", page.read_text("utf-8")):
            if "..." not in command:
                _parser().parse_args(shlex.split(command)[1:])


def test_targets_of_make_exist() -> None:
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    targets = set(re.findall(r"[`\n]make ([\w-]+)", text))
    assert {"demo", "test", "test-all", "install", "report"} <= targets
    if shutil.which("make"):
        subprocess.run(["make", "--dry-run", *sorted(targets)], cwd=ROOT, check=True,
                       capture_output=True)  # fmt: skip


def test_extras_exist() -> None:
    setup = (ROOT / "setup.cfg").read_text("utf-8")
    for page in PAGES:
        for extras in re.findall(r"(?:ds_quant|\"\.)\[([\w,]+)\]", page.read_text("utf-8")):
            for extra in extras.split(","):
                assert re.search(rf"^{extra} =", setup, re.MULTILINE), extra


def test_commands_that_made_the_results_still_parse_or_are_of_a_finished_study(monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    page = (ROOT / "docs" / "reproducing.md").read_text("utf-8")
    finished = re.findall(r"`([\w*]+\.json)`", page.partition("**Finished studies.**")[2])
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        command = json.loads(path.read_text("utf-8"))["command"]
        _, script, *arguments = shlex.split(command)
        if any(path.match(name) for name in finished):
            said = rf"after `git checkout \w{{7}}`: `{re.escape(command)}`"
            assert re.search(said, path.with_suffix(".md").read_text("utf-8")), path
            continue
        module = importlib.import_module(Path(script).stem)
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        assert module.parse_args()
