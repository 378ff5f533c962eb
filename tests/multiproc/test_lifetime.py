"""Calls from an engine's own threads, memory that changes under a state, and what ends when."""

import gc

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, run_ranks_raising
from torch.nn.parallel import DistributedDataParallel
from toys import all_equal, batch, digest_params, mlp, train, wrap

import agentcomm
from agentcomm import collectives


def backward(ddp, rank, step, width=64):
    ddp.zero_grad()
    dtype = next(ddp.parameters()).dtype
    ddp(batch(rank, step, width, dtype=dtype)).square().mean().backward()


# ---- inside a callback of an exchange ------------------------------------------------------------


def call_inside(rank, nranks, method):
    ddp = DistributedDataParallel(mlp(64, 64, 64))
    state = agentcomm.HookState("int8")
    errors = []

    def hook(hook_state, bucket):
        def inside(future):
            try:
                getattr(hook_state.handle, method)()
            except agentcomm.StateError as error:
                errors.append(str(error))
            return future.value()

        return agentcomm.comm_hook(hook_state, bucket).then(inside)

    ddp.register_comm_hook(state, hook)
    for step in range(3):
        backward(ddp, rank, step)
    return errors


@pytest.mark.parametrize("method", ["stats", "reset_residuals"])
def test_waiting_inside_a_callback_is_an_error(method):
    # It would wait for the exchange whose callback it is called in, without any limit.
    for errors in run_ranks(2, call_inside, method):
        assert errors
        assert all("wait for itself" in error for error in errors)


def close_inside(rank, nranks):
    tensor = torch.full((70000,), float(rank))
    work = agentcomm.all_reduce(tensor, "int8", async_op=True)
    exchange = collectives._reducers[dist.group.WORLD].exchange
    future = work.get_future().then(lambda done: (exchange.close(), done.value())[1])
    future.wait()
    dist.barrier()
    return tensor[0].item()


def test_close_inside_a_callback():
    # The engine's threads cannot join themselves: another thread has to.
    for value in run_ranks(2, close_inside):
        assert value == pytest.approx(0.5, rel=1 / 127)


def collect_inside(rank, nranks):
    ddp, _ = wrap(mlp(64, 64, 64), "int8")
    cycle = [ddp]
    cycle.append(cycle)
    del ddp
    tensor = torch.ones(1000)
    work = agentcomm.all_reduce(tensor, "raw", async_op=True)
    backward(cycle[0], rank, 0)
    del cycle
    # The collector runs on the progress thread of another engine, and closes the handle there.
    work.get_future().then(lambda done: gc.collect()).wait()
    gc.collect()
    dist.barrier()
    return tensor.sum().item()


def test_handle_collected_on_another_thread():
    assert run_ranks(2, collect_inside) == [1000.0, 1000.0]


# ---- the same parameters, other memory -----------------------------------------------------------


def other_dtype(rank, nranks):
    model = mlp(64, 64, 64)
    state = agentcomm.HookState("raw")
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, agentcomm.comm_hook)
    backward(ddp, rank, 0)
    del ddp
    model.to(torch.bfloat16)  # swaps the memory; the parameters stay the same objects
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, agentcomm.comm_hook)
    for step in range(1, 4):
        backward(ddp, rank, step)
    return digest_params(ddp), str(next(ddp.parameters()).grad.dtype)


def test_state_reused_after_the_dtype_changed():
    # The core took the old layout's word for the size of the new bucket.
    results = run_ranks(2, other_dtype)
    assert all_equal(results)
    assert results[0][1] == "torch.bfloat16"


# ---- one rank's bad call -------------------------------------------------------------------------


def bad_rules(rank, nranks):
    ddp = DistributedDataParallel(mlp(8, 8))
    rules = ["0.weight"] if rank == 1 else None
    try:
        agentcomm.attach(ddp, "int8", rules=rules, timeout_s=20)
    except agentcomm.AgentCommError as error:
        first = f"{type(error).__name__}: {error}"
    agentcomm.attach(ddp, "int8", timeout_s=20)  # the group is still in step
    return first, train(ddp, rank, 2, width=8)


def test_rules_that_are_no_mapping_on_one_rank():
    (there, trained0), (here, trained1) = run_ranks(2, bad_rules)
    assert "MismatchError: rank 1 could not attach: SpecError: rules=['0.weight']" in there
    assert "SpecError: rules=['0.weight'] is no mapping" in here
    assert trained0 == trained1


# ---- lazy views, and what all_reduce keeps -------------------------------------------------------


def test_lazy_views_are_refused():
    negated = torch._neg_view(torch.arange(5.0))
    with pytest.raises(agentcomm.SpecError, match="resolve_neg"):
        agentcomm.encode(negated, "fp16")
    assert agentcomm.decode(agentcomm.encode(negated.resolve_neg(), "fp16"))[4] == -4
    with pytest.raises(agentcomm.SpecError, match="resolve_conj"):
        agentcomm.encode(torch.tensor([1 + 2j]).conj(), "raw")


def groups_come_and_go(rank, nranks):
    sizes = []
    for _ in range(4):
        group = dist.new_group(list(range(nranks)))
        tensor = torch.ones(100)
        agentcomm.all_reduce(tensor, "raw", group=group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        sizes.append(len(collectives._reducers))
    return sizes


def test_reducers_end_with_their_group():
    outcomes = run_ranks_raising(2, groups_come_and_go)
    assert [outcome.error for outcome in outcomes] == ["", ""], outcomes
    assert all(outcome.value[-1] <= 1 for outcome in outcomes)
