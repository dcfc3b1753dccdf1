"""Train with Lightning under DDP, without DeepSpeed.

torchrun --standalone --nproc-per-node 2 ddp_lightning.py
"""

import data
import lightning
import torch

import ds_quant
from ds_quant import ddp


class Quantized(lightning.Callback):
    """Attach the block when Lightning has wrapped the model.

    DDPStrategy(ddp_comm_hook=) would register a second communication hook: leave it out.
    """

    def __init__(self, block):
        self.block = block

    def on_fit_start(self, trainer, pl_module):
        ddp.attach(trainer.strategy.model, self.block)

    def on_train_end(self, trainer, pl_module):
        hops = ds_quant.report(trainer.strategy.model)["received_bytes"]["gradients"]
        if trainer.is_global_zero:
            print(f"gradients received_bytes: {sum(hops.values()):.3g}", flush=True)


class Llama(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = data.model()

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        if index % 5 == 4:
            self.print(f"step {index + 1}: loss {loss.item():.3f}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main():
    trainer = lightning.Trainer(
        strategy="ddp",
        devices=2,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        max_steps=20,
        callbacks=[Quantized({"scheme": "eden4"})],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Llama(), torch.utils.data.DataLoader(data.rows(320), batch_size=4))


if __name__ == "__main__":
    main()
