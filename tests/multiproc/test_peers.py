"""Ranks that die, fall silent, or do something else: an error that names them, and no hang."""

import contextlib
import os
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ranks import captured_log, run_ranks, run_ranks_dying, run_ranks_raising
from torch.nn.parallel import DistributedDataParallel
from toys import all_equal, batch, digest_params, mlp, train, wrap

import agentcomm

KEPT = []  # what is still alive when the interpreter ends


def step(ddp, rank, number, width=64):
    ddp.zero_grad()
    ddp(batch(rank, number, width)).square().mean().backward()


# ---- a rank dies ---------------------------------------------------------------------------------


def dying(rank, nranks, when, codec):
    """Rank 2 ends its process without a word."""
    dies = rank == 2
    ddp, _ = wrap(mlp(64, 1024, 2048, 64), None, {"bucket_cap_mb": 1})
    if dies and when == "before attach":
        os._exit(7)
    handle = agentcomm.attach(ddp, codec, timeout_s=5.0, chunk_nbytes=4096)
    KEPT.append((ddp, handle))
    if dies and when == "before the first round":
        os._exit(7)
    for number in range(2):
        step(ddp, rank, number)
    if rank == 1 and when == "while rank 1 is busy":
        time.sleep(4.0)  # rank 0 has left when it comes
    if dies and when in ("in the hook", "while rank 1 is busy"):
        handle.exchange = lambda bucket: os._exit(7)
    if dies and when == "between chunks":
        exchange = handle.exchange

        def exchange_and_die(bucket):
            exchange(bucket)
            time.sleep(0.01)  # some of the bucket's 2,000 chunks have left
            os._exit(7)

        handle.exchange = exchange_and_die
    step(ddp, rank, 2)


@pytest.mark.parametrize(
    "when",
    [
        "before attach",
        "before the first round",
        "in the hook",
        "between chunks",
        "while rank 1 is busy",
    ],
)
def test_pc_042_dead_rank_is_named_by_all(when):
    outcomes = run_ranks_dying(3, dying, when, "raw")
    assert [outcome.error for outcome in outcomes] == ["PeerError", "PeerError", "(process ended)"]
    for outcome in outcomes[:2]:
        assert outcome.attributes["rank"] == 2
        assert "rank 2" in outcome.text
        assert "rank 1 " not in outcome.text.partition("reported by")[0]
        assert "rank 0 " not in outcome.text.partition("reported by")[0]
    # Nothing keeps the survivors' interpreters from ending.
    assert [outcome.exitcode for outcome in outcomes] == [0, 0, 7]


def host_of_the_store_dies(rank, nranks, port):
    dist.destroy_process_group()
    url = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=nranks)
    ddp = DistributedDataParallel(mlp(64, 64))
    dist.barrier()
    if rank == 0:
        os._exit(7)
    time.sleep(0.5)
    agentcomm.attach(ddp, timeout_s=5.0)


def test_pc_042_host_of_the_store_dies():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outcomes = run_ranks_dying(2, host_of_the_store_dies, port)
    assert [outcome.error for outcome in outcomes] == ["(process ended)", "PeerError"]
    assert "the store of the process group is gone" in outcomes[1].text
    assert outcomes[1].exitcode == 0


def leaving_alive(rank, nranks):
    ddp, handle = wrap(mlp(64, 300, 64), "int8")
    KEPT.append((ddp, handle))
    tensor = torch.ones(5000)
    agentcomm.all_reduce(tensor)
    return train(ddp, rank, 3, width=64)[-1]


def test_process_ends_with_a_live_handle():
    outcomes = run_ranks_dying(2, leaving_alive)
    assert [outcome.error for outcome in outcomes] == ["", ""], outcomes[0].traceback
    assert all_equal([outcome.value for outcome in outcomes])
    assert [outcome.exitcode for outcome in outcomes] == [0, 0]


# ---- a rank is silent ----------------------------------------------------------------------------


def silent(rank, nranks, nelems, codec):
    """The last but one is late by more than the timeout. Returns seconds, error and log."""
    model = torch.nn.Linear(nelems, 1, bias=False)
    ddp, _ = wrap(model, codec, timeout_s=2.0)
    for number in range(2):  # in the second forward pass DDP rebuilds its buckets, with collectives
        step(ddp, rank, number, nelems)
    if rank == nranks - 2:
        time.sleep(3.5)
        # What the others sent before they gave up may be enough for one more round.
        with contextlib.suppress(agentcomm.PeerError):
            step(ddp, rank, 2, nelems)
        with pytest.raises(agentcomm.PeerError):
            step(ddp, rank, 3, nelems)
        return None
    began = time.monotonic()
    with captured_log() as log, pytest.raises(agentcomm.PeerError) as caught:
        step(ddp, rank, 2, nelems)
    seconds = time.monotonic() - began
    with pytest.raises(agentcomm.PeerError):  # the first failure is final
        step(ddp, rank, 3, nelems)
    return seconds, str(caught.value), caught.value.rank, log


@pytest.mark.parametrize(
    ("nranks", "nelems", "codec"),
    [
        (2, 5_000, "int8"),
        (3, 200_000, "int8"),
        (5, 500, "int8"),
        # Four tiles for five ranks: the last owns none, and waits for no contribution.
        (5, 1_800, "raw"),
    ],
)
def test_silent_rank_is_named_by_all(nranks, nelems, codec):
    results = run_ranks(nranks, silent, nelems, codec)
    late = nranks - 2
    owns_none = 4 if nelems == 1_800 else None
    for rank, result in enumerate(results):
        if rank == late:
            continue
        seconds, text, culprit, log = result
        assert culprit == late
        assert f"rank {late} " in text.partition("reported by")[0]
        assert seconds < 10
        if rank == owns_none:
            assert log == []
            continue
        # By those who wait for it directly, after a quarter of the timeout, and once.
        ((level, warning),) = log
        assert level == "WARNING"
        assert warning.startswith(f"rank {late} has kept this rank waiting for 0.")


# ---- ranks do different things -------------------------------------------------------------------


def stops_early(rank, nranks):
    """Rank 1 leaves the epoch two steps early, for a metric on the same group."""
    ddp, _ = wrap(mlp(64, 64), "int8", timeout_s=2.0)
    for number in range(5 if rank == 1 else 7):
        step(ddp, rank, number)
    metric = torch.full((1,), 100.0 + rank)
    dist.all_reduce(metric)
    raise AssertionError(f"the metric was summed up: {metric}")


def test_pc_011_rank_goes_on_to_another_collective():
    outcomes = run_ranks_raising(2, stops_early)
    assert outcomes[0].error == "PeerError"
    assert "rank 1 did not send its part of round 5 bucket 0" in outcomes[0].text
    assert outcomes[1].error == "RuntimeError"  # gloo's, as rank 0 has left


def skips_backward(rank, nranks, forward_first):
    ddp, _ = wrap(mlp(64, 64), "int8", timeout_s=2.0)
    for number in range(6):
        if rank == 1 and number == 3:
            if forward_first:
                ddp(batch(rank, number, 64))  # the loss was NaN
            continue
        step(ddp, rank, number)


def test_pc_012_skipped_backward_is_caught_at_the_next_step():
    outcomes = run_ranks_raising(2, skips_backward, True)
    assert [outcome.error for outcome in outcomes] == ["MismatchError"] * 2
    assert "rank 1 sent round 3 after 2 forward passes, expected 1" in outcomes[0].text


def test_pc_012_skipped_step_is_caught_in_the_end():
    outcomes = run_ranks_raising(2, skips_backward, False)
    assert [outcome.error for outcome in outcomes] == ["PeerError", ""]
    assert "rank 1" in outcomes[0].text


def two_agents(rank, nranks, order):
    agents = {name: wrap(mlp(64, 64), "int8", timeout_s=2.0, name=name) for name in "ab"}
    for number, name in [(0, "a"), (0, "b"), (1, "a"), (1, "b")]:
        step(agents[name][0], rank, number)
    for name in order[rank]:
        step(agents[name][0], rank, 2)
    return [digest_params(ddp) for ddp, _ in agents.values()]


@pytest.mark.parametrize("order", [("ab", "ba"), ("ab", "b")])
def test_pc_057_agents_in_another_order(order):
    # Each agent has its own connections: nothing of one can be added to the other's.
    outcomes = run_ranks_raising(2, two_agents, order)
    assert [outcome.error for outcome in outcomes] == ["PeerError"] * 2
    # Whoever is first to give up after two seconds closes its connections.
    texts = [outcome.text for outcome in outcomes]
    assert any("did not send its part of round 2 bucket 0" in text for text in texts)
    assert "rank 1" in texts[0]
    assert "rank 0" in texts[1]


def both_agents_in_one_backward(rank, nranks):
    agents = [wrap(mlp(64, 64, seed=i), "int8", timeout_s=5.0)[0] for i in range(2)]
    losses = [agent(batch(rank, 0, 64)).square().mean() for agent in agents]
    sum(losses if rank else losses[::-1]).backward()
    return [param.grad.sum().item() for agent in agents for param in agent.parameters()]


def test_pc_057_order_within_one_backward_may_differ():
    assert all_equal(run_ranks(2, both_agents_in_one_backward))


# ---- ranks are configured differently ------------------------------------------------------------

CONFIGURED = {
    "codec": (("int8", {}), ("fp16", {}), ["spec is", "'int8'", "'fp16'"]),
    "option": (("int8", {}), ("int8[block=64]", {}), ["'int8[block=64]'"]),
    "rules": (("int8", {"rules": {"*bias": "raw"}}), ("int8", {}), ["rules is", "'*bias': 'raw'"]),
    "seed": (("int8", {"seed": 1}), ("int8", {"seed": 2}), ["seed is"]),
    "warm-up": (("int8", {"warmup_nrounds": 1}), ("int8", {}), ["warmup_nrounds is"]),
    "feedback": (("int8", {"feedback": False}), ("int8", {}), ["feedback is"]),
    "smallest": (("int8", {"min_compress_nelems": 0}), ("int8", {}), ["min_compress_nelems is"]),
}


def configured(rank, nranks, what):
    spec, options = CONFIGURED[what][rank == 1]
    wrap(mlp(64, 64), spec, **options)


@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize("what", CONFIGURED)
def test_pc_044_settings_are_compared(what, nranks):
    outcomes = run_ranks_raising(nranks, configured, what)
    assert [outcome.error for outcome in outcomes] == ["MismatchError"] * nranks
    for outcome in outcomes:
        for text in ("rank 1", *CONFIGURED[what][2]):
            assert text in outcome.text


def codec_set_on_one_rank(rank, nranks):
    ddp, handle = wrap(mlp(64, 64), "int8")
    step(ddp, rank, 0)
    if rank == 1:
        handle.set_codec("fp16")
    step(ddp, rank, 1)


def test_pc_044_set_codec_on_one_rank():
    outcomes = run_ranks_raising(3, codec_set_on_one_rank)
    assert [outcome.error for outcome in outcomes] == ["MismatchError"] * 3
    assert "rank 1 sent lane" in outcomes[0].text
    assert "expected" in outcomes[0].text


def need_not_agree(rank, nranks):
    ddp, _ = wrap(
        mlp(64, 300, 64), "int8", chunk_nbytes=[4096, 1 << 20, "auto"][rank], timeout_s=20.0 + rank
    )
    return train(ddp, rank, 4, width=64)


def test_pc_044_chunk_size_and_timeout_may_differ():
    assert all_equal(run_ranks(3, need_not_agree))


def cannot_attach(rank, nranks, how):
    ddp, _ = wrap(mlp(64, 64))
    if rank == 1 and how == "spec":
        agentcomm.attach(ddp, "int9")
    elif rank == 1 and how == "pattern":
        agentcomm.attach(ddp, "int8", rules={"*.wait": "raw"})
    elif rank == 1 and how == "hook":
        ddp.register_comm_hook(None, other_hook)
    agentcomm.attach(ddp, "int8")


def other_hook(state, bucket):
    raise NotImplementedError


@pytest.mark.parametrize(
    ("how", "error"), [("spec", "SpecError"), ("pattern", "SpecError"), ("hook", "StateError")]
)
def test_pc_044_rank_that_cannot_attach_tells_the_others(how, error):
    outcomes = run_ranks_raising(3, cannot_attach, how)
    assert [outcome.error for outcome in outcomes] == ["MismatchError", error, "MismatchError"]
    for outcome in outcomes[::2]:
        assert f"rank 1 could not attach: {error}: " in outcome.text
        assert outcomes[1].text in outcome.text


def attaches_again_after_a_mismatch(rank, nranks):
    ddp, _ = wrap(mlp(64, 64))
    with pytest.raises(agentcomm.MismatchError):
        agentcomm.attach(ddp, ["int8", "fp16"][rank])
    with pytest.raises((agentcomm.MismatchError, agentcomm.SpecError)):
        agentcomm.attach(ddp, ["int8", "int9"][rank])
    agentcomm.attach(ddp, "int8")
    return train(ddp, rank, 3, width=64)


def test_pc_044_attach_may_be_tried_again():
    assert all_equal(run_ranks(2, attaches_again_after_a_mismatch))


def hook_on_one_rank(rank, nranks, how):
    ddp = DistributedDataParallel(mlp(64, 64))
    if rank == 0 and how == "attach":
        agentcomm.attach(ddp, "int8", timeout_s=2.0)
    elif rank == 0:
        ddp.register_comm_hook(agentcomm.HookState("int8", timeout_s=2.0), agentcomm.comm_hook)
    step(ddp, rank, 0)


@pytest.mark.parametrize("how", ["attach", "register_comm_hook"])
def test_pc_044_hook_on_one_rank_only(how):
    outcomes = run_ranks_raising(2, hook_on_one_rank, how)
    assert outcomes[0].error == "PeerError"
    assert "rank 1 did not register agentcomm within 2.0 s" in outcomes[0].text
    assert outcomes[0].attributes["rank"] == 1
    assert outcomes[1].error == "RuntimeError"  # gloo's, as rank 0 has left


def hook_state_differs(rank, nranks):
    ddp = DistributedDataParallel(mlp(64, 64))
    state = agentcomm.HookState(["int8", "fp16"][rank])
    ddp.register_comm_hook(state, agentcomm.comm_hook)
    step(ddp, rank, 0)


def test_pc_044_hook_states_are_compared_in_the_first_round():
    outcomes = run_ranks_raising(2, hook_state_differs)
    assert [outcome.error for outcome in outcomes] == ["MismatchError"] * 2


# ---- threads -------------------------------------------------------------------------------------


NLAYERS = 6


def among_threads(rank, nranks, codec):
    ddp, handle = wrap(mlp(32, *[32] * NLAYERS), codec, {"bucket_cap_mb": 1e-4})
    stop, seen = threading.Event(), []

    def spin():
        while not stop.is_set():
            sum(range(1000))

    def look():
        while not stop.is_set():
            seen.append(handle.stats().rounds)
            handle.stats().to_dict()
            repr(handle)

    threads = [threading.Thread(target=work) for work in (spin, look)]
    for thread in threads:
        thread.start()
    try:
        digests = train(ddp, rank, 60, width=32)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert seen == sorted(seen)
    assert handle.stats().rounds == 60
    assert len(handle.stats().per_bucket) == 2 * NLAYERS
    return digests[-1]


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_pc_048_busy_threads(codec):
    assert all_equal(run_ranks(2, among_threads, codec))


def closed_under_way(rank, nranks):
    """Threads use a handle while it is closed: StateError, nothing worse."""
    errors = []
    for number in range(10):
        ddp, handle = wrap(mlp(64, 300, 64), "int8")
        weight = ddp.module[0].weight
        step(ddp, rank, number)
        barrier = threading.Barrier(4)

        def look(handle=handle, weight=weight, barrier=barrier):
            barrier.wait()
            try:
                while True:
                    handle.stats()
                    handle.residual(weight)
                    handle.reset_residuals()
            except agentcomm.StateError as error:
                errors.append(error)

        threads = [threading.Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        barrier.wait()
        time.sleep(0.002 * number)
        handle.close()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
    return len(errors)


def test_closing_while_other_threads_look():
    assert run_ranks(2, closed_under_way) == [30, 30]
