"""Whole reductions on the CUDA kernels: messages and sums of the wire page."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.unit.test_reductions import Case, check

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    "case",
    [
        Case("sdp4bit", (2, 2), None, BF16, 3, 3),
        Case("eden3", (3, 2), "two owners", BF16, None, 1),
        Case("qsdp", (1, 3), None, torch.float32, None, 1),
    ],
    ids=str,
)
def test_messages_and_sums_are_those_of_the_page(cuda_kernels, monkeypatch, case: Case) -> None:
    one_at_a_time, run = threading.Lock(), cuda_kernels.run_tables

    def run_tables(tables) -> None:
        with one_at_a_time:  # blocks of the shim share memory
            run(tables)

    monkeypatch.setattr(cuda_kernels, "run_tables", run_tables)
    check(case)
    assert cuda_kernels.macros, "the kernels ran"
