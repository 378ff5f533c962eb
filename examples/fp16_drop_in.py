"""torch's fp16 hook, on agentcomm: the import is all that changes; bf16 works on the CPU too.

torchrun --standalone --nproc-per-node 2 examples/fp16_drop_in.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# was: from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from agentcomm import default_hooks


def train(hook: object) -> float:
    """Return the last loss with a hook of torch's name."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 8)))
    ddp.register_comm_hook(state=None, hook=hook)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(200):
        x = torch.randn(32, 32)
        loss = nn.functional.mse_loss(ddp(x), x[:, :8].sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    """Train with each of torch's three hooks."""
    dist.init_process_group("gloo")
    for name in ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"):
        loss = train(getattr(default_hooks, name))
        if dist.get_rank() == 0:
            print(f"{name:20} loss {loss:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
