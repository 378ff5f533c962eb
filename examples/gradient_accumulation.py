"""Gradient accumulation: with `no_sync` only every fourth backward pass exchanges gradients.

torchrun --standalone --nproc-per-node 2 examples/gradient_accumulation.py
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import agentcomm

NSTEPS, NMICRO = 100, 4  # micro batches per step


def main() -> None:
    """Train a small classifier."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)))
    handle = agentcomm.attach(ddp, "int4")
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(NSTEPS):
        optimizer.zero_grad()
        for micro in range(NMICRO):
            x = torch.randn(16, 64)
            labels = x[:, :10].argmax(1)
            last = micro == NMICRO - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                loss = nn.functional.cross_entropy(ddp(x), labels) / NMICRO
                loss.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        if dist.get_rank() == 0 and step % 25 == 24:
            print(f"step {step + 1}  loss {NMICRO * loss.item():.4f}", flush=True)
    rounds = handle.stats().rounds
    assert rounds == NSTEPS, rounds  # not NSTEPS * NMICRO
    if dist.get_rank() == 0:
        print(f"{rounds} rounds for {NSTEPS * NMICRO} backward passes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
