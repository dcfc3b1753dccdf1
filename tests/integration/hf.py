"""Programs of Hugging Face Trainer users, with small random models and two CPU ranks.

They do not name ds_quant: only the DeepSpeed config has the block.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

VOCABULARY, LENGTH, SAMPLES = 96, 16, 64
# A model this small would stay gathered from forward to backward.
REFETCH = {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0}


def ds_config(stage: int, block: dict[str, Any] | None, **zero: Any) -> dict[str, Any]:
    """Return a config as in the documentation of Hugging Face, "auto" in all keys that allow it.

    block: of ``quantized_comm``; None: without the plugin.
    zero: further keys of ``zero_optimization``.
    """
    sections: dict[str, Any] = {"stage": stage, "reduce_bucket_size": "auto"}
    if stage == 3:
        sections |= {
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
            **REFETCH,
        }
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto",
                "torch_adam": True,  # the fused CPU Adam would be compiled for a minute
            },
        },
        "zero_optimization": sections | zero,
    }  # fmt: skip
    return config if block is None else config | {"quantized_comm": block}


def options(folder: Path | str, config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the arguments of a short run without reports, for any trainer."""
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "deepspeed": config,
        "per_device_train_batch_size": 4,
        "max_steps": 6,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
        "bf16": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return defaults | changes


def arguments(folder: Path | str, config: dict[str, Any], **changes: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(**options(folder, config, **changes))


def model_config(kind: str) -> Any:
    from transformers import GPT2Config, LlamaConfig

    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    if kind == "gpt2":
        return GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **tokens,
        )  # fmt: skip
    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH, **tokens,
    )  # fmt: skip


def new_model(kind: str) -> nn.Module:
    """Return a model with seeded random weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(model_config(kind))


def dataset() -> list[dict[str, Tensor]]:
    """Return token sequences that count up from a random start. They are learnt in a few steps."""
    starts = torch.randint(0, VOCABULARY, (SAMPLES,), generator=torch.Generator().manual_seed(1))
    rows = (starts[:, None] + torch.arange(LENGTH)) % VOCABULARY
    labels = rows.clone()
    labels[:, 0] = -100  # has no prediction; Trainer would count it
    return [{"input_ids": r, "labels": label} for r, label in zip(rows, labels, strict=True)]


def trainer(model: nn.Module, args: Any) -> Any:
    from transformers import Trainer

    data = dataset()
    return Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:8])


def losses(trained: Any) -> list[float]:
    """Return the training losses in order."""
    return [row["loss"] for row in trained.state.log_history if "loss" in row]


def master_weights(engine: DeepSpeedEngine) -> dict[str, np.ndarray]:
    """Return the exact fp32 master weights by name. A collective, for all stages."""
    from deepspeed.utils import safe_get_full_fp32_param

    weights = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            weights[name] = as_array(safe_get_full_fp32_param(parameter))
    return weights


def as_array(tensor: Tensor) -> np.ndarray:
    """Return the values as fp32 NumPy array, which can be pickled."""
    return tensor.detach().float().cpu().numpy().copy()


def rounded(master: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return master weights as a file in ``dtype`` must have them."""
    return as_array(torch.from_numpy(master).to(dtype))
