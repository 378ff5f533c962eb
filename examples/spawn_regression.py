"""The smallest script: two processes of this machine fit a line; `attach` is the one line added.

python examples/spawn_regression.py [SPEC]
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import agentcomm

NRANKS, NSTEPS, NINPUTS = 2, 200, 64


def train(rank: int, store: str, spec: str) -> None:
    """Be one rank."""
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=NRANKS)
    torch.manual_seed(0)
    truth = torch.randn(NINPUTS, 32)
    ddp = DistributedDataParallel(nn.Linear(NINPUTS, 32))
    handle = agentcomm.attach(ddp, spec)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    torch.manual_seed(rank)  # every rank has its own data
    for step in range(NSTEPS):
        x = torch.randn(32, NINPUTS)
        loss = nn.functional.mse_loss(ddp(x), x @ truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 49:
            print(f"step {step + 1:4}  loss {loss.item():.6f}", flush=True)
    if rank == 0:
        print(handle.stats())
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        codec = sys.argv[1] if len(sys.argv) > 1 else "int8"
        mp.spawn(train, (f"{folder}/store", codec), nprocs=NRANKS)
