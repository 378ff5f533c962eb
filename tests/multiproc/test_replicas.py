"""Replicas are equal to the bit, runs repeat to the bit, and ``raw`` is what plain DDP computes."""

import copy

import pytest
import torch
from ranks import run_ranks
from toys import CODECS, all_equal, digest, gather_grads, mlp, train, wrap

# Two buckets after the rebuild, of about 41,000 and 25,000 elements: sharded on 3 and 5 ranks
# for every codec; the biases go raw.
WIDTHS = (128, 192, 128, 128)
DDP_OPTIONS = {"bucket_cap_mb": 0.12}


def trained(rank, nranks, codec, nsteps, chunk_nbytes):
    ddp, handle = wrap(mlp(*WIDTHS), codec, DDP_OPTIONS, chunk_nbytes=chunk_nbytes)
    digests = train(ddp, rank, nsteps, width=WIDTHS[0])
    stats = handle.stats()
    assert stats.rounds == nsteps
    assert nranks == 1 or stats.wire_nbytes > 0
    return digests


@pytest.mark.parametrize("nranks", [1, 2, 3, 5])
@pytest.mark.parametrize("codec", [*CODECS, "int8[rounding=stochastic]"])
def test_pc_028_replicas_runs_and_chunk_sizes_give_the_same_bits(codec, nranks):
    first = run_ranks(nranks, trained, codec, 50, "auto")
    assert all_equal(first)
    assert len(set(first[0])) == 50  # it does train
    if nranks == 1:
        return
    for chunk_nbytes in ("auto", 4096, 65536):
        again = run_ranks(nranks, trained, codec, 12, chunk_nbytes)
        assert all_equal(again)
        assert again[0] == first[0][:12]


def raw_and_plain(rank, nranks, nsteps):
    plain, _ = wrap(mlp(*WIDTHS), None, DDP_OPTIONS)
    ddp, _ = wrap(mlp(*WIDTHS), "raw", DDP_OPTIONS)
    return train(ddp, rank, nsteps, width=WIDTHS[0]), train(plain, rank, nsteps, width=WIDTHS[0])


@pytest.mark.parametrize("nranks", [1, 2])
def test_raw_is_bitwise_plain_ddp(nranks):
    for ours, plain in run_ranks(nranks, raw_and_plain, 8):
        assert ours == plain


def all_codecs_alone(rank, nranks):
    plain = train(wrap(mlp(*WIDTHS))[0], rank, 5, width=WIDTHS[0])
    for codec in CODECS:
        ddp, _ = wrap(mlp(*WIDTHS), codec)
        assert train(ddp, rank, 5, width=WIDTHS[0]) == plain, codec


def test_pc_052_world_size_one_is_the_plain_script():
    run_ranks(1, all_codecs_alone)


def one_raw_round(rank, nranks):
    """Return the largest error of ``raw``, in units of its bound."""
    x = torch.randn(4, WIDTHS[0], generator=torch.Generator().manual_seed(rank))
    plain, _ = wrap(mlp(*WIDTHS), None, DDP_OPTIONS)
    ddp, _ = wrap(copy.deepcopy(plain.module), "raw", DDP_OPTIONS)
    local = copy.deepcopy(plain.module)
    worst = 0.0
    for _ in range(3):  # before and after DDP rebuilds its buckets
        for module in (plain, ddp, local):
            module.zero_grad()
            module(x).square().mean().backward()
        triples = zip(gather_grads(local), plain.parameters(), ddp.parameters(), strict=True)
        for locals_, theirs, ours in triples:
            # Both add up n products g_r * fl(1/n), in another order. A product errs by
            # eps = 2^-24 relative, and so does each of the n - 1 additions of partial sums, which
            # are at most sum |g_r| / n. So each side is within n eps sum |g_r| / n of the same
            # exact sum (the rounding of 1/n is common to both), up to terms of order eps^2.
            bound = 2.01 * 2.0**-24 * locals_.abs().double().sum(0) + 1e-45
            error = (ours.grad.double() - theirs.grad.double()).abs()
            worst = max(worst, (error / bound).max().item())
    return worst


@pytest.mark.parametrize("nranks", [3, 5])
def test_raw_is_plain_ddp_within_rounding(nranks):
    assert all(worst <= 1.0 for worst in run_ranks(nranks, one_raw_round))


def gradients_of_ranks(rank, nranks, codec):
    ddp, _ = wrap(mlp(64, 300, 64), codec)
    loss = sum(param.sum() for param in ddp.module.parameters()) * (rank + 1)
    # The gradients are rank + 1 everywhere; DDP's forward must run to prepare the reduction.
    (loss + 0 * ddp(torch.zeros(1, 64)).sum()).backward()
    grads = torch.cat([param.grad.view(-1) for param in ddp.parameters()])
    return grads.unique().tolist()


@pytest.mark.parametrize("nranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("codec", ["raw", "fp16"])
def test_pc_030_mean_is_exact_and_divides_once(codec, nranks):
    assert run_ranks(nranks, gradients_of_ranks, codec) == [[(nranks + 1) / 2]] * nranks


def random_state_after_a_round(rank, nranks, codec):
    import random

    import numpy as np

    ddp, _ = wrap(mlp(64, 64), codec, seed=5)
    train(ddp, rank, 2, width=64)
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002 (the global state is what is looked at)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    x = torch.ones(4, 64)
    ddp(x).square().mean().backward()
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    return digest([before[0]]) == digest([after[0]]) and before[1:] == after[1:]


@pytest.mark.parametrize("codec", ["int8", "int8[rounding=stochastic]"])
def test_global_random_state_is_left_alone(codec):
    assert run_ranks(2, random_state_after_a_round, codec) == [True, True]
