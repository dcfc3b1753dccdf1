"""Every `pip install` of the README, docs/install.md and `make install` resolves, with torch's CUDA
build and with its CPU build.

pip resolves against wheels that hold nothing but metadata: that of the packages installed here
and, for torch's CUDA build and CuPy, that recorded in cuda_wheels.json. To record another version,
with an index that has the CUDA build:

    pip install --dry-run --ignore-installed --report report.json torch==VERSION
    python -m tests.integration.test_constraints report.json [more reports]
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import zipfile
from importlib import metadata
from itertools import product
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.integration.processes import run
from tests.thin import thinned

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).with_name("cuda_wheels.json")
FROM_CUDA_BUILD = re.compile(r"torch$|triton|nvidia|cuda|cupy")
# Newer than what torch asks for: what pip takes where nothing holds it back.
NEWEST = {"nvidia-cuda-nvrtc": "13.5.37", "nvidia-cuda-nvdisasm": "13.5.37"}

Wheels = dict[tuple[str, str], list[str]]  # (name, version) -> lines of metadata


def recorded() -> Wheels:
    """torch's CUDA build, CuPy and what they need."""
    document = json.loads(RECORDED.read_text("utf-8"))
    return {(name, item["version"]): item["metadata"] for name, item in document.items()}


def installed() -> Wheels:
    """The packages of this environment, with its torch."""
    found = {}
    for distribution in metadata.distributions():
        keys = ("Requires-Dist", "Provides-Extra")
        lines = [f"{k}: {v}" for k in keys for v in distribution.metadata.get_all(k) or []]
        found[distribution.metadata["Name"], distribution.version] = lines
    return found


def without_torch(wheels: Wheels) -> Wheels:
    return {key: lines for key, lines in wheels.items() if not FROM_CUDA_BUILD.match(key[0])}


def builds() -> dict[str, Wheels]:
    """Return the packages of an index, by the build of torch that it holds."""
    torch = next(lines for (name, _), lines in installed().items() if name == "torch")
    plain = [line for line in torch if not re.search("nvidia|cuda|triton", line)]
    version = metadata.version("torch").partition("+")[0]
    newest: Wheels = {item: [] for item in NEWEST.items()}
    cupy = {key: lines for key, lines in recorded().items() if re.match("cupy|cuda-path", key[0])}
    common = without_torch(installed()) | newest
    cpu = {("torch", f"{version}+cpu"): plain}
    return {"cuda": common | recorded(), "cpu": common | cupy | cpu}


def write_wheels(wheels: Wheels, folder: Path) -> None:
    """One wheel without content per entry."""
    for (name, version), lines in wheels.items():
        stem = f"{re.sub('[-_.]+', '_', name)}-{version}"
        head = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{stem}.dist-info/METADATA", "\n".join([*head, *lines, ""]))
            wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{stem}.dist-info/RECORD", "")


def commands() -> list[str]:
    """The arguments of every `pip install`, the checkout replaced by the package's name."""
    text = "\n".join((ROOT / page).read_text("utf-8") for page in ("README.md", "docs/install.md"))
    found = re.findall(r"(?:^|`)pip install ([^`\n#]+)", text, re.MULTILINE)
    install = (ROOT / "Makefile").read_text("utf-8").partition("\ndemo:")[0]
    found += [
        f"-c constraints.txt {arguments}"
        for arguments in re.findall(r"^\t\$\(PIP_INSTALL\) (.+)", install, re.MULTILINE)
    ]
    found = [re.sub(r"\$\(.*?\) ?", "", arguments).strip() for arguments in found]
    return sorted({re.sub(r'(-e )?"?\.(\[[\w,]+\])?"?$', r"ds_quant\2", a) for a in found})


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for build, wheels in builds().items():
        folders[build] = tmp_path_factory.mktemp(build)
        write_wheels(wheels, folders[build])
    return folders


def resolve(arguments: str, index: Path) -> list[str]:
    """Return the packages that pip would install, as name-version."""
    options = ("--dry-run", "--ignore-installed", "--no-index", "--find-links", index)
    pip = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *options)
    alone = {"PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    printed = run(*pip, *shlex.split(arguments), cwd=ROOT, **alone)
    return printed.partition("Would install ")[2].split()


def test_there_are_commands_with_and_without_constraints() -> None:
    assert {"torch", "ds_quant[deepspeed,cuda12]", "ds_quant[deepspeed,hf]"} <= set(commands())
    assert {"-c constraints.txt torch", "-c constraints.txt ds_quant[dev]"} <= set(commands())


@pytest.mark.parametrize(
    ("build", "arguments"),
    thinned(
        product(("cuda", "cpu"), commands()),
        lambda *case: case == ("cuda", "-c constraints.txt torch"),
    ),
)
def test_command_resolves(arguments: str, build: str, indexes: dict[str, Path]) -> None:
    chosen = resolve(arguments, indexes[build])
    torch = [name for name in chosen if name.startswith("torch-")]
    assert torch and ("+cpu" in torch[0]) == (build == "cpu"), chosen
    nvrtc = [name for name in chosen if name.startswith("nvidia-cuda-nvrtc-")]
    if build == "cuda":
        assert len(nvrtc) == 1 and nvrtc != [f"nvidia-cuda-nvrtc-{NEWEST['nvidia-cuda-nvrtc']}"]


def test_a_pin_that_meets_torchs_own_is_refused(indexes: dict[str, Path], tmp_path: Path) -> None:
    """The test above can fail: this is how it does."""
    pins = tmp_path / "constraints.txt"
    pins.write_text((ROOT / "constraints.txt").read_text("utf-8") + "nvidia-cuda-nvrtc==13.5.37\n")
    with pytest.raises(AssertionError, match="ResolutionImpossible"):
        resolve(f"-c {pins} torch", indexes["cuda"])


def test_recorded_metadata_is_of_the_constrained_torch() -> None:
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()
            if line and not line.startswith("#")]  # fmt: skip
    (torch,) = (pin for pin in pins if pin.name == "torch")
    (version,) = (version for name, version in recorded() if name == "torch")
    assert version in torch.specifier, f"record cuda_wheels.json again, see {__file__}"


def main() -> None:
    """Write cuda_wheels.json from reports of pip."""
    found: dict[str, dict] = {}
    for report in sys.argv[1:]:
        for item in json.loads(Path(report).read_text("utf-8"))["install"]:
            facts = item["metadata"]
            if FROM_CUDA_BUILD.match(facts["name"]):
                extras = facts.get("provides_extra", []) if facts["name"] == "cuda-toolkit" else []
                needs = [line for line in facts.get("requires_dist", [])
                         if extras or not Requirement(line).marker
                         or "extra" not in str(Requirement(line).marker)]  # fmt: skip
                lines = [*(f"Requires-Dist: {n}" for n in needs),
                         *(f"Provides-Extra: {e}" for e in extras)]  # fmt: skip
                found[facts["name"]] = {"version": facts["version"], "metadata": lines}
    RECORDED.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    main()
