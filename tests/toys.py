"""Small models, data and training loops for tests with several ranks."""

import hashlib
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import agentcomm

# One spec of each codec; a sparse one does not go without a fraction.
_SPECS = {"topk": "topk:0.25", "randk": "randk:0.25+int8"}


def _specs_with(fact):
    return [_SPECS.get(row["name"], row["name"]) for row in agentcomm.codecs() if row[fact]]


CODECS = _specs_with("name")
ZERO_STAYS = _specs_with("zero_stays_zero")
FEEDBACK = _specs_with("feedback")
SPARSE = _specs_with("sparse")


def mlp(*widths, seed=0, dtype=torch.float32):
    """Linear layers with tanh between them, the same on every rank."""
    torch.manual_seed(seed)
    layers = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(dtype)


def wrap(model, spec=None, ddp_options=None, **options):
    """Return the model in DDP and, with a spec, its handle."""
    ddp = DistributedDataParallel(model, **(ddp_options or {}))
    if spec is None:
        return ddp, None
    return ddp, agentcomm.attach(ddp, spec, **options)


def batch(rank, step, width, nrows=4, dtype=torch.float32):
    """Return a batch that depends on rank and step alone."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(nrows, width, generator=generator).to(dtype)


def digest(tensors):
    """sha256 over the bits of tensors; None counts too."""
    sha = hashlib.sha256()
    for tensor in tensors:
        if tensor is None:
            sha.update(b"none")
            continue
        tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        sha.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def digest_params(module):
    return digest(module.parameters())


def digest_grads(module):
    return digest(param.grad for param in module.parameters())


def train(ddp, rank, nsteps, *, width, lr=0.05, first=0, dtype=torch.float32, optimizer=None):
    """Take steps; return the digest of all parameters and gradients after each."""
    optimizer = optimizer or torch.optim.SGD(ddp.parameters(), lr=lr)
    digests = []
    for step in range(first, first + nsteps):
        optimizer.zero_grad()
        ddp(batch(rank, step, width, dtype=dtype)).square().mean().backward()
        optimizer.step()
        digests.append(digest_params(ddp) + digest_grads(ddp))
    return digests


def gather_grads(module):
    """Return, per parameter, the gradients of all ranks, stacked by rank."""
    gathered = []
    for param in module.parameters():
        grad = param.grad if param.grad is not None else torch.zeros_like(param)
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        gathered.append(torch.stack(parts))
    return gathered


def all_equal(values):
    """Whether all ranks returned the same."""
    return all(value == values[0] for value in values)
