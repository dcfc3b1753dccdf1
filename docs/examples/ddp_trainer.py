"""Train with the Hugging Face Trainer under DDP, without DeepSpeed.

torchrun --standalone --nproc-per-node 2 ddp_trainer.py     (without GPUs: ACCELERATE_USE_CPU=true)
"""

import data
from transformers import Trainer, TrainerCallback, TrainingArguments

import ds_quant
from ds_quant import ddp


class Quantized(TrainerCallback):
    """Attach the block when training begins. A second train() finds it attached."""

    def __init__(self, block):
        self.block = block
        self.trainer = None  # set below: the callback itself is given the unwrapped model

    def on_train_begin(self, args, state, control, **kwargs):
        ddp.attach(self.trainer.model_wrapped, self.block)


def main():
    arguments = TrainingArguments(
        output_dir="out",
        learning_rate=3e-3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=20,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
    )
    callback = Quantized({"scheme": "eden4"})
    trainer = Trainer(
        model=data.model(), args=arguments, train_dataset=data.rows(), callbacks=[callback]
    )
    callback.trainer = trainer
    trainer.train()
    trainer.save_model()
    report = ds_quant.report(trainer.model_wrapped)  # None without a block
    if trainer.is_world_process_zero() and report is not None:
        hops = report["received_bytes"]["gradients"]
        print(f"gradients received_bytes: {sum(hops.values()):.3g}", flush=True)


if __name__ == "__main__":
    main()
