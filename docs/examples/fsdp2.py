"""Train under FSDP2, without DeepSpeed.

torchrun --standalone --nproc-per-node 2 fsdp2.py
"""

import data
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

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
    model = data.Decoder().to(device)
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in model.layers:
        fully_shard(layer, mp_policy=bf16)
    fully_shard(model, mp_policy=bf16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    fsdp2.attach(model, {"scheme": "qsdp"}, optimizer=optimizer)

    samples = data.rows()[rank::world]
    for step in range(STEPS):
        batch = data.batch(samples, step)
        loss = model(**{key: tensor.to(device) for key, tensor in batch.items()})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % 5 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    report = ds_quant.report(model)  # None without a block
    if rank == 0 and world > 1 and report is not None:
        for role, hops in report["received_bytes"].items():
            received = sum(hops.values()) / 1e6
            full_precision = received + sum(report["saved_bytes"][role].values()) / 1e6
            ratio = full_precision / received
            print(f"{role}: received {received:.1f} MB instead of {full_precision:.1f}, ", end="")
            print(f"{ratio:.1f} times fewer bytes", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
