"""Trains two steps through the DDP ("outer") or past it ("inner"), or fails before ("fail")."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import agentcomm


def main(what):
    """Run one rank under torchrun."""
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(torch.nn.Linear(64, 64))
    agentcomm.attach(ddp, "int8")
    if what == "fail":
        raise ValueError("before any backward pass")
    model = ddp if what == "outer" else ddp.module
    for _ in range(2):
        model(torch.randn(4, 64)).square().mean().backward()
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1])
