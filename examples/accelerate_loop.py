"""Hugging Face Accelerate: its enumeration of hooks has no other; attach to what it returns.

torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import agentcomm


def main() -> None:
    """Train a classifier for two epochs, with gradient accumulation."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    x = torch.randn(2048, 64)
    data = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    handle = agentcomm.attach(model, "int8")
    for epoch in range(2):
        for inputs, labels in data:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}  loss {loss.item():.4f}")
    stats = handle.stats()
    accelerator.print(f"{stats.rounds} rounds, {stats.ratio:.2f} times fewer bytes")
    accelerator.end_training()


if __name__ == "__main__":
    main()
