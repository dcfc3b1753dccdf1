"""Train with Accelerate under DDP, without DeepSpeed.

accelerate launch --multi_gpu --num_processes 2 ddp_accelerate.py
Without GPUs put ACCELERATE_USE_CPU=true in front.
"""

import data
import torch
from accelerate import Accelerator

import ds_quant
from ds_quant import ddp


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = data.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = torch.utils.data.DataLoader(data.rows(320), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ddp.attach(model, {"scheme": "eden4"}, optimizer=optimizer)
    for step, batch in enumerate(loader, start=1):
        with accelerator.accumulate(model):  # enters no_sync() in all micro-steps but the last
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if step % 10 == 0:
            accelerator.print(f"step {step // 2}: loss {loss.item():.3f}", flush=True)
    report = ds_quant.report(model)  # None without a block
    if report is not None:
        accelerator.print(report["received_bytes"], flush=True)
    accelerator.save_model(model, "out")


if __name__ == "__main__":
    main()
