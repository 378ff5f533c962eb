"""Gradients that the hook cannot see: they are as in plain DDP, and the script is told."""

import gc
import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from toys import all_equal, batch, digest, digest_grads, mlp, wrap

import agentcomm

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SCRIPT = Path(__file__).parent / "scripts" / "inner_module.py"


def unfrozen(rank, nranks, spec):
    """Unfreeze the trunk after wrapping; later wrap again."""
    model = mlp(16, 24, 16)
    trunk, head = model[0], model[2]
    trunk.requires_grad_(False)
    ddp, _ = wrap(model, spec, min_compress_nelems=1)
    seen, digests = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            if step == 3:
                trunk.requires_grad_(True)
            ddp.zero_grad()
            ddp(batch(rank, step, 16)).square().mean().backward()
            digests.append(digest([head.weight.grad]))
            seen += [(step, str(w.message)) for w in caught]
            caught.clear()
    own = digest([trunk.weight.grad])  # this rank's alone, as with plain DDP
    again = DistributedDataParallel(model)
    handle = agentcomm.attach(again, spec, min_compress_nelems=1)
    again.zero_grad()
    again(batch(rank, 9, 16)).square().mean().backward()
    assert handle.residual(trunk.weight).shape == trunk.weight.shape
    return digests, digest_grads(again), own, seen


def test_pc_015_unfrozen_parameters_are_named_once():
    (digests, after, own, seen), other = run_ranks(2, unfrozen, "int8")
    assert (digests, after) == other[:2]
    assert own != other[2]
    ((step, message),) = seen
    assert step == 3
    assert "0.weight, 0.bias" in message
    assert "2.weight" not in message


def ignored(rank, nranks):
    """Parameters that DDP was told to leave alone."""
    model = mlp(16, 24, 16)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    ddp, _ = wrap(model, "int8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            ddp(batch(rank, step, 16)).square().mean().backward()
    return digest([model[0].bias.grad]), digest([model[0].weight.grad])


def test_ignored_parameters_are_not_reported():
    (bias, weight), other = run_ranks(2, ignored)
    assert bias == other[0]
    assert weight != other[1]


class TwoTables(nn.Module):
    """Sparse gradients beside dense ones; the head is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 16, sparse=True)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 1).requires_grad_(False)

    def forward(self, rows):
        return self.head(self.middle(self.table(rows)))


def sparse_and_frozen(rank, nranks):
    ddp, _ = wrap(TwoTables(), "int8", min_compress_nelems=1)
    messages = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            if step == 3:
                ddp.module.head.requires_grad_(True)
            ddp.zero_grad()
            ddp(torch.arange(rank, rank + 8)).square().mean().backward()
            messages += [(step, str(w.message)) for w in caught]
            caught.clear()
    return messages


def test_sparse_parameters_are_not_taken_for_frozen():
    for ((step, message),) in run_ranks(2, sparse_and_frozen):
        assert step == 3
        assert "head.weight, head.bias:" in message


def warnings_as_errors(rank, nranks):
    """The hook does not raise: DDP's reducer would not survive it."""
    model = mlp(16, 24, 16)
    model[0].requires_grad_(False)
    ddp, handle = wrap(model, "int8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            model[0].requires_grad_(step > 1)
            ddp(batch(rank, step, 16)).square().mean().backward()
        idle, never_called = wrap(mlp(16, 16), "int8")
        del idle
        gc.collect()
    return handle.stats().rounds, never_called.closed


def test_warnings_as_errors_break_nothing():
    assert run_ranks(2, warnings_as_errors) == [(4, True)] * 2


def gradient_penalty(rank, nranks, spec):
    """A loss of gradients: autograd.grad inside, which DDP does not reduce, then backward."""
    ddp, _ = wrap(mlp(16, 24, 1), spec)
    digests = []
    for step in range(5):
        ddp.zero_grad()
        x = batch(rank, step, 16).requires_grad_(True)
        loss = ddp(x).square().mean()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        digests.append(digest_grads(ddp))
    return digests


def test_pc_017_gradient_penalty_equals_plain_ddp():
    raw = run_ranks(2, gradient_penalty, "raw")
    assert all_equal(raw)
    assert raw == run_ranks(2, gradient_penalty, None)
    assert all_equal(run_ranks(2, gradient_penalty, "int8"))


def run_script(what):
    done = subprocess.run(
        [sys.executable, *TORCHRUN, str(SCRIPT), what],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stderr


def test_pc_017_hook_that_was_never_called_is_reported_at_exit():
    status, stderr = run_script("inner")
    assert status == 0
    assert stderr.count("no gradient reached <agentcomm.Handle") == 2  # once per rank
    assert "ddp.module" in stderr
    assert "Traceback" not in stderr


def test_hook_that_was_called_is_not_reported():
    assert "no gradient reached" not in run_script("outer")[1]


def test_script_that_fails_is_told_its_own_error_alone():
    status, stderr = run_script("fail")
    assert status != 0
    assert "before any backward pass" in stderr
    assert "no gradient reached" not in stderr


def test_frozen_params_of_any_module():
    # Without DDP (HookState's module=): what is in no bucket and is trained.
    from agentcomm._bypass import FrozenParams

    module = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(12)])
    names = {id(param): [name] for name, param in module.named_parameters()}
    frozen = FrozenParams(module, names, covered={id(module[0].weight)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        frozen.check()
        frozen.check()
    (warning,) = caught
    assert "1.weight, 2.weight" in str(warning.message)
    assert "and 3 more" in str(warning.message)
