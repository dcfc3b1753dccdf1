"""Programs of users of client libraries, with a tiny model and two CPU ranks.

They do not name ds_quant: only the DeepSpeed config has the block. Every program trains ``STEPS``
optimizer steps in a folder and returns its losses and saved files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tests.integration import hf

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

STEPS = 6
WORDS = [f"w{i}" for i in range(hf.VOCABULARY - 3)]


class Trained(NamedTuple):
    """The losses that the library logs, the DeepSpeed engine, and the folder of the saved model."""

    losses: list[float]
    engine: DeepSpeedEngine
    saved: Path


Program = Callable[[dict[str, Any], Path], Trained]


def tokenizer() -> Any:
    """Return a tokenizer with one token per word, without a download."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "<bos>", "<eos>", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def _sentence(start: int, length: int, step: int = 1) -> str:
    return " ".join(WORDS[(start + step * i) % len(WORDS)] for i in range(length))


def _texts(make: Callable[[int], dict[str, str]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list([make(7 * i) for i in range(hf.SAMPLES)])


def _options(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the arguments of a short run for any trainer of TRL."""
    own = {"learning_rate": 2e-3, "gradient_checkpointing": False, "seed": 0}
    return hf.options(folder, config, max_steps=STEPS, **own)


def _finish(trainer: Any, folder: Path, **start: Any) -> Trained:
    trainer.train(**start)
    saved = folder / "final"
    trainer.save_model(str(saved))
    torch.distributed.barrier()
    return Trained(hf.losses(trainer), trainer.model_wrapped, saved)


def trainer(config: dict[str, Any], folder: Path) -> Trained:
    """transformers.Trainer: checkpointing of activations, saves, evaluation, best model at end."""
    saving = {
        "save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3,
        "load_best_model_at_end": True, "gradient_checkpointing": True,
    }  # fmt: skip
    args = hf.arguments(folder, config, max_steps=STEPS, **saving)
    return _finish(hf.trainer(hf.new_model("llama"), args), folder)


def resumed(config: dict[str, Any], folder: Path) -> Trained:
    """transformers.Trainer, six steps, the last three from a checkpoint."""
    saving = {"save_strategy": "steps", "save_steps": 3}
    first = hf.trainer(hf.new_model("llama"), hf.arguments(folder, config, max_steps=3, **saving))
    first.train()
    second = hf.trainer(hf.new_model("llama"), hf.arguments(folder, config, max_steps=STEPS))
    return _finish(second, folder, resume_from_checkpoint=str(folder / "checkpoint-3"))


def lora(config: dict[str, Any], folder: Path) -> Trained:
    """peft: LoRA adapters of a frozen model, with Trainer."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(hf.new_model("llama"), adapters)
    args = hf.arguments(folder, config, max_steps=STEPS, learning_rate=2e-2)
    return _finish(hf.trainer(model, args), folder)


def sft(config: dict[str, Any], folder: Path) -> Trained:
    """trl.SFTTrainer on short texts."""
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(**_options(config, folder), max_length=hf.LENGTH)
    data = _texts(lambda start: {"text": _sentence(start, 12)})
    made = SFTTrainer(
        hf.new_model("llama"), args=args, train_dataset=data, processing_class=tokenizer()
    )
    return _finish(made, folder)


def dpo(config: dict[str, Any], folder: Path) -> Trained:
    """trl.DPOTrainer with a frozen reference model, which becomes an engine of its own."""
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(**_options(config, folder), max_length=hf.LENGTH)
    data = _texts(
        lambda start: {
            "prompt": _sentence(start, 4),
            "chosen": " " + _sentence(start + 4, 4),
            "rejected": " " + _sentence(start + 4, 4, step=5),
        }
    )
    made = DPOTrainer(
        hf.new_model("llama"), hf.new_model("llama"), args=args, train_dataset=data,
        processing_class=tokenizer(),
    )  # fmt: skip
    return _finish(made, folder)


def _reward(completions: list[str], **_: Any) -> list[float]:
    """Rewards variety, so that groups differ."""
    return [float(len(set(completion.split()))) for completion in completions]


def grpo(config: dict[str, Any], folder: Path) -> Trained:
    """trl.GRPOTrainer: generates with the model that is trained, then learns from rewards."""
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        **_options(config, folder), num_generations=4, max_completion_length=6, beta=0.0
    )
    data = _texts(lambda start: {"prompt": _sentence(start, 4)})
    made = GRPOTrainer(
        hf.new_model("llama"), _reward, args=args, train_dataset=data,
        processing_class=tokenizer(),
    )  # fmt: skip
    return _finish(made, folder)


def lightning(config: dict[str, Any], folder: Path) -> Trained:
    """lightning.Trainer with DeepSpeedStrategy, which refuses devices other than CUDA."""
    import lightning as pl
    from lightning.pytorch.strategies import DeepSpeedStrategy
    from torch.utils.data import DataLoader

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[torch.Tensor] = []

        def configure_model(self) -> None:
            self.model = hf.new_model("llama")

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss = self.model(**batch).loss
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=5e-3)

    own = {k: v for k, v in config.items() if v != "auto" and k not in ("optimizer", "bf16")}
    own["train_micro_batch_size_per_gpu"] = 4
    own["zero_allow_untested_optimizer"] = True
    own["zero_optimization"] = {k: v for k, v in own["zero_optimization"].items() if v != "auto"}
    runner = pl.Trainer(
        accelerator="cuda", devices=2, precision="bf16-true", max_steps=STEPS,
        strategy=DeepSpeedStrategy(config=own),
        default_root_dir=folder, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    module = Module()
    runner.fit(module, DataLoader(hf.dataset(), batch_size=4))
    engine = runner.strategy.model
    losses = torch.stack(module.losses)
    torch.distributed.all_reduce(losses)
    saved = folder / "final"
    runner.save_checkpoint(saved)
    return Trained((losses / 2).tolist(), engine, saved)


PROGRAMS: dict[str, Program] = {
    program.__name__: program for program in (trainer, resumed, lora, sft, dpo, grpo, lightning)
}
