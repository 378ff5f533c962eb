"""A script that knows nothing of agentcomm, for `agentcomm run`.

torchrun --standalone --nproc-per-node 2 -m agentcomm run --codec int8 examples/unchanged.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    """Train a classifier for two epochs."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(2048, 64)
    data = TensorDataset(x, x[:, :10].argmax(1))
    sampler = DistributedSampler(data)
    ddp = DDP(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=2e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in DataLoader(data, batch_size=32, sampler=sampler):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(inputs), labels)
            loss.backward()
            optimizer.step()
        print(f"rank {dist.get_rank()}  epoch {epoch}  loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
