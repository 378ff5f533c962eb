"""Training scripts that know nothing of agentcomm: what ``agentcomm run`` is for.

plain_ddp.py HOW WHAT    HOW: spawn, fork or env (started by torchrun). Prints a line per rank.
"""

import copy
import hashlib
import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP


def say(text):
    os.write(1, f"{dist.get_rank()} {text}\n".encode())  # one write: lines of ranks stay whole


def digest(*models):
    sha = hashlib.sha256()
    for model in models:
        for param in model.parameters():
            sha.update(param.detach().numpy().tobytes())
    return sha.hexdigest()[:16]


def model_of(width=64, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(16, width), torch.nn.ReLU(), torch.nn.Linear(width, 4)
    )


def train(ddp, nsteps=6, device="cpu"):
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for _ in range(nsteps):
        optimizer.zero_grad()
        x, y = torch.randn(8, 16, device=device), torch.randn(8, 4, device=device)
        torch.nn.functional.mse_loss(ddp(x), y).backward()
        optimizer.step()


def one_model():
    ddp = DDP(model_of())
    train(ddp)
    say(digest(ddp))


def two_models():
    first, second = DDP(model_of()), DDP(model_of(32, seed=1))
    for _ in range(3):
        train(second, 1)
        train(first, 1)
    say(digest(first, second))


def deleted_model():
    ddp = DDP(model_of())
    train(ddp)
    text = digest(ddp)
    del ddp
    say(text)


def hook_of_torch(name):
    ddp = DDP(model_of())
    ddp.register_comm_hook(state=None, hook=getattr(default_hooks, name))
    train(ddp)
    say(digest(ddp))


def kept_to_the_end():
    global kept
    torch.zeros(1).cuda()
    kept = DDP(model_of())
    kept.register_comm_hook(state=None, hook=default_hooks.fp16_compress_hook)
    train(kept)


def copied():
    torch.manual_seed(0)  # names no GPU: nothing is said of them
    copy.deepcopy(DDP(model_of()))


def built_in_hook():
    ddp = DDP(model_of())
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    train(ddp)
    say(digest(ddp))


def own_hook(state, bucket):
    state.append(bucket.index())
    return default_hooks.allreduce_hook(None, bucket)


def hook_of_script():
    ddp, calls = DDP(model_of()), []
    ddp.register_comm_hook(calls, own_hook)
    train(ddp)
    say(f"{digest(ddp)} {len(calls)} {ddp._get_ddp_logging_data()['comm_hook']}")


def two_hooks(first):
    ddp = DDP(model_of())
    ddp.register_comm_hook([], own_hook if first == "own" else default_hooks.allreduce_hook)
    try:
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    except RuntimeError as error:
        say(str(error).splitlines()[0])


def wrong_hook():
    try:
        DDP(model_of()).register_comm_hook(None, 3)
    except TypeError as error:
        say(str(error))


def mixed_precision():
    from torch.nn.parallel.distributed import _MixedPrecision

    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    ddp = DDP(model_of(), mixed_precision=precision)
    say(len(ddp._comm_hooks))


@torch.jit.script
def scripted(x: torch.Tensor):
    return torch.zeros(1, device=x.device) + torch.tensor(x.shape[0], device=x.device)


def gpu_script():
    """What scripts for GPUs do, on a machine without one."""
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    model = model_of().to(rank)
    ddp = DDP(model.cuda(), device_ids=[rank], output_device=rank)
    scaler = torch.amp.GradScaler("cuda")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(rank)
    for _ in range(6):
        optimizer.zero_grad()
        x = torch.randn(8, 16).pin_memory().cuda(non_blocking=True)
        y = torch.randn(8, 4, device=device).to(f"cuda:{rank}", non_blocking=True)
        with torch.autocast("cuda"):
            loss = torch.nn.functional.mse_loss(ddp(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert torch.zeros(2, device="cuda").sum().item() == 0
    assert torch.tensor([1.0], device=0).new_zeros(3, device=device).device.type == "cpu"
    assert torch.zeros_like(x, device="cuda:0").device == x.device
    path = f"/tmp/agentcomm-test-{os.getpid()}.pt"
    torch.save(ddp.state_dict(), path)
    try:
        torch.load(path, map_location={"cuda:0": f"cuda:{rank}"})
        torch.load(path, map_location=device)
        meta = torch.load(path, map_location={"cpu": "meta", "cuda:0": device})
        assert {tensor.device.type for tensor in meta.values()} == {"meta"}
    finally:
        os.remove(path)
    with torch.device("cuda", rank):
        assert torch.empty(2).device.type == "cpu"
    with torch.device("meta"):
        assert torch.empty(2).device.type == "meta"
    assert scripted(x).tolist() == [8.0]
    with torch.cuda.device(rank):
        assert isinstance(torch.cuda.device(device), torch.cuda.device)
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    torch.cuda.synchronize()
    assert not torch.cuda.is_available()
    say(digest(ddp))


def no_ddp():
    torch.zeros(1).cuda()
    total = torch.ones(3, dtype=torch.int64)
    dist.all_reduce(total)
    say(total.tolist())


def sharded():
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fully_shard(model_of())
        FullyShardedDataParallel(model_of(), device_id=torch.device("cpu"))
    say("built")


def killed():
    """End without a word, as a killed process does."""
    ddp = DDP(model_of())
    train(ddp, 3)
    dist.barrier()
    os._exit(0)


def rank_main(rank, folder, what, *args):
    torch.set_num_threads(1)
    if rank is None:
        dist.init_process_group("nccl" if what == "gpu_script" else "gloo")
    else:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
        )
    globals()[what](*args)
    dist.destroy_process_group()


if __name__ == "__main__":
    # torch.distributed.launch says the local rank first.
    how, *rest = [word for word in sys.argv[1:] if not word.startswith("--local-rank=")]
    if how == "spawn":
        mp.spawn(rank_main, tuple(rest), nprocs=2)
    elif how == "fork":
        mp.start_processes(rank_main, tuple(rest), nprocs=2, start_method="fork")
    else:
        rank_main(None, "", *rest)
