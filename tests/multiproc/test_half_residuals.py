"""``feedback="bf16"``: residuals in half the memory, from which nothing is lost on average."""

import math

import pytest
import torch
from ranks import run_ranks
from test_feedback import Recorder
from toys import all_equal, batch, digest_grads, mlp, wrap

NROUNDS = 40
WIDTHS = (64, 80, 64)


def owed_in_bf16(rank, nranks, spec):
    ddp, handle = wrap(mlp(*WIDTHS), spec, min_compress_nelems=0, feedback="bf16")
    recorder = Recorder(ddp, handle)
    digests = []
    for number in range(NROUNDS):
        ddp.zero_grad()
        ddp(batch(rank, number, WIDTHS[0])).square().mean().backward()
        recorder.end_round()
        digests.append(digest_grads(ddp))
    sums = {
        name: [torch.zeros(p.numel(), dtype=torch.float64) for _ in range(2)]
        for name, p in ddp.module.named_parameters()
    }
    for buckets, results in recorder.rounds:
        for _, grads in buckets:
            for name, grad in grads.items():
                sums[name][0] += grad
        for name, result in results.items():
            sums[name][1] += result
    return digests, sums, recorder.residuals()


@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize("spec", ["int8", "int4", "sign", "topk:0.1"])
def test_nothing_is_lost_on_average(spec, nranks):
    results = run_ranks(nranks, owed_in_bf16, spec)
    assert all_equal([digests for digests, *_ in results])
    for name in results[0][1]:
        gone_in = sum(sums[name][0] for _, sums, _ in results) / nranks
        come_out = results[0][1][name][1]
        owed = sum(residuals[name].double() for *_, residuals in results) / nranks
        error = gone_in - come_out - owed
        # Each store of a residual r errs by at most 2^-7 |r| with mean 0: what 40 of them by n + 1
        # writers leave is a random walk. Residuals of the last round stand for those of the others.
        size = max(residuals[name].abs().max().item() for *_, residuals in results)
        walk = 2.0**-7 * size * math.sqrt(NROUNDS * (nranks + 1))
        assert error.abs().max().item() <= 3 * walk
        # And over all elements it averages out: a rounding that leaned one way would add up.
        mean_error = (error * torch.sign(owed)).mean().abs().item()
        assert mean_error <= 5 * walk / math.sqrt(error.numel())


def memory_of(rank, nranks, feedback):
    _, handle = wrap(mlp(512, 512), "int8", feedback=feedback)
    ddp = handle._ddp()
    ddp(batch(rank, 0, 512)).square().mean().backward()
    weight = ddp.module[0].weight
    owed = handle.residual(weight)
    handle.reset_residuals()
    return owed, handle.residual(weight)


@pytest.mark.parametrize("nranks", [2, 3])
def test_residuals_are_bfloat16_numbers(nranks):
    in_float, in_half = (run_ranks(nranks, memory_of, feedback) for feedback in (True, "bf16"))
    for (exact, _), (rounded, cleared) in zip(in_float, in_half, strict=True):
        if nranks == 2:  # at three the owner's part is on top
            assert torch.equal(rounded, rounded.bfloat16().float())
        assert not torch.equal(rounded, exact)
        assert ((rounded - exact).abs() <= 2.0**-6 * exact.abs() + exact.abs().max() * 0.02).all()
        assert not cleared.any()
