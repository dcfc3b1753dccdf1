"""Train under FSDP2, without DeepSpeed.

torchrun --standalone --nproc-per-node 2 fsdp2.py
"""

import data
import torch
from torch.distributed.fsdp import fully_shard

import ds_quant
from ds_quant import fsdp2

STEPS = 20


def main():
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    model = data.model().to(device)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    fsdp2.attach(model, {"scheme": "qsdp"}, optimizer=optimizer)

    samples = data.rows()[rank::world]
    for step in range(STEPS):
        chosen = samples[4 * step : 4 * step + 4]
        batch = {key: torch.stack([row[key] for row in chosen]).to(device) for key in chosen[0]}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % 5 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    if rank == 0:
        for role, hops in ds_quant.report(model)["received_bytes"].items():
            print(f"{role} received_bytes: {sum(hops.values()):.3g}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
