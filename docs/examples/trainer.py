"""Train with Hugging Face Trainer.

deepspeed --num_accelerators 2 trainer.py        (without GPUs: DS_ACCELERATOR=cpu deepspeed ...)
"""

import data
import torch
from transformers import Trainer, TrainingArguments


def main():
    args = TrainingArguments(
        output_dir="out",
        deepspeed="ds_config.json",
        bf16=True,
        max_steps=20,
        logging_steps=5,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        report_to=[],
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model=data.model(), args=args, train_dataset=data.rows())
    trainer.train()
    trainer.save_model()  # exact 16-bit weights


if __name__ == "__main__":
    main()
