"""torch's own form of a hook: a state and a function, for code that registers hooks already.

torchrun --standalone --nproc-per-node 2 examples/comm_hook.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import agentcomm


def main() -> None:
    """Train a small perceptron; biases travel as they are."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(
        nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1)),
        gradient_as_bucket_view=True,
    )
    # module= tells the names of the parameters, which rules= needs: a hook sees only buckets.
    state = agentcomm.HookState("topk:0.1+int8", module=ddp, rules={"*.bias": "raw"})
    ddp.register_comm_hook(state, agentcomm.comm_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(300):
        x = torch.randn(64, 32)
        loss = nn.functional.mse_loss(ddp(x), x.square().mean(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 100 == 99:
            print(f"step {step + 1}  loss {loss.item():.5f}", flush=True)
    if dist.get_rank() == 0:
        print(f"{state.handle.stats().ratio:.1f} times fewer bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
