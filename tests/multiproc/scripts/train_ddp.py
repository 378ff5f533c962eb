"""A training script as people write them: run by torchrun, spawn, fork or an elastic agent.

train_ddp.py HOW [FOLDER]     prints one line per rank: rank, sha256 of the parameters
"""

import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import agentcomm


def train(state=None, *, compressed=True, nworkers=0):
    """Return the digest of the parameters; the process group is there."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 300), torch.nn.ReLU(), torch.nn.Linear(300, 1))
    data = TensorDataset(torch.randn(96, 16), torch.randn(96, 1))
    ddp = DistributedDataParallel(model)
    if state is not None:
        ddp.register_comm_hook(state, agentcomm.comm_hook)
    elif compressed:
        agentcomm.attach(ddp, "int8")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for epoch in range(2):
        sampler = DistributedSampler(data, seed=epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler, num_workers=nworkers):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
    sha = hashlib.sha256()
    for param in ddp.parameters():
        sha.update(param.detach().numpy().tobytes())
    return sha.hexdigest()


def say(text):
    os.write(1, f"{dist.get_rank()} {text}\n".encode())  # one write: lines of ranks stay whole


def rank_of_spawn(rank, folder, state):
    dist.init_process_group("gloo", init_method=f"file://{folder}/spawn", rank=rank, world_size=2)
    say(train(state))
    dist.destroy_process_group()


def rank_of_fork(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/fork", rank=rank, world_size=2)
    say(train(nworkers=2))


def rank_of_elastic(state):
    dist.init_process_group("gloo")
    digest = train(state)
    dist.destroy_process_group()
    return digest


def by_fork(folder):
    torch.set_num_threads(1)  # torch's own pools do not survive a fork
    frame = agentcomm.encode(torch.randn(1 << 18), "int8")
    agentcomm.decode(frame)
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                rank_of_fork(rank, folder)
                code = 0
            finally:
                os._exit(code)  # as multiprocessing does
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(max(map(abs, codes)))


def by_elastic_launch(folder):
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    state = agentcomm.HookState("int8")
    for rank, digest in elastic_launch(config, rank_of_elastic)(state).items():
        print(rank, digest)


def main(how, folder=""):
    if how == "spawn":
        mp.spawn(rank_of_spawn, (Path(folder), agentcomm.HookState("int8")), nprocs=2)
    elif how == "fork":
        by_fork(folder)
    elif how == "elastic":
        by_elastic_launch(folder)
    else:  # by torchrun
        dist.init_process_group("gloo")
        for compressed in (True, False) if how == "both" else (True,):
            say(train(compressed=compressed))
        # Neither the group nor the handle is closed, as in many scripts.


if __name__ == "__main__":
    main(*sys.argv[1:])
