"""PyTorch Lightning: a callback attaches to the DDP that the strategy has made.

    python examples/lightning_fit.py        starts two processes on the CPU

Lightning calls a `ddp_comm_hook=` of its DDPStrategy on GPUs only; the callback works everywhere,
and so does `agentcomm run --codec int8 script.py` without it.
"""

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import agentcomm


class Compression(lightning.Callback):
    """Sends gradients compressed."""

    def __init__(self, spec: str) -> None:
        self.spec = spec

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Attach: the strategy has wrapped the module by now."""
        self.handle = agentcomm.attach(trainer.strategy.model, self.spec)

    def on_train_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Say what was sent."""
        if trainer.is_global_zero:
            print(f"{self.handle.stats().ratio:.2f} times fewer bytes", flush=True)


class Classifier(lightning.LightningModule):
    """A perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss."""
        x, labels = batch
        loss = nn.functional.cross_entropy(self.net(x), labels)
        if index == 31 and self.global_rank == 0:
            print(f"epoch {self.current_epoch}  loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def main() -> None:
    """Train for two epochs."""
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(2048, 64)
    data = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=32)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=2, callbacks=[Compression("int8")], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier(), data)


if __name__ == "__main__":
    main()
