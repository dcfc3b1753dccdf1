"""The projects whose tests peer_suite.py runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
TESTS_OF_FSDP2 = "test/distributed/_composable/fsdp"


class Project(NamedTuple):
    """A project with tests for what the plugin changes.

    title: heading of its page of results.
    folder: what this repository says of it: ``files.json`` has the test files and those left out,
        ``explained.json`` the tests that pass without the plugin only, with the reasons.
    package: the installed package. source: its repository.
    tests: folder of the tree from which its tests run. files: folder in it with the test files.
    needed: files that tell a source tree from an installed package.
    plugin: pytest plugin that inserts the block. start: module whose import prepares the runs.
    schemes: that run if none are given.
    block: returns the block of a scheme.
    adapted: changes the text of a test file for the CPU, None if files run as they are.
    """

    title: str
    folder: Path
    package: str
    source: str
    tests: str
    files: str
    needed: Sequence[str]
    plugin: str
    start: str
    schemes: Sequence[str]
    block: Callable[[str], dict[str, Any]]
    adapted: Callable[[str], str] | None = None

    @property
    def explained(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = json.loads(
            (self.folder / "explained.json").read_text("utf-8")
        )
        return entries

    @property
    def selection(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "files.json").read_text("utf-8"))
        return found

    @property
    def advice(self) -> str:
        """Return how to fetch the sources."""
        version = metadata.version(self.package).partition("+")[0]
        return f"git clone --depth 1 --branch v{version} {self.source}"


def _quantizing_all(scheme: str) -> dict[str, Any]:
    """Return the block of a scheme. All matrices are quantized: those of tests are small."""
    if scheme == "full_precision":
        return {"scheme": scheme}
    return {"scheme": scheme, "min_numel": 0}


def _on_two_nodes(scheme: str) -> dict[str, Any]:
    """Return the block of a scheme. Exact sums are those of FSDP2 on one node only."""
    if scheme == "full_precision":
        return {"scheme": scheme}
    return {"scheme": scheme, "min_numel": 0, "node_size": "half", "allow_full_replica": True}


def _for_the_cpu(text: str) -> str:
    from peer.fsdp2.plugin import on_cpu

    return on_cpu(text)


DEEPSPEED = Project(
    title="DeepSpeed's own tests",
    folder=HERE / "deepspeed",
    package="deepspeed",
    source="https://github.com/deepspeedai/DeepSpeed",
    tests="tests",
    files="unit",
    needed=("tests/conftest.py", "tests/unit/common.py"),
    plugin="peer.deepspeed.plugin",
    start="peer.deepspeed.ranks",
    schemes=("full_precision", "qsdp"),
    block=_quantizing_all,
)
FSDP2 = Project(
    title="torch's own tests of FSDP2",
    folder=HERE / "fsdp2",
    package="torch",
    source="https://github.com/pytorch/pytorch",
    tests=TESTS_OF_FSDP2,
    files=".",
    needed=("version.txt", f"{TESTS_OF_FSDP2}/test_fully_shard_training.py"),
    plugin="peer.fsdp2.plugin",
    start="peer.fsdp2.plugin",
    schemes=("full_precision", "hybrid", "lossless"),
    block=_on_two_nodes,
    adapted=_for_the_cpu,
)
PROJECTS = {"deepspeed": DEEPSPEED, "fsdp2": FSDP2}
