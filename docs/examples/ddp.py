"""Train under DistributedDataParallel, without DeepSpeed.

torchrun --standalone --nproc-per-node 2 ddp.py
"""

import data
import torch
from torch.nn.parallel import DistributedDataParallel

import ds_quant
from ds_quant import ddp

STEPS = 20
MICRO_STEPS = 2


def main():
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    model = DistributedDataParallel(data.Decoder().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ddp.attach(model, {"scheme": "eden4"}, optimizer=optimizer)

    samples = data.rows()[rank::world]

    def backward(micro_step):
        batch = data.batch(samples, micro_step)
        loss = model(**{key: tensor.to(device) for key, tensor in batch.items()})
        (loss / MICRO_STEPS).backward()
        return loss.item()

    for step in range(STEPS):
        first = MICRO_STEPS * step
        with model.no_sync():  # gradients are sent by the last backward alone
            for micro_step in range(first, first + MICRO_STEPS - 1):
                backward(micro_step)
        loss = backward(first + MICRO_STEPS - 1)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % 5 == 0:
            print(f"step {step + 1}: loss {loss:.3f}", flush=True)
    report = ds_quant.report(model)  # None without a block
    if rank == 0 and world > 1 and report is not None:
        received = sum(report["received_bytes"]["gradients"].values()) / 1e6
        full_precision = received + sum(report["saved_bytes"]["gradients"].values()) / 1e6
        ratio = full_precision / received
        print(f"gradients: received {received:.1f} MB instead of {full_precision:.1f}, ", end="")
        print(f"{ratio:.1f} times fewer bytes", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
