"""Train with Accelerate.

accelerate launch --use_deepspeed --deepspeed_config_file ds_config.json --num_processes 2 \
    accelerate_loop.py
Without GPUs, set DS_ACCELERATOR=cpu; Accelerate then gives every process all the data.
"""

import data
import torch
from accelerate import Accelerator


def main():
    accelerator = Accelerator()  # takes the DeepSpeed config from `accelerate launch`
    model = data.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = torch.utils.data.DataLoader(data.rows(160), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, batch in enumerate(loader, start=1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            accelerator.print(f"step {step}: loss {loss.item():.3f}", flush=True)
    state = accelerator.get_state_dict(model)  # exact weights; all ranks call it
    if accelerator.is_main_process:
        torch.save(state, "model.pt")


if __name__ == "__main__":
    main()
