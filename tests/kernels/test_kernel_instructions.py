"""benchmarks/kernel_instructions.py: counts of instructions, and the speed that follows."""

from __future__ import annotations

import json

import kernel_instructions
import kernels
import pytest
import torch
from kernel_instructions import COPY, MEMORY, RESULT

from tests.kernels import compiler

GPU = kernel_instructions.Gpu("90", multiprocessors=100, teraflops=25.6, terabytes=1.0, fma=128)


@pytest.fixture(scope="module")
def result() -> dict:
    return json.loads(RESULT.read_text("utf-8"))


def test_every_operation_of_kernels_py_has_a_prediction(result) -> None:
    bench = kernels.Bench(torch.device("cpu"), 0, ("auto",))
    found = kernels.operations(bench, 1, torch.bfloat16, "")
    wanted = [(operation.name, operation.codec) for operation in (make() for make in found)]
    for architecture in compiler.ARCHITECTURES:
        rows = result["rows"][architecture]
        assert [(row["operation"], row["codec"]) for row in rows] == wanted


@pytest.mark.parametrize(
    ("machine", "share", "limit"),
    [
        ({"issue": 10, "alu": 2}, MEMORY, "memory"),
        # 1e11 clocks per second of all multiprocessors, 4.5 bytes at 0.9 TB/s: 5 ps to copy.
        # At the rates that are reached, 128 * 0.85, 64 * 0.9 and 16 * 0.9, below: 10, 10, 20 ps.
        ({"issue": 128 * 0.85, "alu": 2}, 0.5, "issue"),
        ({"issue": 80, "alu": 64 * 0.9}, 0.5, "alu"),
        ({"issue": 40, "alu": 2, "xu": 16 * 0.9 * 2}, 0.25, "xu"),
    ],
)
def test_a_share_follows_from_the_slowest_part(machine: dict, share: float, limit: str) -> None:
    row = {"bytes": 5 * COPY, "machine": machine}
    assert GPU.clock == 1e9
    assert kernel_instructions.share_of_copy(row, GPU) == (pytest.approx(share), limit)


def test_machine_instructions_have_pipes() -> None:
    pipes = {name: kernel_instructions.pipe_of(name) for name in (
        "LOP3.LUT", "IMAD.WIDE.U32", "LDG.E.128", "SHFL.BFLY", "MUFU.RCP", "UIADD3", "BRA", "PRMT"
    )}  # fmt: skip
    assert list(pipes.values()) == ["alu", "fma", "lsu", "lsu", "xu", "none", "none", "alu"]


def test_a_miss_is_marked(result) -> None:
    first, second = kernel_instructions.predictions(result)[:2]
    rows = []
    for prediction, miss in ((first, 0.0), (second, -0.2)):
        share = prediction["shares"]["H100"][0] + miss
        names = {name: prediction[name] for name in ("operation", "codec")}
        rows.append({**names, "dtype": "bf16", "way": "auto", "share_of_copy": share})
    hardware = {"gpus": ["NVIDIA H100 80GB HBM3"]}
    measured = {"provenance": {"hardware": hardware}, "rows": rows}
    near, far = kernel_instructions.held_against(result, measured)
    assert "+0.00" in near and "explain" not in near
    assert far.endswith("-0.20  explain")
    hardware["gpus"] = ["Tesla T4"]
    with pytest.raises(ValueError, match="predictions are for A100, H100, H200, B200"):
        kernel_instructions.held_against(result, measured)


@pytest.mark.skipif(
    compiler.nvrtc_version() is None or compiler.nvdisasm() is None,
    reason="needs NVRTC and nvdisasm: pip install ds_quant[nvrtc]",
)
def test_counts_repeat(result) -> None:
    """Those of casts."""
    if result["nvrtc"] != compiler.nvrtc_version():
        pytest.skip(f"the counts are of NVRTC {result['nvrtc']}")
    exact = kernels.EXACT.name
    rows = [row for row in result["rows"]["90"] if row["codec"] == exact]
    assert kernel_instructions.count("90", result["arguments"]["bytes"], exact) == rows
    assert len(rows) == 2
