"""Runs a function on several gloo ranks of this machine, quickly and with a time limit.

Ranks are forked from a server process that has imported torch and DeepSpeed once and never runs
autograd, so a run costs about a second instead of ten. ``run`` returns the results of all ranks,
raises if one failed, and kills all of them at the time limit: no test can hang.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import reprlib
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

Test = Callable[..., None]
OWN_GROUP = {"TEST_PROCESS_GROUP": "own"}  # an ``environment``: see run
_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = ["tests.distributed.preload"]
_CONTEXT.set_forkserver_preload(_PRELOADED)


def preload(module: str) -> None:
    """Let the server import ``module`` too. The first run starts the server: call this before."""
    _PRELOADED.append(module)
    _CONTEXT.set_forkserver_preload(_PRELOADED)


@functools.cache
def _start_server() -> tempfile.TemporaryDirectory[str]:
    """Start the fork server. Return a folder that must exist while the server starts.

    On Linux with a C compiler the server and its ranks load ``epoll.c``, which makes them faster.
    """
    folder = tempfile.TemporaryDirectory()
    compiler = shutil.which("cc")
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux" and compiler is not None:
            library = Path(folder.name) / "epoll.so"
            source = Path(__file__).with_name("epoll.c")
            command = [compiler, "-O2", "-shared", "-fPIC", "-o", library, source]
            subprocess.run(command, check=True, timeout=60)
            patch.setenv("LD_PRELOAD", str(library), prepend=":")
        forkserver.ensure_running()
    return folder


def run(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 90,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """Call ``function(*args)`` on every rank of a new world. Return the results by rank.

    function: a module-level function. It may use ``deepspeed.comm``, which is initialised, and
        finds RANK and WORLD_SIZE in the environment.
    world: ranks.
    timeout: seconds until all ranks are killed.
    environment: further variables of the ranks. TEST_COLLECTIVE_TIMEOUT: seconds after which a
        collective fails. ``OWN_GROUP``: ``function`` makes the process group.

    Raises:
        AssertionError: a rank failed. The message has its traceback.
    """
    outcomes = run_each(function, world, *args, timeout=timeout, environment=environment)
    failures = [f"rank {rank}:\n{error}" for rank, (_, error) in enumerate(outcomes) if error]
    assert not failures, "\n".join(failures)
    return [result for result, _ in outcomes]


def on_ranks(world: int = 2, **options: Any) -> Callable[[Test], Test]:
    """Decorate a test to run its body on every one of ``world`` ranks.

    An argument ``world`` of the test replaces it. options: of ``run``.
    """

    def decorated(test: Test) -> Test:
        @functools.wraps(test)
        def started(**arguments: Any) -> None:
            ranks = arguments.get("world", world)
            skipped = run(_play_test, ranks, test.__module__, test.__name__, arguments, **options)
            if skipped[0]:
                pytest.skip(skipped[0])

        return started

    return decorated


def _play_test(module: str, name: str, arguments: dict[str, Any]) -> str:
    """Run the body of a test on this rank. Return the reason if it was skipped, else ""."""
    try:
        getattr(importlib.import_module(module), name).__wrapped__(**arguments)
    except pytest.skip.Exception as reason:
        return str(reason)
    return ""


def of_all_ranks(value: Any) -> list[Any]:
    """Return the values of all ranks, by rank. A collective."""
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def scratch() -> Path:
    """Return a folder that the ranks of a run share. It is removed after the run."""
    return Path(os.environ["TEST_SCRATCH"])


def move_kill_file(file: Path, step: int) -> None:
    """Make the file on the last rank before step 1, and remove it before step 2."""
    if step == 1 and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        file.touch()
    if step == 2:
        file.unlink(missing_ok=True)


def run_each(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 90,
    environment: dict[str, str] | None = None,
) -> list[tuple[Any, str | None]]:
    """Do the same as ``run``. Return (result, traceback or None) by rank instead of raising."""
    _start_server()
    # The store is in this process: its port is free, and it outlives a rank that fails.
    store = _store()
    with tempfile.TemporaryDirectory() as scratch:
        pipes = []
        processes = []
        for rank in range(world):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            variables = _environment(rank, world, store.port, scratch) | (environment or {})
            process = _CONTEXT.Process(target=_rank_main, args=(sender, variables, function, args))
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _store() -> TCPStore:
    """Start a store on a free port.

    It listens on an IPv4 socket. By default torch listens on IPv6, and then asks the name server
    for the name of every rank that connects. A lost answer delays the start by 5 seconds.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _values(error: BaseException) -> str:
    """Format the local variables of a failed assertion. pytest does so in its own process only."""
    frames = list(traceback.walk_tb(error.__traceback__))
    if not isinstance(error, AssertionError) or not frames:
        return ""
    frame, _ = frames[-1]
    variables = frame.f_locals.items()
    return "".join(f"    {name} = {reprlib.repr(value)}\n" for name, value in variables)


def _collect(pipes: list[Connection], timeout: float) -> list[tuple[Any, str | None]]:
    outcomes: list[tuple[Any, str | None]] = [(None, f"no answer in {timeout} s")] * len(pipes)
    pending = dict(enumerate(pipes))
    while pending:
        ready = wait(list(pending.values()), timeout=timeout)
        if not ready:
            break
        for rank in [r for r, pipe in pending.items() if pipe in ready]:
            try:
                outcomes[rank] = pending.pop(rank).recv()
            except EOFError:
                outcomes[rank] = (None, "the process died")
    return outcomes


def _environment(rank: int, world: int, port: int, scratch: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # join the store of the parent process
        "OMP_NUM_THREADS": "1",
        "TEST_SCRATCH": scratch,
    }


def _rank_main(
    sender: Connection, variables: dict[str, str], function: Callable[..., Any], args: tuple
) -> None:
    os.environ.update(variables)
    outcome: tuple[Any, str | None]
    try:
        import torch

        torch.set_num_threads(1)
        from deepspeed import comm as dist

        seconds = float(os.environ.get("TEST_COLLECTIVE_TIMEOUT", "600"))
        if os.environ.get("TEST_PROCESS_GROUP") != "own":
            dist.init_distributed("gloo", verbose=False, timeout=timedelta(seconds=seconds))
        outcome = (function(*args), None)
        if torch.distributed.is_initialized():  # a function may destroy a group that it has made
            torch.distributed.barrier()
    except BaseException as error:  # reported by the parent process
        outcome = (None, traceback.format_exc() + _values(error))
    sender.send(outcome)
    sender.close()
    os._exit(0)  # DeepSpeed on CPU may abort in a normal interpreter exit
