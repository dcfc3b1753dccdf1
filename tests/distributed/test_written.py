"""The replica of ZeRO-1/2 in user's hands: weights that user code writes stay, in exports too,
until the next step; a ``state_dict()`` of decoded weights is logged once per place that takes one.
"""

from __future__ import annotations

import copy
import inspect
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import ds_quant
from tests.distributed.harness import on_ranks, run, scratch
from tests.distributed.models import (
    FULL,
    Regression,
    digest,
    engine_of,
    exact,
    heard,
    live,
    saved,
    train_step,
)
from tests.integration.processes import QUIET, free_port
from tests.integration.processes import run as run_process
from tests.thin import thinned

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

BLOCKS = {
    "full_precision": FULL,
    "lossless": {"scheme": "lossless"},
    "qsdp": {"scheme": "qsdp", "node_size": 1},
    "sdp4bit": {"scheme": "sdp4bit", "node_size": 1},
}


def exported(engine: DeepSpeedEngine) -> dict[str, str]:
    return {n: digest(t) for n, t in saved(engine).items()}


def in_place(p: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        p.copy_(values)


def through_data(p: Tensor, values: Tensor) -> None:
    p.data.copy_(values)


def other_storage(p: Tensor, values: Tensor) -> None:
    p.data = values.clone()


WAYS: tuple[Callable[[Tensor, Tensor], None], ...] = (in_place, through_data, other_storage)


@pytest.mark.parametrize(
    ("stage", "name"),
    thinned(
        [(1, "qsdp"), *((2, name) for name in BLOCKS)],
        lambda stage, name: stage == 1 or name == "lossless",
    ),
)
@on_ranks()
def test_an_average_in_the_module_is_exported_and_stays(stage: int, name: str) -> None:
    """It goes in, is exported, and goes out again; the next step takes over."""
    engine = engine_of(stage, BLOCKS[name])
    params = dict(engine.module.named_parameters())
    for step, write in enumerate(WAYS):
        train_step(engine, step)
        before = {n: (p.data, p.data.clone()) for n, p in params.items()}
        for p in params.values():
            write(p, (p.detach().float() * 0.75).to(p.dtype))
        average = live(engine)
        assert exported(engine) == average == live(engine)
        for n, p in params.items():
            p.data, values = before[n]
            p.data.copy_(values)
    train_step(engine, len(WAYS))
    assert exported(engine) == exact(engine, "bf16")


@pytest.mark.parametrize("name", ["qsdp", "sdp4bit"])
@on_ranks()
def test_what_was_not_written_is_exact_in_exports(name: str) -> None:
    """One parameter is written; the others are exact in files and decoded afterwards."""
    engine, logged = engine_of(2, BLOCKS[name]), heard()
    train_step(engine, 0)
    engine.module.second.weight.data[:, 0] = 0.0
    before, masters = live(engine), exact(engine, "bf16")
    wanted = {**masters, "second.weight": before["second.weight"]}
    assert exported(engine) == wanted
    engine.save_checkpoint(str(scratch()), "here")
    torch.distributed.barrier()
    states = torch.load(scratch() / "here" / "mp_rank_00_model_states.pt", weights_only=False)
    assert {n: digest(t) for n, t in states["module"].items()} == wanted
    assert before["first.weight"] != masters["first.weight"]
    # Differences stay exact: see [Note: differences] of replica.py.
    assert live(engine) == (before if name == "qsdp" else wanted)
    if engine.global_rank == 0:
        assert len(logged) == 1 and "such as second.weight" in logged[0]
    with ds_quant.exact_weights(engine):
        engine.module.last.bias.data.zero_()
        written = digest(engine.module.last.bias)
        assert exported(engine) == {**wanted, "last.bias": written}
    assert digest(engine.module.last.bias) == written
    ds_quant.resync(engine)
    assert live(engine) == masters


# ---- state dicts ----

CODES = {"scheme": "qsdp_w4g4"}
EXACT = {"full": FULL, "warm-up": {**CODES, "warmup_steps": 9}, "lossless": {"scheme": "lossless"}}


def warnings() -> list[str]:
    """The state dicts that this rank warns of from here on, as they are."""
    from ds_quant.runtime import log

    logged: list[str] = []
    log.log_here = lambda line: logged.append(line) if "state_dict()" in line else None
    return logged


def places(logged: list[str]) -> list[str]:
    """File and line that each warning names."""
    return [line.removeprefix("quantized_comm: ").partition(": ")[0] for line in logged]


def read_weights(block: dict[str, Any], stage: int) -> tuple[list[str], list[str]]:
    """Warnings of exact state dicts and copies, then of three lines that take decoded ones.
    One line comes twice, and one takes it from inside a library.
    """
    engine, logged = engine_of(stage, block), warnings()
    engine.module.state_dict()  # before the first step
    train_step(engine, 0)
    with ds_quant.exact_weights(engine):
        engine.module.state_dict()
    engine.save_checkpoint(str(scratch()), "here")
    engine.save_16bit_model(str(scratch()))
    train_step(engine, 1)
    copy.deepcopy(engine.module).state_dict()
    copy.deepcopy(engine.module.second).state_dict()
    engine.module.norm.state_dict()  # travels in full precision
    exact, library = list(logged), {"__name__": "peft.utils.save_and_load"}
    logged.clear()
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        for read in (engine.state_dict, engine.module.state_dict, engine.module.second.state_dict):
            read()  # place 1
        engine.module.second.state_dict()  # place 2
        exec("def save(module):\n    module.state_dict()", library)
        library["save"](engine.module)  # place 3
    return exact, logged


@pytest.mark.parametrize("stage", [1, 2])
def test_a_decoded_state_dict_is_logged_once_per_line(stage: int) -> None:
    (exact, logged), (exact_1, others) = run(read_weights, 2, CODES, stage)
    assert exact == exact_1 == others == []
    source, first = inspect.getsourcelines(read_weights)
    lines = [number for number, text in enumerate(source, first) if "# place" in text]
    assert places(logged) == [f"{__file__}:{line}" for line in lines]
    for line in logged:
        assert f"on rank 0 under ZeRO-{stage} gives decoded weights" in line
        assert "lossless_w_g4" in line


@pytest.mark.parametrize("block", EXACT.values(), ids=EXACT)
def test_an_exact_state_dict_is_not_logged(block: dict[str, Any]) -> None:
    assert run(read_weights, 2, block, 2) == [([], [])] * 2


@pytest.mark.parametrize(("stage", "kept"), [(1, "decoded"), (2, "decoded"), (3, "empty")])
@on_ranks()
def test_a_copy_of_the_module_holds_what_the_page_says(stage: int, kept: str) -> None:
    """A row of docs/running.md; `read_weights` shows that nothing is logged."""
    page = (Path(__file__).parents[2] / "docs" / "running.md").read_text("utf-8")
    (row,) = (line for line in page.splitlines() if "`copy.deepcopy(module).state_dict()`" in line)
    assert kept in row.split("|")[3 if stage == 3 else 2]
    engine = engine_of(stage, CODES)
    train_step(engine, 0)
    copied, masters = copy.deepcopy(engine.module).state_dict(), exact(engine, "bf16")
    if kept == "empty":
        assert {tensor.numel() for tensor in copied.values()} == {0}
        return
    assert {n: digest(t) for n, t in copied.items()} == live(engine) != masters
    with ds_quant.exact_weights(engine):
        copied = copy.deepcopy(engine.module).state_dict()
    assert {n: digest(t) for n, t in copied.items()} == masters


# ---- state dicts that an installed program takes ----

PROGRAM = {
    "__init__.py": "",
    "__main__.py": """
from program.training import main

main()
""",
    "training.py": """
from program.saving import push, save
from tests.distributed.models import engine_of, train_step


def main():
    engine = engine_of(2, {"scheme": "qsdp_w4g4"})
    train_step(engine, 0)
    if engine.global_rank == 1:
        save(engine.module)
        save(engine.module)
    push(engine.module)
""",
    "saving.py": """
def save(module):
    return module.state_dict()  # on rank 1 alone


def push(module):
    return module.state_dict()  # on all ranks
""",
}


def install_program(folder: Path) -> Path:
    """Write the package ``program`` into a ``site-packages``, which is returned."""
    site = folder / "site-packages"
    (site / "program").mkdir(parents=True)
    for name, source in PROGRAM.items():
        (site / "program" / name).write_text(source.lstrip(), "utf-8")
    return site


def require_warnings_of_the_program(lines: list[str], site: Path) -> None:
    """Rank 1 alone took the first state dict, all ranks the second one: rank 0 says so, and at most
    one other rank does.
    """
    file = site / "program" / "saving.py"
    saved = f"{file}:2: state_dict() on rank 1 under"
    pushed = [f"{file}:6: state_dict() on rank {rank} under" for rank in (0, 1)]
    found = [line.removeprefix("quantized_comm: ").rpartition(" ZeRO-2 gives")[0] for line in lines]
    assert sorted(found) == [saved, *pushed]


def play_program(site: str) -> list[str]:
    """``python -m program`` in this process; the warnings of its rank."""
    logged = warnings()
    sys.path.insert(0, site)
    runpy.run_module("program", run_name="__main__", alter_sys=True)
    return logged


def test_an_installed_program_is_warned_at_its_own_lines_and_on_any_rank(tmp_path: Path) -> None:
    site = install_program(tmp_path)
    of_rank_0, of_rank_1 = run(play_program, 2, str(site))
    assert [line.count("on rank 0") for line in of_rank_0] == [1]
    require_warnings_of_the_program(of_rank_0 + of_rank_1, site)


@pytest.mark.slow
def test_a_launched_program_is_warned_at_its_own_lines(tmp_path: Path) -> None:
    """``python -m torch.distributed.run -m program``, as users start it."""
    site = install_program(tmp_path)
    launcher = ("torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port())
    path = os.pathsep.join([str(site), str(Path(__file__).parents[2])])
    printed = run_process(
        sys.executable, "-m", *launcher, "-m", "program", cwd=tmp_path, PYTHONPATH=path, **QUIET
    )
    lines = [line for line in printed.splitlines() if "state_dict()" in line]
    require_warnings_of_the_program(lines, site)


def read_on_all_ranks() -> int:
    engine, logged = engine_of(2, CODES), warnings()
    train_step(engine, 0)
    for _ in range(3):
        engine.module.state_dict()
    return len(logged)


def test_of_many_ranks_rank_0_and_one_more_warn() -> None:
    lines = run(read_on_all_ranks, 4)
    assert lines[0] == 1
    assert sum(lines[1:]) == 1


@on_ranks()
def test_differences_are_exact_after_a_save_until_the_next_step() -> None:
    engine, logged = engine_of(2, {"scheme": "sdp4bit"}), warnings()
    train_step(engine, 0)
    engine.save_checkpoint(str(scratch()), "here")
    engine.module.state_dict()
    assert logged == []
    train_step(engine, 1)
    engine.module.state_dict()
    assert len(logged) == 1


@on_ranks(1)
def test_what_is_no_engine_is_refused_by_name() -> None:
    engine = engine_of(2, CODES)
    for function in (ds_quant.exact_weights, ds_quant.resync, ds_quant.report):
        for wrong in (engine.module, Regression(), "nonsense", None):
            said = f"ds_quant.{function.__name__} takes the engine.*not {type(wrong).__name__}$"
            with pytest.raises(TypeError, match=said):
                function(wrong)
    assert ds_quant.report(engine_of(2, dtype="fp32")) is None
