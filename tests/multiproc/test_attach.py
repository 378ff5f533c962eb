"""``attach``, the handle and ``HookState``: their life, and the models and groups they meet."""

import copy
import gc
import io
import os
import pickle
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from codec_cases import step_error
from ranks import run_ranks, run_ranks_raising
from test_feedback import Recorder, check_conservation
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from toys import (
    CODECS,
    ZERO_STAYS,
    all_equal,
    batch,
    digest,
    digest_grads,
    digest_params,
    mlp,
    train,
    wrap,
)

import agentcomm


def step(ddp, rank, number, width=64):
    ddp.zero_grad()
    ddp(batch(rank, number, width)).square().mean().backward()


# ---- calls at the wrong time ---------------------------------------------------------------------


def wrong_calls(rank, nranks):
    model = mlp(8, 8)
    with pytest.raises(TypeError, match="not Sequential; wrap the model first"):
        agentcomm.attach(model)
    ddp = DistributedDataParallel(model)
    group = dist.new_group([0, 1])
    with pytest.raises(agentcomm.StateError, match="leave group= out, or pass process_group="):
        agentcomm.attach(ddp, group=group)
    wrong = {
        "chunk_nbytes=5": {"chunk_nbytes": 5},
        "timeout_s=0": {"timeout_s": 0},
        "seed=-1": {"seed": -1},
        "warmup_nrounds=1.5": {"warmup_nrounds": 1.5},
        "min_compress_nelems=-1": {"min_compress_nelems": -1},
        "rounding='up'": {"rounding": "up"},
        "'0.wait' in rules matches no parameter (did you mean '0.weight'": {
            "rules": {"0.wait": "raw"}
        },
        "'zeta' in rules matches no parameter": {"rules": {"zeta": "raw"}},
        "'int9'": {"rules": {"*": "int9"}},
    }
    for text, options in wrong.items():
        with pytest.raises(agentcomm.SpecError) as caught:
            agentcomm.attach(ddp, "int8", **options)
        assert text in str(caught.value)
    agentcomm.attach(ddp, "int8", group=ddp.process_group)
    return train(ddp, rank, 2, width=8)


def test_wrong_calls():
    assert all_equal(run_ranks(2, wrong_calls))


def test_attach_before_init_process_group():
    with pytest.raises(agentcomm.StateError, match="init_process_group first"):
        agentcomm.all_reduce(torch.ones(3))


def other_hook_first(rank, nranks):
    ddp = DistributedDataParallel(mlp(8, 8))
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with pytest.raises(agentcomm.StateError, match=r"hook already \(fp16_compress_hook\)"):
        agentcomm.attach(ddp)
    train(ddp, rank, 2, width=8)
    # The other way round torch says so itself.
    ddp, handle = wrap(mlp(8, 8), "int8")
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(ddp, rank, 2, width=8)
    assert handle.stats().rounds == 2


def test_pc_058_another_hook_is_registered():
    run_ranks(2, other_hook_first)


def optimizer_in_backward(rank, nranks):
    model = mlp(8, 8)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    ddp = DistributedDataParallel(model)
    before = digest_params(ddp)
    with pytest.raises(agentcomm.StateError, match="the optimizer runs inside backward"):
        agentcomm.attach(ddp)
    assert digest_params(ddp) == before


def test_pc_060_optimizer_in_backward_is_refused():
    run_ranks(2, optimizer_in_backward)


# ---- life of a handle ----------------------------------------------------------------------------


def reconfigured(rank, nranks):
    ddp, first = wrap(mlp(64, 300, 64), "int8")
    train(ddp, rank, 3, width=64)
    second = agentcomm.attach(ddp, "fp16", name="second")
    assert first.closed
    assert not second.closed
    for call in (first.stats, first.reset_residuals, lambda: first.set_codec("raw")):
        with pytest.raises(agentcomm.StateError, match="the handle is closed"):
            call()
    first.close()
    digests = train(ddp, rank, 3, width=64, first=3)
    stats = second.stats()
    assert stats.rounds == 3
    assert stats.residual_norm == 0
    assert 1.7 < stats.ratio < 2.0
    assert repr(second) == "<agentcomm.Handle fp16 round 3>"
    return digests


def test_second_attach_reconfigures():
    assert all_equal(run_ranks(2, reconfigured))


def closed(rank, nranks):
    ddp, handle = wrap(mlp(64, 300, 64), "int8")
    plain, _ = wrap(mlp(64, 300, 64))
    train(ddp, rank, 2, width=64)
    handle.close()
    handle.close()
    assert repr(handle) == "<agentcomm.Handle int8 closed>"
    plain.module.load_state_dict(ddp.module.state_dict())
    dense = train(ddp, rank, 3, width=64), train(plain, rank, 3, width=64)
    agentcomm.attach(ddp, "int8")
    return dense, train(ddp, rank, 3, width=64)


@pytest.mark.parametrize("nranks", [1, 2])
def test_after_close_gradients_are_dense(nranks):
    results = run_ranks(nranks, closed)
    assert all_equal(results)
    ours, plain = results[0][0]
    assert ours == plain


def freed(rank, nranks, after_failure):
    ddp, handle = wrap(mlp(64, 64), "int8", timeout_s=1.0)
    if after_failure:
        train(ddp, rank, 2, width=64)
        if rank == 0:
            with pytest.raises(agentcomm.PeerError):
                step(ddp, rank, 2)
    else:
        train(ddp, rank, 3, width=64)
    reference, params = weakref.ref(ddp), [weakref.ref(p) for p in ddp.parameters()]
    nthreads = len(os.listdir("/proc/self/task"))
    del ddp
    gc.collect()
    assert reference() is None
    assert all(param() is None for param in params)
    assert handle.closed
    assert len(os.listdir("/proc/self/task")) < nthreads
    dist.barrier()


@pytest.mark.parametrize("after_failure", [False, True])
def test_handle_does_not_keep_the_model_alive(after_failure):
    run_ranks(2, freed, after_failure)


def resident_nbytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def wrapping_again_and_again(rank, nranks):
    nthreads, resident = [], []
    for _ in range(30):
        ddp, _ = wrap(mlp(256, 1024, 256), "int8")  # 2 MiB of gradients
        train(ddp, rank, 2, width=256)
        nthreads.append(len(os.listdir("/proc/self/task")))
        del ddp
        gc.collect()
        resident.append(resident_nbytes())
    return nthreads, resident


def test_pc_070_wrapping_leaves_nothing_behind():
    for nthreads, resident in run_ranks(2, wrapping_again_and_again):
        assert nthreads[-1] <= nthreads[1]
        # One model with its residual and staging is more than 6 MiB; 25 of them would be 150.
        assert resident[-1] - resident[4] < 20 << 20


def steady(rank, nranks):
    ddp, _ = wrap(mlp(64, 300, 64), "int8", {"bucket_cap_mb": 0.05})
    resident = []
    for _ in range(5):
        train(ddp, rank, 100, width=64)
        gc.collect()
        resident.append(resident_nbytes())
    return resident


def test_memory_is_steady():
    for resident in run_ranks(2, steady):
        assert resident[-1] - resident[1] < 4 << 20


def pickled(rank, nranks):
    """torch.save of the whole DDP, as without the hook; what is loaded has no handle."""
    ddp, handle = wrap(mlp(64, 64), "int8")
    step(ddp, rank, 0)
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert digest_params(loaded) == digest_params(ddp)
    step(ddp, rank, 1)
    return handle.stats().rounds, agentcomm.attach(loaded, "int8").stats().rounds


def test_ddp_can_be_pickled():
    assert run_ranks(2, pickled) == [(2, 0)] * 2


def wrong_interface(rank, nranks, call):
    """One rank cannot connect; the others are told at once."""
    if rank == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
    try:
        ddp = DistributedDataParallel(mlp(8, 8))
        began = time.monotonic()
        argument = ddp if call == "attach" else torch.ones(5)
        with pytest.raises(agentcomm.AgentCommError) as caught:
            getattr(agentcomm, call)(argument, "int8")
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
    assert time.monotonic() - began < 20  # the group's timeout is longer
    agentcomm.attach(ddp, "int8").close()  # and the next attempt meets
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("call", ["attach", "all_reduce"])
def test_rank_without_its_interface_tells_the_others(call):
    (first, text), (second, own) = run_ranks(2, wrong_interface, call)
    assert (first, second) == ("MismatchError", "StateError")
    assert "rank 1 could not attach: StateError: gloo cannot use the network interfaces" in text
    assert "GLOO_SOCKET_IFNAME='nosuch0'" in own


def copied(rank, nranks):
    ddp, handle = wrap(mlp(64, 64), "int8")
    train(ddp, rank, 2, width=64)
    model = copy.deepcopy(ddp.module)
    again, second = wrap(model, "int8")  # of the copied module
    twin = copy.deepcopy(ddp)  # of the DDP: has no hook
    if rank == 0:
        twin(batch(rank, 9, 64))  # must not count as a forward pass of the first one
    digests = train(ddp, rank, 2, width=64, first=2), train(again, rank, 2, width=64, first=2)
    assert (handle.stats().rounds, second.stats().rounds) == (4, 2)
    plain, _ = wrap(copy.deepcopy(twin.module))
    dist.barrier()
    assert train(twin, rank, 2, width=64) == train(plain, rank, 2, width=64)
    third = agentcomm.attach(twin, "int8")
    digests += (train(twin, rank, 2, width=64),)
    assert third.stats().rounds == 2
    return digests


def test_deepcopy_copies_no_handle():
    assert all_equal(run_ranks(2, copied))


# ---- what goes how -------------------------------------------------------------------------------


def warmed_up(rank, nranks):
    ddp, handle = wrap(mlp(64, 300, 64), "int8", warmup_nrounds=3)
    plain, _ = wrap(mlp(64, 300, 64))
    dense = train(ddp, rank, 3, width=64), train(plain, rank, 3, width=64)
    assert handle.stats().residual_norm == 0
    first = handle.stats().wire_nbytes
    compressed = train(ddp, rank, 3, width=64, first=3), train(plain, rank, 3, width=64, first=3)
    assert handle.stats().residual_norm > 0
    assert handle.stats().wire_nbytes - first < first / 3
    return dense, compressed


def test_warm_up_rounds_go_raw():
    results = run_ranks(2, warmed_up)
    assert all_equal(results)
    dense, compressed = results[0]
    assert dense[0] == dense[1]
    assert compressed[0] != compressed[1]


def ruled(rank, nranks, rules, min_compress_nelems):
    """Return, per parameter, whether its gradient is to the bit that of plain DDP, and is owed."""
    ddp, handle = wrap(
        mlp(64, 300, 200, 64), "int8", rules=rules, min_compress_nelems=min_compress_nelems
    )
    plain, _ = wrap(mlp(64, 300, 200, 64))
    for number in range(2):
        step(ddp, rank, number)
        step(plain, rank, number)
    return {
        name: (torch.equal(param.grad, twin.grad), bool(handle.residual(param).any()))
        for (name, param), twin in zip(
            ddp.module.named_parameters(), plain.parameters(), strict=True
        )
    }


@pytest.mark.parametrize(
    ("rules", "min_compress_nelems", "raw", "owing"),
    [
        ({}, 1024, "0b 2b 4b", "0w 2w 4w"),
        ({}, 0, "", "0w 0b 2w 2b 4w 4b"),
        ({"0.*": "raw"}, 0, "0w 0b", "2w 2b 4w 4b"),
        ({"*.bias": "fp16", "*": "raw"}, 0, "0w 2w 4w", ""),
        ({"2.weight": "bf16"}, 1 << 40, "0w 0b 2b 4w 4b", ""),
        ({"[02].weight": "raw", "2.*": "int8"}, 0, "0w 2w", "0b 2b 4w 4b"),
    ],
)
def test_rules(rules, min_compress_nelems, raw, owing):
    for found in run_ranks(2, ruled, rules, min_compress_nelems):
        short = {name[0] + name[2]: facts for name, facts in found.items()}
        assert [name for name, (is_raw, _) in short.items() if is_raw] == raw.split()
        assert [name for name, (_, owes) in short.items() if owes] == owing.split()


def changing_codec(rank, nranks):
    ddp, handle = wrap(mlp(64, 300, 64), "raw", rules={"0.bias": "raw"})
    digests, sent = [], []
    for codec in ("raw", "int8", "fp16", agentcomm.Int8(block=64), "raw"):
        handle.set_codec(codec)
        before = handle.stats().wire_nbytes
        digests += train(ddp, rank, 2, width=64, first=len(digests))
        sent.append(handle.stats().wire_nbytes - before)
    with pytest.raises(agentcomm.SpecError):
        handle.set_codec("int9")
    assert handle.stats().rounds == 10
    assert sent[0] > 1.9 * sent[2] > 3.6 * sent[1]
    return digests


@pytest.mark.parametrize("nranks", [2, 3])
def test_set_codec(nranks):
    assert all_equal(run_ranks(nranks, changing_codec))


def statistics(rank, nranks):
    ddp, handle = wrap(mlp(64, 300, 200, 64), "int8", {"bucket_cap_mb": 0.1}, min_compress_nelems=0)
    train(ddp, rank, 5, width=64)
    stats = handle.stats()
    nelems = sum(param.numel() for param in ddp.parameters())
    assert stats.dense_nbytes == 5 * 4 * nelems * 2 * (nranks - 1) // nranks
    assert sum(bucket.dense_nbytes for bucket in stats.per_bucket) == stats.dense_nbytes * 4 // 5
    assert 3.5 < stats.ratio < 4.0
    assert stats.ratio == stats.dense_nbytes / stats.wire_nbytes
    assert all(bucket.rounds == 4 for bucket in stats.per_bucket)  # since the rebuild
    assert stats.to_dict()["per_bucket"][0]["index"] == 0
    assert len(str(stats).splitlines()) == len(stats.per_bucket) + 3
    logged = {}

    class Writer:
        def add_scalar(self, tag, value, step):
            logged[tag] = value, step

    stats.log(Writer(), 7)
    assert logged["agentcomm/rounds"] == (5, 7)
    return stats.buckets, stats.dense_nbytes


def test_stats():
    assert all_equal(run_ranks(2, statistics))


# ---- models --------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters of odd shapes, all of them used."""

    SHAPES = ((), (), (1,), (2,), (3,), (4,), (0, 4), (1, 7), (7, 1), (2, 3, 5), (300, 4))

    def __init__(self, empty_on=None):
        super().__init__()
        torch.manual_seed(0)
        self.params = nn.ParameterList(nn.Parameter(torch.randn(s)) for s in self.SHAPES)
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.big = nn.Conv2d(8, 130, 5).to(memory_format=torch.channels_last)

    def forward(self, x):
        x = self.big(self.conv(x))
        return x.square().mean() * sum((p * p.detach().cos()).sum() for p in self.params)


def odd_batch(rank, number):
    return torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(10 * number + rank + 1))


def odd(rank, nranks, codec):
    ddp, handle = wrap(Odd(), codec, min_compress_nelems=0)
    plain, _ = wrap(Odd())
    recorder = Recorder(ddp, handle)
    for number in range(4):
        for module in (ddp, plain):
            module.zero_grad()
            module(odd_batch(rank, number)).backward()
        recorder.end_round()
    for (name, param), twin in zip(ddp.module.named_parameters(), plain.parameters(), strict=True):
        assert param.grad.shape == twin.grad.shape
        assert handle.residual(param).shape == param.shape
        if codec == "raw" and nranks == 2:
            assert torch.equal(param.grad, twin.grad), name
        elif param.numel():
            # Two quantisations of a block that may have a larger maximum than this parameter; a
            # gross error (another parameter's values) is what must show.
            assert (param.grad - twin.grad).abs().max() <= max(0.4, 3 * step_error(codec)) * max(
                p.grad.abs().max().item() for p in plain.parameters() if p.numel()
            )
    return digest_grads(ddp), (recorder.rounds, recorder.residuals())


@pytest.mark.parametrize("nranks", [2, 3, 5])
@pytest.mark.parametrize("codec", CODECS)
def test_pc_031_032_041_odd_shapes(codec, nranks):
    results = run_ranks(nranks, odd, codec)
    assert all_equal([digests for digests, _ in results])
    if codec == "int8":
        check_conservation([record for _, record in results])


def channels_last(rank, nranks):
    """``residual`` is laid out as the parameter is, whatever its memory format."""
    torch.manual_seed(0)
    conv = nn.Conv2d(16, 16, 3, bias=False).to(memory_format=torch.channels_last)
    ddp, handle = wrap(conv, "int8")
    x = torch.randn(2, 16, 5, 5, generator=torch.Generator().manual_seed(rank))
    with ddp.no_sync():
        ddp(x).square().mean().backward()
    local = conv.weight.grad.clone()
    ddp.zero_grad()
    ddp(x).square().mean().backward()
    # One round: gradient minus what was sent, and what was sent is a number of steps.
    sent = local - handle.residual(conv.weight)
    step = local.abs().max() / 127
    return ((sent - local).abs().max() / step).item()


def test_pc_041_residual_has_the_parameters_shape():
    assert all(error <= 0.51 for error in run_ranks(2, channels_last))


def half_model(rank, nranks, codec, dtype):
    ddp, handle = wrap(mlp(64, 300, 64, dtype=dtype), codec)
    plain, _ = wrap(mlp(64, 300, 64, dtype=dtype))
    digests = [train(module, rank, 4, width=64, dtype=dtype) for module in (ddp, plain)]
    if dtype != torch.float16:  # where halving a subnormal number rounds
        lossless = codec == "raw" or (codec, dtype) == ("bf16", torch.bfloat16)
        assert (digests[0] == digests[1]) == lossless
    assert handle.stats().rounds == 4
    return digests[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("codec", CODECS)
def test_pc_036_models_of_another_dtype(codec, dtype):
    assert all_equal(run_ranks(2, half_model, codec, dtype))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64).to(torch.bfloat16)
        self.c = nn.Linear(64, 64).double()

    def forward(self, x):
        return self.c(self.b(self.a(x).bfloat16()).double())


def mixed_dtypes(rank, nranks, codec):
    ddp, handle = wrap(Mixed(), codec)
    digests = train(ddp, rank, 4, width=64)
    assert len(handle.stats().per_bucket) == 3
    return digests


@pytest.mark.parametrize("codec", CODECS)
def test_pc_036_mixed_dtypes(codec):
    assert all_equal(run_ranks(3, mixed_dtypes, codec))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(40, 40, dtype=torch.cfloat))

    def forward(self, x):
        return torch.view_as_real(x @ self.weight)


def complex_model(rank, nranks, codec):
    ddp, handle = wrap(Complex(), codec)
    weight = ddp.module.weight
    x = torch.randn(4, 40, generator=torch.Generator().manual_seed(rank)) * torch.tensor(1 + 2j)
    for _ in range(3):
        with ddp.no_sync():
            ddp.zero_grad()
            ddp(x).square().mean().backward()
        mean = weight.grad.clone()
        dist.all_reduce(torch.view_as_real(mean))
        mean /= nranks
        ddp.zero_grad()
        ddp(x).square().mean().backward()
    error = (weight.grad - mean).abs().max() / mean.abs().max()
    assert weight.grad.imag.abs().max() > 0.1 * mean.abs().max()
    # int8: half a step of each rank's block, twice since the residual of the last round is added.
    assert error <= 4 * step_error(codec) + 1e-6
    assert handle.residual(weight).shape == (40, 40, 2)
    return digest([weight.grad])


@pytest.mark.parametrize("codec", CODECS)
def test_pc_038_complex_parameters(codec):
    assert all_equal(run_ranks(2, complex_model, codec))


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 16, sparse=True, padding_idx=0)
        self.dense = nn.Linear(16, 16)

    def forward(self, tokens):
        return self.dense(self.embedding(tokens))


def sparse(rank, nranks, codec):
    ddp, handle = wrap(Sparse(), codec, min_compress_nelems=0)
    plain, _ = wrap(Sparse())
    for number in range(3):
        generator = torch.Generator().manual_seed(10 * number + rank)
        tokens = torch.randint(0, 50, (4, 6), generator=generator)
        if rank == 1 and number == 2:
            tokens.zero_()  # nothing but padding
        for module in (ddp, plain):
            module.zero_grad()
            module(tokens).square().sum().backward()
        ours, theirs = ddp.module.embedding.weight.grad, plain.module.embedding.weight.grad
        assert ours.is_sparse
        assert torch.equal(ours.to_dense(), theirs.to_dense())
    if codec == "raw":
        assert torch.equal(ddp.module.dense.weight.grad, plain.module.dense.weight.grad)
    assert handle.stats().sparse_nbytes > 0
    return digest([ours.to_dense(), ddp.module.dense.weight.grad])


@pytest.mark.parametrize("codec", CODECS)
def test_pc_039_sparse_gradients(codec):
    assert all_equal(run_ranks(2, sparse, codec))


class Rows(nn.Module):
    """100 rows, of which the first ten are ever used; rank 1 has no gradient at all."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(100, 24)
        self.dense = nn.Linear(24, 1)

    def forward(self, tokens, factor):
        return (self.dense(self.embedding(tokens)) * factor).square().mean()


def unused_rows(rank, nranks, codec):
    ddp, _ = wrap(Rows(), codec, min_compress_nelems=0)
    rows = ddp.module.embedding.weight
    before = rows.detach().clone()
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    for number in range(200):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * number + rank)
        tokens = torch.randint(0, 10, (8,), generator=generator)
        ddp(tokens, 0.0 if rank == 1 else 1.0).backward()
        optimizer.step()
    if codec in ZERO_STAYS:
        assert torch.equal(rows[10:], before[10:])
    assert bool((rows[:10] != before[:10]).any(1).all())
    return digest_params(ddp)


@pytest.mark.parametrize("codec", CODECS)
def test_pc_022_unused_rows_do_not_move(codec):
    assert all_equal(run_ranks(2, unused_rows, codec))


def one_bad_gradient(rank, nranks, codec, value):
    ddp, handle = wrap(mlp(64, 300, 64), codec, min_compress_nelems=0)
    weight = ddp.module[0].weight
    bad = {"now": False}
    row = torch.tensor(7)
    weight.register_hook(lambda grad: grad.index_fill(0, row, value) if bad["now"] else grad)
    finite = []
    for number in range(10):
        bad["now"] = rank == 1 and number == 3
        step(ddp, rank, number)
        finite.append([bool(param.grad.isfinite().all()) for param in ddp.parameters()])
        norm = handle.stats().residual_norm
        assert norm < float("inf")
        assert norm == norm
    return finite, digest_grads(ddp)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_pc_020_non_finite_gradient_of_one_rank(codec, nranks, value):
    results = run_ranks(nranks, one_bad_gradient, codec, value)
    assert all_equal(results)
    finite, _ = results[0]
    for number, flags in enumerate(finite):
        # Others may share its block, but not one that lies far from it.
        assert flags[0] == (number != 3)
        assert flags[2] or number == 3
        assert flags[3]


def scaled(rank, nranks):
    """GradScaler skips the step on all ranks or on none."""
    ddp, _ = wrap(mlp(64, 300, 64), "int8")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scales = []
    for number in range(5):
        optimizer.zero_grad()
        loss = ddp(batch(rank, number, 64)).square().mean()
        scaler.scale(loss * (float("inf") if rank == 1 and number == 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, digest_params(ddp)


def test_pc_020_grad_scaler_skips_everywhere():
    results = run_ranks(2, scaled)
    assert all_equal(results)
    assert results[0][0] == [1024.0, 1024.0, 512.0, 512.0, 512.0]


# ---- the script's own collectives, groups --------------------------------------------------------


def with_own_collectives(rank, nranks, codec):
    ddp, _ = wrap(mlp(64, 300, 64), codec)
    pending = []
    for number in range(10):
        activation = torch.full((3, 5), float(rank + number))
        one_hot = torch.zeros(7, dtype=torch.int64)
        one_hot[(rank + number) % 7] = 1
        pending.append((activation, dist.all_reduce(activation, async_op=True)))
        loss = ddp(batch(rank, number, 64)).square().mean()
        dist.all_reduce(one_hot)
        loss.backward()
        where = [(r + number) % 7 for r in range(nranks)]
        assert one_hot.tolist() == [where.count(i) for i in range(7)]
        count = torch.tensor(2**40 + rank)
        dist.broadcast(count, number % nranks)
        assert count.item() == 2**40 + number % nranks
    for number, (activation, work) in enumerate(pending):
        work.wait()
        assert activation.unique().tolist() == [sum(range(nranks)) + nranks * number]
    return digest_grads(ddp)


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_pc_046_the_scripts_own_collectives(codec):
    assert all_equal(run_ranks(3, with_own_collectives, codec))


def on_a_subgroup(rank, nranks, history):
    group = dist.new_group([1, 3])
    if history and rank == 3:
        # Any further group that torch names by its count of groups would hang. (So would the one
        # above, in torch itself, if it came after this.)
        dist.new_group([3], use_local_synchronization=True)
    if rank in (0, 2):
        return None
    models = []
    for codec in ("raw", "int8", None):
        ddp, handle = wrap(mlp(64, 300, 64), codec, {"process_group": group})
        models.append(train(ddp, rank, 3, width=64))
        if handle is not None:
            assert handle.stats().dense_nbytes == 3 * 4 * sum(p.numel() for p in ddp.parameters())
    tensor = torch.full((5,), float(rank))
    agentcomm.all_reduce(tensor, "raw", group=group)
    assert tensor.tolist() == [2.0] * 5
    return models


@pytest.mark.parametrize("history", [False, True], ids=["same history", "other history"])
def test_pc_053_subgroup(history):
    results = run_ranks(4, on_a_subgroup, history)
    assert results[0] is results[2] is None
    assert results[1] == results[3]
    raw, compressed, plain = results[1]
    assert raw == plain != compressed


def subgroup_error(rank, nranks):
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        ddp = DistributedDataParallel(mlp(64, 64), process_group=group)
        with pytest.raises(agentcomm.MismatchError) as caught:
            agentcomm.attach(ddp, "int8" if rank == 1 else "fp16")
        return str(caught.value)
    return ""


def test_pc_053_messages_name_global_ranks():
    texts = run_ranks(4, subgroup_error)
    for text in texts[1::2]:
        assert "on rank 1" in text
        assert "on rank 3" in text


# ---- HookState -----------------------------------------------------------------------------------


def two_arguments(rank, nranks, pickled):
    state = pickled or agentcomm.HookState("int8", min_compress_nelems=0)
    with pytest.raises(agentcomm.StateError, match="connects in the first backward pass"):
        _ = state.handle
    ddp = DistributedDataParallel(mlp(64, 300, 64))
    ddp.register_comm_hook(state, agentcomm.comm_hook)
    twin, _ = wrap(mlp(64, 300, 64), "int8", min_compress_nelems=0)
    digests = train(ddp, rank, 4, width=64)
    assert digests == train(twin, rank, 4, width=64)
    assert state.handle.stats().rounds == 4
    copied = pickle.loads(pickle.dumps(state))
    assert copied.options == state.options
    with pytest.raises(agentcomm.StateError):
        _ = copied.handle
    state.handle.close()
    train(ddp, rank, 2, width=64)
    return digests


@pytest.mark.parametrize("pickled", [False, True])
def test_hook_state(pickled):
    state = agentcomm.HookState("int8", min_compress_nelems=0) if pickled else None
    assert all_equal(run_ranks(2, two_arguments, state))


def hook_state_options(rank, nranks):
    with pytest.raises(agentcomm.StateError, match="pass module= to HookState"):
        agentcomm.HookState("int8", rules={"*": "raw"})
    with pytest.raises(agentcomm.SpecError):
        agentcomm.HookState("int9")
    model = mlp(64, 300, 64)
    state = agentcomm.HookState("int8", model, rules={"*": "raw"})
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, agentcomm.comm_hook)
    plain, _ = wrap(mlp(64, 300, 64))
    assert train(ddp, rank, 3, width=64) == train(plain, rank, 3, width=64)
    reference = weakref.ref(model)
    del model, ddp
    gc.collect()
    assert reference() is None


def test_hook_state_options():
    run_ranks(2, hook_state_options)


def state_of_two(rank, nranks):
    state = agentcomm.HookState("int8")
    ddps = [DistributedDataParallel(mlp(64, 64, seed=i)) for i in range(2)]
    for ddp in ddps:
        ddp.register_comm_hook(state, agentcomm.comm_hook)
    train(ddps[0], rank, 2, width=64)
    train(ddps[1], rank, 1, width=64)


def test_hook_state_serves_one_ddp():
    outcomes = run_ranks_raising(2, state_of_two)
    assert [outcome.error for outcome in outcomes] == ["StateError"] * 2
    assert "one HookState serves one DistributedDataParallel" in outcomes[0].text


def wrong_state(rank, nranks):
    ddp = DistributedDataParallel(mlp(8, 8))
    ddp.register_comm_hook(None, agentcomm.comm_hook)
    train(ddp, rank, 1, width=8)


def test_hook_needs_a_hook_state():
    outcomes = run_ranks_raising(2, wrong_state)
    assert [outcome.error for outcome in outcomes] == ["TypeError"] * 2


def threads_of_models(rank, nranks):
    """Two models trained by two threads of a process, each with its own group."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    ddps = [wrap(mlp(64, 300, 64), "int8", {"process_group": group})[0] for group in groups]
    digests = [None, None]

    def work(i):
        digests[i] = train(ddps[i], rank, 5, width=64)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return digests


def test_two_models_in_two_threads():
    results = run_ranks(2, threads_of_models)
    assert all_equal(results)
    assert None not in results[0]
