"""Train LoRA adapters of a frozen model under ZeRO-3.

The traffic is the frozen weights, gathered in every step. `ds_lora.json` keeps a copy of them in
every node, so that between nodes only adapters travel.

deepspeed --num_accelerators 2 lora.py           (without GPUs: DS_ACCELERATOR=cpu deepspeed ...)
"""

import data
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments


def main():
    args = TrainingArguments(
        output_dir="adapters",
        deepspeed="ds_lora.json",
        bf16=True,
        max_steps=20,
        logging_steps=5,
        per_device_train_batch_size=4,
        learning_rate=2e-2,
        report_to=[],
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
    )
    # Under ZeRO-3 the arguments come first: they make `model()` split the weights over the ranks.
    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = Trainer(
        model=get_peft_model(data.model(), adapters), args=args, train_dataset=data.rows()
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
