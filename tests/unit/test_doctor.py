"""ds_quant doctor: verdicts on what it may find, the self-test, exit codes."""

from __future__ import annotations

import configparser
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_quant.kernels import cuda
from ds_quant.tools import doctor, selftest_worker
from ds_quant.tools.cli import main
from ds_quant.tools.doctor import NOTE, OK, PROBLEM, WARNING, Check

ROOT = Path(__file__).resolve().parents[2]
GOOD = {
    "active": True, "imported": False, "backend": "gloo", "line": "qsdp on ZeRO-2", "received": 9,
    "digest": "a",
}  # fmt: skip


def test_supported_versions_are_those_of_setup_cfg() -> None:
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    required = setup["options"]["install_requires"].split()
    for name in ("torch", "pydantic"):
        assert f"{name}{doctor.SUPPORTED[name]}" in required
    # What was tried has an upper limit; what installs has none.
    oldest = setup["options.extras_require"]["deepspeed"].removeprefix("deepspeed")
    assert doctor.SUPPORTED["deepspeed"].startswith(f"{oldest},<")
    assert doctor.SUPPORTED["python"] == setup["options"]["python_requires"]


def version(number: str | None) -> Check:
    return doctor.version_check("deepspeed", number, ">=0.17.6,<0.20")


def ranks(**second: Any) -> Check:
    return doctor.verdict("two processes", [GOOD, GOOD | second])


def registered(*points: metadata.EntryPoint) -> dict[str, Any]:
    return {"ds_quant.tools.doctor.metadata.entry_points": lambda group: points}


OURS = metadata.EntryPoint("ds_quant", "ds_quant._autoload:activate", "torch")
NATIVE = "ds_quant.kernels.native.unavailable_reason"
CPU = torch.device("cpu")
ONE_GPU = {
    "torch.cuda.is_available": lambda: True,
    "torch.cuda.device_count": lambda: 1,
    "torch.cuda.get_device_name": lambda index: "A100",
    "torch.cuda.get_device_capability": lambda: (8, 0),
}
# A check, what it says, its status and its fix; variables of the environment and functions by name.
VERDICTS: list[tuple[Callable[[], Check], str, str, str, dict[str, Any]]] = [
    *(
        (partial(version, number), "(supported: >=0.17.6,<0.20)", OK, "", {})
        for number in ("0.19.8", "0.17.6", "0.19.8+cpu", "0.17.6.dev20251101+cpu")
    ),
    (partial(version, "0.20.0"), "not supported", PROBLEM, "'deepspeed>=0.17.6,<0.20'", {}),
    (partial(version, "0.17.5"), "not supported", PROBLEM, "'deepspeed>=0.17.6,<0.20'", {}),
    (partial(version, None), "FSDP2 and DDP only", NOTE, "'deepspeed>=0.17.6,<0.20'", {}),
    (partial(doctor.version_check, "torch", None, ">=2.5"), "not installed", PROBLEM, "torch", {}),
    (doctor.entry_point, "off: DS_QUANT_DISABLE=1", PROBLEM, "unset", {"DS_QUANT_DISABLE": "1"}),
    (doctor.entry_point, "by import only: TORCH_DEVICE", WARNING, "unset",
     {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
    (doctor.entry_point, "by import only", WARNING, "pip install it", registered()),
    (doctor.entry_point, "on: import torch loads", OK, "", registered(OURS)),
    (doctor.cpu_kernels, "not built", WARNING, "compiler", {NATIVE: lambda: "are not built"}),
    (doctor.cpu_kernels, "C++ kernels", OK, "", {NATIVE: lambda: None}),
    (partial(doctor.cuda_kernels, CPU), "not needed", OK, "", {}),
    (doctor.cupy, "cupy-cuda12x and cupy-cuda13x", PROBLEM, "pip uninstall cupy-cuda12x cupy-cuda",
     {"ds_quant.tools.doctor._installed": lambda name: "14.0"}),
    (doctor.backend, "gloo (part of torch)", OK, "", {}),
    (doctor.backend, ", GLOO_SOCKET_IFNAME=lo", OK, "", {"GLOO_SOCKET_IFNAME": "lo"}),
    (doctor.device, "1 x A100, sm_80", OK, "", ONE_GPU),
    (ranks, "9 bytes received over gloo", OK, "", {}),
    (partial(ranks, active=False), "the block had no effect", PROBLEM, "", {}),
    (partial(ranks, digest="b"), "weights differ", PROBLEM, "", {}),
    (partial(ranks, imported=True), "needed import ds_quant", WARNING, "", {}),
    (lambda: doctor.verdict("two processes", [GOOD | {"received": 0}] * 2), "", PROBLEM, "", {}),
    (doctor.no_front, "no DeepSpeed", PROBLEM, "torch 2.10", {}),
    (doctor.builds, "cpu_adam that did not end", NOTE, "rm /tmp/cpu_adam/lock",
     {"ds_quant.leftovers.idle_locks": lambda: [Path("/tmp/cpu_adam/lock")]}),
    (doctor.builds, "none was interrupted", OK, "", {"ds_quant.leftovers.idle_locks": list}),
]  # fmt: skip


@pytest.mark.parametrize(("check", "words", "status", "fix", "given"), VERDICTS)
def test_verdict_says_what_was_found_and_its_fix(
    check: Callable[[], Check], words: str, status: str, fix: str, given: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name in ("DS_QUANT_DISABLE", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        set_ = monkeypatch.setenv if isinstance(value, str) else monkeypatch.setattr
        set_(name, value)
    found = check()
    assert found.status == status and words in found.found and fix in found.fix
    assert max(map(len, doctor.lines([found]))) <= 100
    assert bool(found.fix) == (status != OK) and doctor.healthy([found]) == (status != PROBLEM)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.17.6", ["but the last one", "but the first and the last one"]),
        ("0.18.2", ["but the last one", "but the first and the last one"]),
        ("0.18.3", ["but the first and the last one", "issue 8224"]),
        ("0.19.3", ["issue 8224"]), ("0.19.4", []), ("0.19.8+cpu", []), (None, []),
    ],
)  # fmt: skip
def test_gradients_that_deepspeed_loses_are_named(version: str | None, said: list[str]) -> None:
    checks = doctor.known_faults(version)
    assert [check.status for check in checks] == [WARNING] * len(said)
    assert {check.name for check in checks} <= {"deepspeed"}
    for check, words in zip(checks, said, strict=True):
        assert words in check.found and "deepspeed>=" in check.fix


def test_a_cupy_that_fails_is_a_warning_with_its_traceback(monkeypatch) -> None:
    def broken(*_args) -> None:
        raise RuntimeError("no NVRTC\nsecond line")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda, "_check_versions", broken)
    cuda.runner_of.cache_clear()
    check = doctor.cuda_kernels(torch.device("cuda", 0))
    cuda.runner_of.cache_clear()
    assert check.status == WARNING and "torch path" in check.found and "no NVRTC" in check.found
    assert "ds_quant[cuda" in check.fix
    shown = "\n".join(doctor.lines([check]))
    assert "Traceback" in shown and "in broken" in shown and "second line" in shown


def test_a_device_that_is_too_old_is_named_without_a_package(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    cuda.runner_of.cache_clear()
    check = doctor.cuda_kernels(torch.device("cuda", 0))
    cuda.runner_of.cache_clear()
    assert check.status == WARNING and "newer GPU" in check.fix and "pip" not in check.fix
    assert "need sm_80 (A100) or newer, this GPU is sm_70" in check.found
    assert "Traceback" not in "\n".join(doctor.lines([check]))


@pytest.mark.parametrize("name", ["encode", "decode"])
def test_kernels_equal_plain_torch_and_a_wrong_one_is_found(monkeypatch, name: str) -> None:
    from ds_quant.codec import bound

    assert doctor.codecs().status == OK
    original = getattr(bound, name)

    def one_wrong(codec, x, out, *, backend) -> None:
        original(codec, x, out, backend=backend)
        out[0, 77_777] += backend == "auto"

    monkeypatch.setattr(bound, name, one_wrong)
    check = doctor.codecs()
    assert check.status == PROBLEM and "8-bit minmax" in check.found


def test_exit_code_and_json_follow_the_checks(monkeypatch, capsys, tmp_path: Path) -> None:
    monkeypatch.delenv("DS_QUANT_DISABLE", raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))  # a lock there may be this user's
    assert main(["doctor", "--no-processes", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["healthy"] is True
    assert {"torch", "device", "backend", "operator builds", "activation", "encode, decode"} <= {
        check["name"] for check in facts["checks"]
    }
    monkeypatch.setenv("DS_QUANT_DISABLE", "1")
    assert main(["doctor", "--no-processes"]) == 1
    assert "fix: unset DS_QUANT_DISABLE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("installed", "has_fsdp2", "tried"),
    [
        (("deepspeed", "torch"), True, ["ZeRO-2", "FSDP2"]),
        (("deepspeed", "torch"), False, ["ZeRO-2"]),
        (("torch",), True, ["FSDP2"]),
        (("torch",), False, []),
    ],
)
def test_every_front_of_the_machine_is_tried(
    monkeypatch, capsys, installed: tuple[str, ...], has_fsdp2: bool, tried: list[str]
) -> None:
    """A machine without DeepSpeed is healthy if it has FSDP2."""
    monkeypatch.setattr(doctor, "_installed", lambda name: "1" if name in installed else None)
    monkeypatch.setattr(doctor, "has_fsdp2", lambda: has_fsdp2)
    monkeypatch.setattr(doctor, "survey", lambda: [version("0.19" if len(installed) > 1 else None)])
    monkeypatch.setattr(doctor, "codecs", lambda: Check("encode, decode", ""))
    monkeypatch.setattr(doctor, "exchange", lambda front, timeout: Check(front, "trained"))
    assert main(["doctor", "--json"]) == (0 if tried else 1)
    names = [check["name"] for check in json.loads(capsys.readouterr().out)["checks"]]
    assert names[2:] == (tried or ["two processes"])


def test_a_rank_reports_that_the_plugin_has_not_attached() -> None:
    engine = SimpleNamespace(module=torch.nn.Linear(2, 2), zero_optimization_stage=lambda: 2)
    found = selftest_worker._result(engine, engine.module.weight)
    assert (found["active"], found["line"], found["received"]) == (False, None, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("disabled", "code"), [("", 0), ("1", 1)])
def test_doctor_trains_two_processes_and_sees_a_disabled_plugin(disabled: str, code: int) -> None:
    command = (
        "import sys; from ds_quant.tools.cli import main; sys.exit(main(['doctor', '--json']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, timeout=240,
        env={**os.environ, "DS_QUANT_DISABLE": disabled, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    last = checks["ZeRO-2, two processes"]
    under_fsdp2 = checks.get("FSDP2, two processes")
    assert (under_fsdp2 is not None) == doctor.has_fsdp2()
    if under_fsdp2 is not None:
        assert "qsdp on FSDP2" in under_fsdp2["found"]
    if disabled:
        assert "the block had no effect" in last["found"]
    else:
        ranks = last["details"]["ranks"]
        assert last["status"] != PROBLEM and len({rank["digest"] for rank in ranks}) == 1
        # 2-D weight of 128 x 128 in 8 bits, once as gradient and once as weight, and the bias
        assert ranks[0]["received"] > torch.Size((128, 128)).numel()


def test_a_rank_that_dies_is_reported_with_its_last_words(monkeypatch) -> None:
    monkeypatch.setattr(doctor.sys, "executable", "/bin/false")
    check = doctor.exchange(doctor.ZERO, 30.0)
    assert check.status == PROBLEM and check.found.startswith("rank 0 failed")


def test_a_loaded_host_is_given_more_time() -> None:
    assert [doctor.patience(load) for load in (0.1, 1, 4.5, 1000)] == [120, 120, 540, 1200]
