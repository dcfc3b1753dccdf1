"""Libraries that set FSDP2 up themselves, in their own way, train with a block as without one.

On gloo and the CPU, which some of these libraries do not foresee: a test names what it changes for
that. docs/fsdp2.md lists what a user adds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from ds_quant import fsdp2
from tests import needs
from tests.distributed.harness import on_ranks, scratch

needs.libraries("transformers", "accelerate", extra="clients")

pytestmark = pytest.mark.clients

BLOCK = {"min_numel": 64, "allow_full_replica": True, "node_size": 2}


def steps(model: Any, optimizer: Any, *, copies: int = 1) -> list[float]:
    """Take four steps of a language model. copies: neighbouring ranks that get the same rows."""
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank() // copies)
        tokens = torch.randint(0, 128, (2, 24), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


# ---- transformers: DistributedConfig ----


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            tie_word_embeddings=False,
        )
    )


def mixture() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=96,
            moe_intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
            num_experts=8,
            num_experts_per_tok=2,
            tie_word_embeddings=False,
        )
    )


SAVED = {"llama": llama, "mixture": mixture}
DISTRIBUTED = {
    "fsdp": ("llama", {"fsdp_size": 4}),
    "replicas": ("llama", {"fsdp_size": 2, "dp_replicate_size": 2}),
    "tensor parallel": ("llama", {"fsdp_size": 2, "tp_size": 2}),
    "experts": ("mixture", {"fsdp_size": 4, "ep_size": 2}),
    "experts of one rank": ("mixture", {"fsdp_size": 4, "ep_size": 4}),
}


def saved_model(name: str) -> Path:
    """Return a folder with a small model."""
    folder = scratch() / name
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        SAVED[name]().save_pretrained(folder)
    dist.barrier()
    return folder


def distributed(title: str, block: dict[str, Any] | None) -> tuple[list[float], Any]:
    """Load a model in the way that transformers documents, and train it."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    name, sizes = DISTRIBUTED[title]
    model = AutoModelForCausalLM.from_pretrained(
        saved_model(name), distributed_config=DistributedConfig(**sizes), dtype=torch.float32
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    front = None
    if block is not None:
        if "dp_replicate_size" in sizes:
            block = {key: value for key, value in block.items() if key != "node_size"}
        front = fsdp2.attach(model, block, optimizer=optimizer)
    return steps(model, optimizer, copies=sizes.get("tp_size", 1)), front


@pytest.mark.parametrize("title", DISTRIBUTED)
@on_ranks(4, timeout=600)
def test_transformers_distributed_config(title: str) -> None:
    # transformers asks torch for an accelerator, of which a machine without one has none.
    torch._C._get_accelerator = lambda: torch.device("cpu")
    plain, _ = distributed(title, None)
    exact, _ = distributed(title, {**BLOCK, "scheme": "full_precision"})
    assert exact == pytest.approx(plain, rel=1e-6)
    for scheme in ("eden4", "qsdp"):
        losses, front = distributed(title, {**BLOCK, "scheme": scheme})
        assert losses == pytest.approx(plain, abs=0.05), (scheme, losses, plain)
        assert losses != plain and front.step == 4


# ---- transformers: Trainer with FSDP2 of Accelerate ----


def shard_on_the_cpu() -> None:
    """Let Accelerate shard on a CPU, where it does not: replaced is the kind of training."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    original = AcceleratorState.__init__

    def sharding(self: AcceleratorState, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        plugin = options.get("fsdp_plugin")
        if plugin is not None:
            if self._mixed_precision != "no":
                plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = plugin
            self.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = sharding


def options(learning_rate: float = 3e-3) -> dict[str, Any]:
    """Return the arguments of a short run under FSDP2 for any trainer on top of transformers."""
    return {
        "output_dir": str(scratch() / "trainer"),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": learning_rate,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "fsdp": True,
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        },
    }


def token_rows() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 128, (32, 24), generator=generator).tolist()
    return [{"input_ids": row, "labels": row} for row in tokens]


def by_trainer(**callbacks: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**options())
    return Trainer(model=llama(), args=arguments, train_dataset=token_rows(), **callbacks)


def by_trainer_with_adapters(**callbacks: Any) -> Any:
    """peft: LoRA adapters of a frozen model."""
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(llama(), adapters)
    arguments = TrainingArguments(**options(learning_rate=3e-2))
    return Trainer(model=model, args=arguments, train_dataset=token_rows(), **callbacks)


def by_sft_trainer(**callbacks: Any) -> Any:
    """TRL: supervised fine-tuning."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from tests.clients.programs import tokenizer

    arguments = SFTConfig(**options(), max_length=24, gradient_checkpointing=False)
    data = Dataset.from_list([{"input_ids": row["input_ids"]} for row in token_rows()])
    return SFTTrainer(
        model=llama(),
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer(),
        **callbacks,
    )


TRAINERS = {
    "Trainer": by_trainer,
    "Trainer and peft": by_trainer_with_adapters,
    "SFTTrainer": by_sft_trainer,
}


def trained(title: str, block: dict[str, Any] | None) -> tuple[list[float], list[float], Any]:
    """Train by a trainer, with a callback that attaches the block when training begins.

    Returns:
        losses, which TRL rounds to bf16, norms of the gradients, and the front.
    """
    from accelerate.state import AcceleratorState, PartialState
    from transformers import TrainerCallback

    AcceleratorState._reset_state(reset_partial_state=True)
    fronts = []

    class Attach(TrainerCallback):
        def on_train_begin(self, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
            fronts.append(fsdp2.attach(model, block, optimizer=optimizer))

    torch.manual_seed(0)
    trainer = TRAINERS[title](callbacks=[] if block is None else [Attach()])
    trainer.train()
    assert PartialState().num_processes == dist.get_world_size()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses = [entry["loss"] for entry in entries]
    norms = [entry["grad_norm"] for entry in entries]
    return losses, norms, fronts[0] if fronts else None


@pytest.mark.parametrize("title", TRAINERS)
@on_ranks(2, timeout=600, environment={"ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "true"})
def test_trainers_attach_in_a_callback(title: str) -> None:
    shard_on_the_cpu()
    plain, plain_norms, _ = trained(title, None)
    exact, norms, front = trained(title, {"scheme": "full_precision", "min_numel": 64})
    assert exact == plain and norms == plain_norms and front.step == 4
    losses, norms, front = trained(title, {"scheme": "qsdp", "min_numel": 64})
    assert losses == pytest.approx(plain, abs=0.05) and norms != plain_norms
    assert front.step == 4


# ---- torchao ----


def low_bit(name: str, block: dict[str, Any] | None) -> tuple[list[float], Any]:
    """Train with an optimizer of torchao, whose states have 8 or 4 bits."""
    import torchao.optim

    torch.manual_seed(0)
    model = llama()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = getattr(torchao.optim, name)(model.parameters(), lr=3e-3)
    front = None if block is None else fsdp2.attach(model, block, optimizer=optimizer)
    return steps(model, optimizer), front


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit"])
@on_ranks(2, timeout=600)
def test_optimizers_of_torchao(name: str) -> None:
    # torchao compiles its step, which fails on a CPU with sharded states, without the block too.
    torch.compiler.set_stance("force_eager")
    plain, _ = low_bit(name, None)
    exact, _ = low_bit(name, {**BLOCK, "scheme": "full_precision", "node_size": 1})
    assert exact == plain
    for scheme in ("eden4", "qsdp"):
        losses, front = low_bit(name, {**BLOCK, "scheme": scheme, "node_size": 1})
        assert losses == pytest.approx(plain, abs=0.05) and losses != plain
        assert front.step == 4


# ---- Accelerate: ParallelismConfig ----


@on_ranks(4, timeout=600, environment={"ACCELERATE_USE_CPU": "true"})
def test_accelerate_takes_no_parallelism_config_on_a_cpu() -> None:
    """It needs an accelerator. With one it makes the meshes of ``DistributedConfig``, on which
    FSDP2 shards as with ``fully_shard``.
    """
    from accelerate import Accelerator, ParallelismConfig

    with pytest.raises(ValueError, match="ParallelismConfig is only compatible"):
        Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2))
