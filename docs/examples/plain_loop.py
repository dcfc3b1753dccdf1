"""Train in a loop of your own.

deepspeed --num_accelerators 2 plain_loop.py     (without GPUs: DS_ACCELERATOR=cpu deepspeed ...)
"""

import data
import deepspeed
import torch

import ds_quant

STEPS = 20


def main():
    deepspeed.init_distributed()
    model = data.model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        config="ds_config.json",
    )
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    samples = data.rows()[rank::world]
    for step in range(STEPS):
        batch = data.batch(samples, step)
        loss = engine(**{key: tensor.to(engine.device) for key, tensor in batch.items()}).loss
        engine.backward(loss)
        engine.step()
        if rank == 0 and (step + 1) % 5 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    engine.save_checkpoint("checkpoint")  # exact weights; all ranks call it
    if rank == 0:
        report = ds_quant.report(engine)
        for name in ("received_bytes", "saved_bytes"):
            for role, links in report[name].items():
                print(f"{role} {name}: {sum(links.values()):.3g}", flush=True)


if __name__ == "__main__":
    main()
