"""Every script of docs/examples trains, as it stands there, with its own config."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lab
import pytest
import torch

from tests import needs
from tests.distributed import harness
from tests.integration.processes import LAUNCHERS, QUIET, free_port, losses, run_both
from tests.thin import thinned

needs.libraries("transformers", "accelerate", "peft", extra="hf")
harness.preload("tests.integration.hf_preload")

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
PAGE = (EXAMPLES.parent / "examples.md").read_text("utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the examples, in which they write what they save."""
    return shutil.copytree(EXAMPLES, tmp_path / "examples")


def _script(folder: str, name: str) -> str:
    """Run it as the launcher does; what this rank printed."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(name, run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize(
    ("name", "line", "saved"),
    thinned(
        [
            ("plain_loop.py", "eden4 on ZeRO-2", "checkpoint/latest"),
            ("trainer.py", "eden4 on ZeRO-2", "out/model.safetensors"),
            ("lora.py", "qsdp on ZeRO-3", "adapters/adapter_model.safetensors"),
        ],
        lambda name, *_: name == "trainer.py",
    ),
)
def test_example_trains_and_saves(folder: Path, name: str, line: str, saved: str) -> None:
    printed, _ = harness.run(_script, 2, str(folder), name)
    assert len(re.findall(f"^quantized_comm: {line}, ", printed, re.MULTILINE)) == 1, printed
    found = losses(printed)
    assert len(found) == 4, printed
    assert found[-1] < found[0] - (0.1 if name == "lora.py" else 1), printed
    assert (folder / saved).exists()


def test_fsdp2_trains_without_deepspeed(folder: Path) -> None:
    printed, _ = harness.run(_script, 2, str(folder), "fsdp2.py", environment=harness.OWN_GROUP)
    check_fsdp2(printed)
    check_bytes(printed, ("weights", "gradients"), least=1.8, most=2.05)


def test_readme_starts_fsdp2_with_the_command_of_the_page() -> None:
    readme = (EXAMPLES.parents[1] / "README.md").read_text("utf-8")
    assert f"\ntorchrun {options_of_torchrun()} docs/examples/fsdp2.py " in readme


@pytest.mark.slow
def test_torchrun_starts_fsdp2(folder: Path) -> None:
    options = options_of_torchrun().split()
    launch = (sys.executable, "-m", "torch.distributed.run", *options, "fsdp2.py")
    check_fsdp2("".join(run_both(*launch, cwd=folder, **QUIET)))


def options_of_torchrun() -> str:
    """Return the options with which the page of FSDP2 starts the script."""
    page = (EXAMPLES.parent / "fsdp2.md").read_text("utf-8")
    (options,) = re.findall("^torchrun (.*) fsdp2.py$", page, re.MULTILINE)
    return options


def check_fsdp2(printed: str) -> None:
    """Check that the start-up line was printed once, and that the loss falls."""
    assert printed.count("quantized_comm: qsdp on FSDP2, ") == 1, printed
    found = losses(printed)
    assert len(found) == 4 and found[-1] < found[0] - 1, printed


def check_bytes(printed: str, roles: tuple[str, ...], least: float, most: float) -> None:
    """Check that an example ends with the bytes of each role, that many times fewer."""
    for role in roles:
        ((sent, instead, ratio),) = re.findall(
            f"^{role}: received (.*) MB instead of (.*), (.*) times fewer bytes$", printed, re.M
        )
        assert least < float(ratio) < most, printed
        assert float(instead) / float(sent) == pytest.approx(float(ratio), rel=0.05)


def test_ddp_trains_without_deepspeed(folder: Path) -> None:
    printed, _ = harness.run(_script, 2, str(folder), "ddp.py", environment=harness.OWN_GROUP)
    check_ddp(printed)
    check_bytes(printed, ("gradients",), least=5, most=8)


@pytest.mark.parametrize("name", ["fsdp2.py", "ddp.py"])
def test_one_process_trains_and_speaks_of_no_bytes(folder: Path, name: str) -> None:
    (printed,) = harness.run(_script, 1, str(folder), name, environment=harness.OWN_GROUP)
    assert len(losses(printed)) == 4 and losses(printed)[-1] < 1.2, printed
    assert "single rank: nothing to communicate" in printed
    assert "NOT compressed" not in printed and "times fewer" not in printed


@pytest.mark.parametrize("world", [1, 8, 64])
def test_the_samples_of_a_rank_last_for_any_number_of_batches(
    world: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(folder))
    data = importlib.import_module("data")
    monkeypatch.delitem(sys.modules, "data")
    samples = data.rows()[world - 1 :: world]
    batches = [data.batch(samples, index) for index in range(40)]
    assert {tuple(batch["labels"].shape) for batch in batches} == {(4, data.LENGTH)}
    rows = torch.cat([batch["input_ids"] for batch in batches])
    assert torch.equal(
        rows[: len(samples)], torch.stack([row["input_ids"] for row in samples])[:160]
    )
    assert torch.equal(rows[-1], samples[159 % len(samples)]["input_ids"])


@pytest.mark.parametrize(
    ("name", "saved"),
    thinned(
        [
            ("ddp_trainer.py", "out/model.safetensors"),
            ("ddp_accelerate.py", "out/model.safetensors"),
        ],
        lambda name, _: name == "ddp_trainer.py",
    ),
)
def test_ddp_trains_under_trainer_and_accelerate(folder: Path, name: str, saved: str) -> None:
    environment = {"ACCELERATE_USE_CPU": "true"} | harness.OWN_GROUP
    printed, _ = harness.run(_script, 2, str(folder), name, environment=environment)
    check_ddp(printed)
    assert (folder / saved).exists()


@pytest.mark.clients
def test_ddp_trains_under_lightning(folder: Path) -> None:
    needs.libraries("lightning", extra="clients")
    launch = (sys.executable, "-m", "torch.distributed.run", *options_of_torchrun().split())
    check_ddp("".join(run_both(*launch, "ddp_lightning.py", cwd=folder, **QUIET)))


def check_ddp(printed: str) -> None:
    """Check that the start-up line was printed once, and that the loss falls."""
    assert printed.count("quantized_comm: eden4 on DDP, ") == 1, printed
    assert "no_sync() of the DDP model" not in printed
    found = losses(printed)
    assert len(found) >= 4 and found[-1] < found[0] - 0.5, printed


def _sharded_on_the_cpu(folder: str, name: str) -> str:
    """Run a script of Accelerate's FSDP2 plugin, which it uses on GPUs only.

    Replaced is the kind of training that Accelerate chooses on a CPU. All that follows is its own.
    """
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    original = AcceleratorState.__init__

    def sharding(self: AcceleratorState, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        plugin = options.get("fsdp_plugin")
        if plugin is not None:
            plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = plugin
            self.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = sharding
    return _script(folder, name)


@pytest.mark.slow
def test_accelerate_trains_with_its_fsdp2_plugin(folder: Path) -> None:
    environment = {"ACCELERATE_USE_CPU": "true"}
    name = "fsdp2_accelerate.py"
    printed, _ = harness.run(_sharded_on_the_cpu, 2, str(folder), name, environment=environment)
    check_fsdp2(printed)
    assert (folder / "model.pt").exists()


def test_every_script_and_config_is_tried_here_and_shown_on_the_page() -> None:
    for path in EXAMPLES.iterdir():
        assert f"](examples/{path.name})" in PAGE, path.name
        if path.suffix == ".py" and path.stem != "data":
            assert path.name in Path(__file__).read_text("utf-8"), path.name


@pytest.mark.slow
def test_accelerate_launch_starts_its_example(folder: Path) -> None:
    config = ("--use_deepspeed", "--deepspeed_config_file", "ds_config.json")
    launch = (sys.executable, "-m", *LAUNCHERS["accelerate"], free_port(), *config)
    command = (*launch, "--num_processes", "2", "accelerate_loop.py")
    printed = "".join(run_both(*command, cwd=folder, **QUIET))
    assert "quantized_comm: eden4 on ZeRO-2, " in printed, printed
    found = losses(printed)  # without GPUs of every rank, as Accelerate takes each for the first
    assert len(found) >= 4 and found[-1] < found[0] - 1, printed
    assert (folder / "model.pt").exists()


@pytest.mark.slow
def test_two_hosts_of_the_hostfile_train_together(folder: Path) -> None:
    """Both are this machine, started as on two: one command on each, without ssh."""
    hosts = (folder / "hostfile").read_text("utf-8").split("\n")[:2]
    assert [line.split()[1] for line in hosts] == ["slots=1", "slots=1"]
    (folder / "hostfile").write_text("localhost slots=1\n127.0.0.1 slots=1\n", "utf-8")
    launch = (sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", "hostfile",
              "--no_ssh", "--master_addr", "127.0.0.1", "--master_port", free_port())  # fmt: skip
    commands = [[*launch, "--node_rank", str(rank), "plain_loop.py"] for rank in range(2)]
    printed = trained_on_two_hosts(commands, folder)
    assert "'inter': 0" not in printed, "all bytes come from the other host"


def trained_on_two_hosts(commands: list[list[str]], folder: Path, **more: str) -> str:
    """Run them side by side; what they printed."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    started = [
        subprocess.Popen(command, cwd=folder, env=inherited | QUIET | more, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for command in commands
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.terminate()
    assert not any(process.returncode for process in started), printed
    both = "".join(printed)
    assert ", 2 nodes x 1 CPU process: " in both and len(losses(both)) >= 4, both
    return both


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trainer.py", "plain_loop.py"])
def test_two_hosts_train_with_torchrun(folder: Path, name: str) -> None:
    (command,) = re.findall(rf"^torchrun (.*) {name}$", PAGE, re.MULTILINE)
    arguments = command.replace("host1:29500", f"127.0.0.1:{free_port()}").split()
    launch = [sys.executable, "-m", "torch.distributed.run", *arguments, name]
    trained_on_two_hosts([launch, launch], folder)


@pytest.fixture
def two_machines() -> Iterator[lab.Lab]:
    """Two hosts in network namespaces, each of which takes its own name for 127.0.1.1."""
    missing = lab.obstacle()
    if missing is not None:
        pytest.skip(missing)
    settings = [Path(f"/etc/netns/{lab.PREFIX}-{host}") for host in range(2)]
    for host, path in enumerate(settings):  # ip netns exec mounts its files below /etc
        path.mkdir(parents=True, exist_ok=True)
        (path / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 host{host + 1}\n", "utf-8")
    try:
        with lab.Lab(2) as machines:
            yield machines
    finally:
        for path in settings:
            shutil.rmtree(path)


@pytest.mark.alone
def test_machines_that_take_their_own_names_for_the_loopback_train_with_addresses(
    folder: Path, two_machines: lab.Lab
) -> None:
    page = (EXAMPLES.parent / "install.md").read_text("utf-8")
    commands = []
    for host, options in enumerate(re.findall(r"^torchrun (--nnodes .*) ddp\.py  ", page, re.M)):
        for number in (0, 1):
            options = options.replace(f"10.0.0.{number + 1}", two_machines.address(number))
        launch = [sys.executable, "-m", "torch.distributed.run", *options.split(), "ddp.py"]
        named = ["unshare", "--uts", "sh", "-c", f'hostname host{host + 1}; exec "$@"', "sh"]
        commands.append(two_machines.command(host, [*named, *launch]))
    assert len(commands) == 2
    trained_on_two_hosts(commands, folder, GLOO_SOCKET_IFNAME=lab.INTERFACE)


@pytest.mark.slow
def test_the_slurm_script_starts_one_launcher_per_node(folder: Path) -> None:
    """With stand-ins for SLURM's commands: both nodes are this machine."""
    tools = folder / "bin"
    tools.mkdir()
    stand_ins = {
        "scontrol": "echo 127.0.0.1; echo localhost",
        "srun": '"$@" & first=$!; "$@"; wait $first',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    }
    for name, body in stand_ins.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    given = {"SLURM_JOB_NODELIST": "host[1-2]", "SLURM_NNODES": "2", "RANKS": "1",
             "PORT": free_port(), "PATH": f"{tools}:{os.environ['PATH']}"}  # fmt: skip
    trained_on_two_hosts([["bash", "two_hosts.slurm"]], folder, **given)
