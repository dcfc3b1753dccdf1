"""benchmarks/gpu_suite.sh without a GPU: order, budgets, what a killed part leaves, a dry run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import requires
from itertools import islice
from pathlib import Path

import pytest
import torch

from ds_quant.kernels import cuda
from tests.kernels.links import alone

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks" / "gpu"), str(ROOT / "benchmarks")]

import one_gpu  # noqa: E402
import plan  # noqa: E402
import precompile  # noqa: E402
import suite  # noqa: E402
import sweeps  # noqa: E402
from kernels import Bench  # noqa: E402

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


@pytest.mark.parametrize("tool", ("memcheck", "racecheck"))
def test_checkers_see_every_kernel_with_barriers(tool: str) -> None:
    (section,) = (each for each in plan.training(dry=True) if each.name == tool)
    done = subprocess.run(section.command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    for name in ("test_lossless_rows_of_one_message", "gaussian", "g8192"):
        assert name in done.stdout, done.stdout + done.stderr


def test_kernels_are_compiled_before_ranks_need_them(monkeypatch, tmp_path, capsys) -> None:
    names = [section.name for section in plan.training(dry=False)]
    assert names.index("precompile") < names.index("zero3_world2")
    shared, compiled = ("encode", (("A", 1),)), []
    found = {precompile.WORLDS[0]: {shared}, precompile.WORLDS[1]: {shared, ("recode", ())}}
    monkeypatch.setattr(precompile, "variants", lambda world, schemes: found[world])
    monkeypatch.setattr(precompile, "_processes", ThreadPoolExecutor)
    monkeypatch.setattr(cuda, "compiled", lambda *variant: compiled.append(variant))
    monkeypatch.setattr(sys, "argv", ["precompile.py", "--json", str(tmp_path / "c.json")])
    precompile.main()
    assert sorted(compiled) == [shared, ("recode", ())], "each once, whatever worlds share"
    assert "2 kernels" in capsys.readouterr().out


def test_operators_of_deepspeed_are_tried_on_the_cpu_only(monkeypatch) -> None:
    from deepspeed import ops

    def probe() -> dict[str, bool]:
        raise AssertionError("compiles and asks every GPU")

    monkeypatch.setattr(ops, "_probe_compatible_ops", probe, raising=False)
    monkeypatch.delitem(vars(ops), "__compatible_ops__", raising=False)
    one_gpu.leave_out_host_operator("cuda")
    monkeypatch.setitem(vars(ops), "__compatible_ops__", {"deepspeed_shm_comm": True})
    one_gpu.leave_out_host_operator("cpu")
    assert ops.__compatible_ops__ == {"deepspeed_shm_comm": False}


# Stands for Python: "pip wheel" and "pip download" leave an empty wheel of what they are asked for.
FAKE_PIP = f"""#!{PY}
import pathlib, sys
words = iter(sys.argv[4:])
asked, options = ["typing_extensions"], {{}}
for word in words:
    if word in ("--wheel-dir", "--dest", "--platform", "--implementation", "--python-version"):
        options[word] = next(words)
    elif not word.startswith("-"):
        asked.append(word.split(">")[0])
folder = options.get("--dest") or options["--wheel-dir"]
for name in asked:
    pathlib.Path(folder, name + "-1-py3-none-any.whl").touch()
"""


def test_the_wheels_are_all_that_deepspeed_requires(tmp_path) -> None:
    """None is left to a machine whose own may be too old for the others."""
    python, wheels = tmp_path / "python", tmp_path / "wheels"
    python.write_text(FAKE_PIP)
    python.chmod(0o755)
    script = str(ROOT / "benchmarks" / "gpu" / "collect_wheels.sh")
    environment = os.environ | {"PYTHON": str(python)}
    subprocess.run([script, str(wheels)], env=environment, check=True, timeout=60)
    found = {path.name.split("-1-py3")[0] for path in wheels.iterdir()}
    needed = {re.match(r"[\w-]+", each)[0] for each in requires("deepspeed") if "extra" not in each}
    assert needed - {"torch", "numpy"} | {"deepspeed", "typing_extensions"} <= found


def test_a_link_of_one_rank_as_the_gpu_tests_use_it() -> None:
    payload = torch.arange(64, dtype=torch.uint8)
    with alone("gloo") as link:
        assert torch.equal(link.all_gather(payload, role="weights").wait(), payload)


@pytest.mark.slow
def test_sweep_of_stores_runs_every_way(cuda_kernels) -> None:
    bench = Bench(torch.device("cpu"), 1, ("auto",))
    made = [make() for make in islice(sweeps.stores(bench, 1.0), 8)]
    ways = [("", False), (" staged", True)]
    wanted = [(run, staged, text) for run in (1, 2, 4, 8) for text, staged in ways]
    assert [each.name for each in made] == [f"decode, run {run}{text}" for run, _, text in wanted]
    found = [(m["DSQ_RUN"], m["DSQ_STAGED"]) for m in cuda_kernels.macros if "DSQ_STAGED" in m]
    assert found == [(run, staged) for run, staged, _ in wanted]


@pytest.mark.slow
def test_sweep_of_tables_runs_one_table(cuda_kernels, monkeypatch) -> None:
    monkeypatch.setattr(sweeps, "TENSORS", 6)
    for at_once, launches in ((6, 1), (1, 6)):
        operation = sweeps.many(Bench(torch.device("cpu"), 1, ("auto",)), 1000, at_once)
        cuda_kernels.macros.clear()
        operation.ways["auto"](0)
        assert len(cuda_kernels.macros) == launches


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
