"""``agentcomm.default_hooks``: torch's names, on agentcomm's engine."""

import inspect

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.nn.parallel import DistributedDataParallel
from toys import batch, mlp, wrap

import agentcomm
from agentcomm import default_hooks

NAMES = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")


def hooked(hook, group=None, model=None):
    ddp = DistributedDataParallel(model or mlp(16, 48, 8), process_group=group, bucket_cap_mb=0.001)
    ddp.register_comm_hook(state=group, hook=hook)
    return ddp


def step(ddps, number):
    for ddp in ddps:
        ddp.zero_grad()
    sum(ddp(batch(dist.get_rank(), number, 16)).square().mean() for ddp in ddps).backward()


def weights_after(rank, nranks, name):
    """The last gradients with a hook of ours, and with the handle that means the same."""
    ddp = hooked(getattr(default_hooks, name))
    twin, _ = wrap(
        mlp(16, 48, 8),
        {"allreduce_hook": "raw", "fp16_compress_hook": "fp16", "bf16_compress_hook": "bf16"}[name],
        {"bucket_cap_mb": 0.001},
        min_compress_nelems=0,
    )
    for number in range(4):
        for model in (ddp, twin):
            step([model], number)
    for ours, other in zip(ddp.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, other.grad)
    return [param.grad for param in ddp.parameters()]


@pytest.mark.parametrize("nranks", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_means_what_the_codec_means(name, nranks):
    first, *others = run_ranks(nranks, weights_after, name)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def plain_gradients(rank, nranks):
    ddp = DistributedDataParallel(mlp(16, 48, 8))
    for number in range(4):
        step([ddp], number)
    return [param.grad for param in ddp.parameters()]


@pytest.mark.parametrize(("name", "error"), [("allreduce_hook", 0), ("fp16_compress_hook", 2**-11)])
def test_is_near_plain_ddp(name, error):
    expected = run_ranks(2, plain_gradients)[0]
    for grad, exact in zip(run_ranks(2, weights_after, name)[0], expected, strict=True):
        # Each of two contributions is rounded once.
        assert (grad - exact).abs().max() <= 2 * error * exact.abs().max()


def two_models_in_turn(rank, nranks):
    ddps = [hooked(default_hooks.fp16_compress_hook, model=mlp(16, width, 8)) for width in (48, 32)]
    for number in range(3):
        for ddp in ddps:
            step([ddp], number)
    step(ddps, 9)  # at once, when both are known
    return [param.grad for ddp in ddps for param in ddp.parameters()]


def test_two_models_that_take_turns():
    first, second = run_ranks(2, two_models_in_turn)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def two_models_at_once(rank, nranks):
    ddps = [hooked(default_hooks.fp16_compress_hook) for _ in range(2)]
    try:
        step(ddps, 0)
    except agentcomm.StateError as error:
        return str(error)
    return [param.grad for ddp in ddps for param in ddp.parameters()]


def test_two_models_at_once_are_told_apart_or_refused():
    first, second = run_ranks(2, two_models_at_once)
    if isinstance(first, str):
        assert "give each a state of its own" in first
        assert first == second
    else:
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def on_a_subgroup(rank, nranks):
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    ddp = hooked(default_hooks.bf16_compress_hook, group)
    step([ddp], 0)
    return [param.grad for param in ddp.parameters()]


def test_the_state_is_the_group():
    first, _, third = run_ranks(3, on_a_subgroup)
    assert all(torch.equal(a, b) for a, b in zip(first, third, strict=True))


def test_names_and_signatures_are_torchs():
    assert default_hooks.__all__ == sorted(torch_hooks.__all__)
    for name in NAMES:
        ours, theirs = (inspect.signature(getattr(m, name)) for m in (default_hooks, torch_hooks))
        assert list(ours.parameters) == list(theirs.parameters)


def test_wrappers():
    for wrapper, hook in (
        (default_hooks.fp16_compress_wrapper, default_hooks.fp16_compress_hook),
        (default_hooks.bf16_compress_wrapper, default_hooks.bf16_compress_hook),
    ):
        assert wrapper(default_hooks.allreduce_hook) is hook
        assert wrapper(torch_hooks.allreduce_hook) is hook
        assert wrapper(hook) is hook
    own = default_hooks.fp16_compress_wrapper(lambda state, bucket: None)
    assert own.__qualname__.startswith("fp16_compress_wrapper")


def test_meaning_of_a_hook():
    assert default_hooks.spec_of(torch_hooks.fp16_compress_hook) == "fp16"
    assert default_hooks.spec_of(default_hooks.bf16_compress_hook) == "bf16"
    assert default_hooks.spec_of([]) is None
    assert default_hooks.spec_of(print) is None
