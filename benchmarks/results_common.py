"""What result files of several benchmarks have in common. Standard library and pydantic only."""

from __future__ import annotations

import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

Arguments = dict[str, Any]


class About(NamedTuple):
    """Where a file's numbers come from."""

    date: str
    hardware: str
    versions: str
    command: str


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Hardware(Model):
    """One machine; load_average is that of the last minute when the file was written."""

    cpu: str
    cores: int = Field(ge=1)
    gpus: list[str]
    load_average: float = Field(ge=0)


class MadeHere(Model, ABC):
    """Common part of files with report.provenance()."""

    created: str
    versions: dict[str, str]
    hardware: Hardware
    arguments: Arguments

    def about(self) -> About:
        machine = self.hardware
        devices = [f"{machine.cores} cores of {machine.cpu}", *machine.gpus]
        hardware = f"{', '.join(devices)}; load {machine.load_average:g}"
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return About(self.created, hardware, versions, self._command())

    @abstractmethod
    def _command(self) -> str:
        """The command line that made the file."""


class Versioned(MadeHere):
    """Files that carry their kind, a Literal of each subclass."""

    version: Literal[1]
    command: str  # without its arguments

    def _command(self) -> str:
        return command_line(self.command.removeprefix("python "), self.arguments)


def command_line(script: str, arguments: Arguments, *, commas: Sequence[str] = ()) -> str:
    """The command with those arguments; lists of the names in `commas` are joined by commas."""
    words = ["python", script]
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif isinstance(value, list) and name == "override":
            for key, setting in value:
                text = setting if isinstance(setting, str) else json.dumps(setting)
                words += [flag, f"{key}={text}"]
        elif isinstance(value, list) and value:
            plain = [_plain(item) for item in value]
            words += [flag, *([",".join(plain)] if name in commas else plain)]
        elif value is not None and value is not False and value != []:
            words += [flag, _plain(value)]
    return shlex.join(words)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
