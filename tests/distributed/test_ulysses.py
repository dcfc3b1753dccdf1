"""Ulysses as the Hugging Face Trainer sets it up, by ``ParallelismConfig`` and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import harness
from tests.integration import hf

for library in ("transformers", "accelerate"):
    pytest.importorskip(library, reason=f"needs {library}: pip install 'ds_quant[hf]'")
try:
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
except ImportError:
    pytest.skip("needs an accelerate that knows DeepSpeed's Ulysses", allow_module_level=True)
harness.preload("tests.integration.hf_preload")


def trained(stage: int, block: dict[str, Any] | None, folder: str) -> tuple[list[float], Any]:
    """Losses and report; one sequence over all ranks, as gloo gathers over the world only."""
    from transformers import AutoModelForCausalLM, Trainer

    import ds_quant

    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    spread = ParallelismConfig(
        sp_size=torch.distributed.get_world_size(), sp_backend="deepspeed", sp_handler=handler
    )
    args = hf.arguments(folder, hf.ds_config(stage, block), parallelism_config=spread)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf.model_config("llama"), attn_implementation="sdpa")
    data = hf.dataset()
    for row in data:
        row["position_ids"] = torch.arange(hf.LENGTH)
    trainer = Trainer(model=model, args=args, train_dataset=data)
    trainer.train()
    return hf.losses(trainer), ds_quant.report(trainer.model_wrapped)


@pytest.mark.parametrize(
    ("stage", "world", "block"),
    [
        pytest.param(1, 2, {"scheme": "qsdp", "node_size": 1}, marks=pytest.mark.slow),
        (2, 2, {"scheme": "qsdp", "node_size": 1}),
        (3, 4, {"scheme": "sdp4bit", "node_size": 2}),
    ],
)
def test_a_sequence_over_all_ranks_trains_as_without_the_plugin(
    tmp_path: Path, stage: int, world: int, block: dict[str, Any]
) -> None:
    block = {**block, "min_numel": 512}  # else half of so small a model is exempt
    plain, ranks = (
        harness.run(trained, world, stage, b, str(tmp_path), timeout=120) for b in (None, block)
    )
    for (expected, _), (losses, report) in zip(plain, ranks, strict=True):
        assert expected[-1] < expected[0] - 0.5
        assert losses == pytest.approx(expected, abs=0.1 * (expected[0] - expected[-1]))
        assert losses != expected
        assert (report["world"], report["steps"]) == (world, len(losses))
        for role in ("weights", "gradients"):
            assert report["received_bytes"][role]["inter"] > 0
