"""Every kernel variant through NVRTC: spills, registers, instructions per element.

For sm_80, sm_90 and sm_100; instructions and the width of loads for sm_90 only, because the
disassembler takes as long as the compiler. Counts are static: loops are unrolled, rare paths are
included. ``python -m tests.kernels.test_compile`` prints the table, with ``--write`` it also
writes the baseline.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.kernels import compiler, variants
from tests.thin import thinned

BASELINE = Path(__file__).with_name("compile_baseline.json")

COUNTED = "90"  # the architecture whose instructions are counted

# sm_90, static instructions per element. The reference rounds q * scale and the sum separately, so
# a source costs 4 of them (isolate, subtract, multiply, add), 8 sources 31.
BARS = {
    "encode int4 stochastic g128 bf16": 19,
    "encode int4 stochastic g2048 bf16": 14,
    "encode Hadamard-32 int4 stochastic g128 bf16": 25,
    "decode_sum 8 x int4 g128 fp32": 33,
    "decode_sum 3 Gaussian bits, own signs, a source": 27,  # the loop over sources is not unrolled
    "recode 8 x int8 -> int4 nearest g128": 41,  # sums that stay fp32 are in the count
    # Both ways to code a block and to load 16 bytes are in the count; a block takes one of them.
    "lossless plan bf16": 230,
    "lossless write bf16": 260,
    "lossless read bf16": 435,
}

needs_nvrtc = pytest.mark.skipif(
    compiler.nvrtc_version() is None, reason="needs NVRTC: pip install ds_quant[nvrtc]"
)
HEADLINE, OTHERS = variants.headline(), variants.others()


# Every kernel once, with what takes most registers.
QUICK = (
    "encode Hadamard-32 int4 stochastic g128 bf16",
    "encode Hadamard-128 with signs, 5 Gaussian bits, fp32",
    "decode int8 random shift g1024 bf16",
    "decode_sum 8 x 4 Gaussian bits, Hadamard-128 with signs",
    "recode 8 x int8 -> 4 Gaussian bits",
    "lossless write bf16",
)


def row(name: str, launch, architecture: str) -> dict:
    """One line of the table."""
    report = compiler.report(launch, architecture, count=architecture == COUNTED)
    found = {"registers": report.registers, "spill_bytes": report.spill_bytes}
    if report.instructions is not None:
        found["per_element"] = report.per_element(compiler.elements_of(launch))
        found["loads_16_bytes"] = report.wide_loads
        found["loads_shorter"] = report.narrow_loads
        found["flushing"] = report.flushing
    return found


def line(name: str, architecture: str, found: dict) -> str:
    numbers = "  ".join(f"{key} {value}" for key, value in found.items())
    return f"sm_{architecture:<4}{name:<52}{numbers}"


def architectures() -> list:
    """make test compiles for the one that is counted."""
    return [
        pytest.param(name, marks=[] if name == COUNTED else pytest.mark.slow)
        for name in compiler.ARCHITECTURES
    ]


@needs_nvrtc
@pytest.mark.parametrize("architecture", architectures())
@pytest.mark.parametrize("name", thinned(HEADLINE, lambda name: name in QUICK))
def test_headline_variant_keeps_its_baseline(name: str, architecture: str) -> None:
    found = row(name, HEADLINE[name], architecture)
    print(line(name, architecture, found))
    assert found["spill_bytes"] == 0
    baseline = json.loads(BASELINE.read_text("utf-8"))
    if architecture == COUNTED:
        if compiler.nvdisasm() is None:
            pytest.skip("no spills; counting needs nvdisasm: pip install ds_quant[nvrtc]")
        assert found["per_element"] <= BARS.get(name, 100)
        assert found["flushing"] == 0, "denormals would be zeros here and not in the reference"
    if baseline["nvrtc"] != compiler.nvrtc_version():
        pytest.skip(f"no spills; the baseline is of NVRTC {baseline['nvrtc']}")
    wanted = baseline["kernels"][name][f"sm_{architecture}"]
    # A tenth of slack: a new count is written down with --write, in the same commit.
    assert found["registers"] <= wanted["registers"] + 8, wanted
    if architecture == COUNTED:
        assert found["per_element"] <= 1.1 * wanted["per_element"], wanted
        assert found["loads_16_bytes"] >= wanted["loads_16_bytes"], wanted


@needs_nvrtc
def test_learned_levels_are_compared_without_flushing_denormals() -> None:
    if compiler.nvdisasm() is None:
        pytest.skip("counting needs nvdisasm: pip install ds_quant[nvrtc]")
    name = next(name for name in OTHERS if name.startswith("encode") and "learned" in name)
    assert compiler.report(OTHERS[name], COUNTED).flushing == 0


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("architecture", compiler.ARCHITECTURES)
@pytest.mark.parametrize("name", OTHERS)
def test_variant_compiles_without_spills(name: str, architecture: str) -> None:
    report = compiler.report(OTHERS[name], architecture, count=False)
    assert report.spill_bytes == 0, report
    assert report.stack_bytes < 1024, f"{report}: tables are read where they lie"


def main() -> None:
    """Print the table; write the baseline if asked."""
    kernels: dict[str, dict] = {}
    for name, launch in HEADLINE.items():
        for architecture in compiler.ARCHITECTURES:
            found = row(name, launch, architecture)
            kernels.setdefault(name, {})[f"sm_{architecture}"] = found
            print(line(name, architecture, found), flush=True)
    if "--write" in sys.argv:
        document = {"nvrtc": compiler.nvrtc_version(), "kernels": kernels}
        BASELINE.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
