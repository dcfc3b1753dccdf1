"""Train with Accelerate's FSDP2 plugin, without DeepSpeed.

accelerate launch --use_fsdp --fsdp_version 2 --num_processes 2 fsdp2_accelerate.py
Needs GPUs: without them Accelerate does not shard, and attach says so.
"""

import data
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin

import ds_quant
from ds_quant import fsdp2


def main():
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,  # all ranks make the same model
    )
    accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision="bf16")
    model = data.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = torch.utils.data.DataLoader(data.rows(160), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    fsdp2.attach(model, {"scheme": "qsdp"}, optimizer=optimizer)
    for step, batch in enumerate(loader, start=1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            accelerator.print(f"step {step}: loss {loss.item():.3f}", flush=True)
    report = ds_quant.report(model)  # None without a block
    if report is not None:
        accelerator.print(report["received_bytes"], flush=True)
    state = accelerator.get_state_dict(model)  # exact weights; all ranks call it
    if accelerator.is_main_process:
        torch.save(state, "model.pt")


if __name__ == "__main__":
    main()
