"""benchmarks/gpu_suite.sh without a GPU: order, budgets, what a killed part leaves, a dry run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks" / "gpu"), str(ROOT / "benchmarks")]

import plan  # noqa: E402
import suite  # noqa: E402

PY = sys.executable
WRITE = "import json, sys; json.dump({'rows': [], 'shown': ['seen']}, open(sys.argv[1], 'w'))"


def section(name: str, code: str, seconds: float = 60, **options) -> plan.Section:
    command = (PY, "-c", code, f"{{work}}/{name}.json")
    return plan.Section(name=name, seconds=seconds, command=command, **options)


def run(tmp_path: Path, monkeypatch, sections: list[plan.Section], seconds: float = 60) -> dict:
    """The summary of a part of these sections, with the exit code."""
    monkeypatch.setitem(plan.PARTS, "A", lambda dry: sections)
    out, work = tmp_path / "out", tmp_path / "cache" / "work"
    out.mkdir()
    code = suite.main(["A", f"--out={out}", f"--work={work}", f"--seconds={seconds}"])
    assert sorted(path.name for path in out.iterdir()) == ["A.tar.gz", "summary_A.json"]
    return json.loads((out / "summary_A.json").read_text()) | {"code": code}


def test_sections_run_in_order_and_a_bad_one_stops_nothing(tmp_path, monkeypatch, capsys) -> None:
    sections = [
        section("first", WRITE),
        section("fails", "print('last words'); raise SystemExit(3)"),
        section("stuck", f"{WRITE}; import time; time.sleep(60)", seconds=3),
        section("lacking", WRITE, packages=("json", "no_such_package")),
        section("tool", WRITE, programs=("no-such-program",)),
        section("last", WRITE),
    ]
    found = run(tmp_path, monkeypatch, sections)
    assert list(found["sections"]) == [each.name for each in sections]
    assert [entry["result"] for entry in found["sections"].values()] == [
        "passed", "failed (3)", "time limit", "needs no_such_package", "needs no-such-program",
        "passed",
    ]  # fmt: skip
    written = {"rows": [], "shown": ["seen"]}
    assert found["results"] == {
        "first": written, "fails": None, "stuck": written, "lacking": None, "tool": None,
        "last": written,
    }  # fmt: skip
    assert found["code"] == 1
    assert found["sections"]["fails"]["tail"] == ["last words"]
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == f"{'last':<16}seen" and any("last words" in line for line in shown)
    with tarfile.open(tmp_path / "out" / "A.tar.gz") as archive:
        assert "A/fails.log" in archive.getnames() and "A/last.json" in archive.getnames()


KILLED = f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks" / "gpu")!r})
import plan, suite
def sections(dry):
    command = (sys.executable, "-c", {WRITE!r}, "{{work}}/{{name}}.json")
    yield plan.Section(name="done", seconds=60, command=command)
    sleep = (sys.executable, "-c", "import time; time.sleep(600)")
    yield plan.Section(name="under way", seconds=600, command=sleep)
    yield plan.Section(name="never", seconds=60, command=command)
plan.PARTS["A"] = lambda dry: list(sections(dry))
suite.main(["A", "--out", sys.argv[1], "--work", sys.argv[1] + "/../work"])
"""


@pytest.mark.parametrize("number", (signal.SIGKILL, signal.SIGTERM), ids=lambda s: s.name)
def test_a_killed_part_leaves_a_valid_summary(tmp_path, number: signal.Signals) -> None:
    out = tmp_path / "out"
    out.mkdir()
    process = subprocess.Popen([PY, "-c", KILLED, str(out)], start_new_session=True)
    summary = out / "summary_A.json"
    try:
        for _ in range(600):
            if summary.exists() and summary_says(summary, "passed", "running"):
                break
            time.sleep(0.1)
        else:
            pytest.fail("the second section did not start")
        os.kill(process.pid, number)
        process.wait(30)
        found = json.loads(summary.read_text())
        assert summary_says(summary, "passed", "running", "not reached")
        assert found["results"]["done"] == {"rows": [], "shown": ["seen"]}
        with tarfile.open(out / "A.tar.gz") as archive:
            assert "A/done.json" in archive.getnames()
    finally:
        end_sleeper()


def summary_says(path: Path, *results: str) -> bool:
    sections = json.loads(path.read_text())["sections"].values()
    return tuple(entry["result"] for entry in sections)[: len(results)] == results


def end_sleeper() -> None:
    """A section has a session of its own, which outlives a driver that was killed."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
            parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
        except OSError:
            continue
        if b"time.sleep(600)" in words and b"import plan" not in words and parent == "1":
            os.kill(int(folder.name), signal.SIGKILL)


@pytest.mark.parametrize("part", sorted(plan.PARTS))
def test_a_dry_run_has_the_sections_of_a_real_one(part: str) -> None:
    real, dry = (plan.PARTS[part](dry) for dry in (False, True))
    assert [(s.name, s.seconds) for s in real] == [(s.name, s.seconds) for s in dry]
    assert sum(s.seconds for s in real[:4]) <= 540, "what matters most has its whole budget"
    for each in (*real, *dry):
        scripts = [word for word in each.command if word.endswith(".py")]
        assert scripts and all((ROOT / script).exists() for script in scripts)
    assert not any(s.programs for s in dry)


WITHOUT_DEEPSPEED = """
import importlib.metadata, runpy, sys
version = importlib.metadata.version
def missing(name):
    if name in ("deepspeed", "pydantic"):
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = missing
for name in ("deepspeed", "pydantic", "hjson"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_kernels_are_measured_without_deepspeed(tmp_path) -> None:
    """What a bare machine lacks costs a null in the provenance, not the rows."""
    path = tmp_path / "k.json"
    options = ["--device", "cpu", "--min-bytes", "1e4", "--max-bytes", "1e4", "--repeats", "1"]
    options += ["--codecs", "int8", "--json", str(path)]
    folders = os.pathsep.join(map(str, (ROOT, ROOT / "benchmarks")))
    done = subprocess.run(
        [PY, "-c", WITHOUT_DEEPSPEED, str(ROOT / "benchmarks" / "kernels.py"), *options],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": folders},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(path.read_text())
    assert found["rows"] and found["provenance"]["versions"]["deepspeed"] is None


@pytest.mark.slow
@pytest.mark.parametrize("part", sorted(plan.PARTS))
def test_dry_run_of_the_suite(part: str, tmp_path) -> None:
    environment = os.environ | {"DRY": "1", "PYTHON": PY, "CACHE": str(tmp_path / "cache")}
    environment |= {"OMP_NUM_THREADS": "1"}
    command = [str(ROOT / "benchmarks" / "gpu_suite.sh"), part, str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    found = json.loads((tmp_path / "out" / f"summary_{part}.json").read_text())
    assert list(found["sections"]) == [each.name for each in plan.PARTS[part](True)]
    results = {entry["result"] for entry in found["sections"].values()}
    assert results == {"passed"}, done.stdout[-3000:]


@pytest.mark.parametrize("script", ("gpu_suite.sh", "gpu/collect_wheels.sh"))
def test_scripts_are_valid_shell(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / "benchmarks" / script)], check=True)
