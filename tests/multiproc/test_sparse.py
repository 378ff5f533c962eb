"""What the sparse codecs do over rounds and over parameters: momentum, ramp, scope."""

import pytest
import torch
from ranks import run_ranks
from torch import nn
from toys import all_equal, batch, digest_grads, mlp, wrap

import agentcomm
from agentcomm import _core
from agentcomm._tensors import capsule
from agentcomm.specs import parse

WIDTH = 48
NELEMS = WIDTH * WIDTH


class OneParameter(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return x @ self.weight


def with_nan(grad):
    grad = grad.clone()
    grad.view(-1)[17] = torch.nan
    return grad


def gradients(rank, nranks, spec, nrounds, options, nan_round=-1):
    """Return, per round, this rank's own gradient and the mean that comes out."""
    ddp, handle = wrap(OneParameter(), spec, min_compress_nelems=0, **options)
    weight = ddp.module.weight
    rounds = []
    for number in range(nrounds):
        x = batch(rank, number, WIDTH)
        if number == 2 and rank == 1:
            x = x * 0  # no gradient: velocity and residual stay as they are
        ddp.zero_grad()
        ddp.module.zero_grad()
        loss = ddp.module(x).square().sum()
        (own,) = torch.autograd.grad(loss, weight)
        if number == nan_round and rank == 1:
            own = with_nan(own)
            hook = weight.register_hook(with_nan)
            ddp(x).square().sum().backward()
            hook.remove()
        else:
            ddp(x).square().sum().backward()
        rounds.append((own.reshape(-1), weight.grad.clone().reshape(-1)))
    return rounds, handle.residual(weight).reshape(-1)


def tiles_of(spec, nranks=2):
    """Return the parts of the parameter that ranks treat as tiles."""
    plan = _core.plan_lane(parse(spec).to_tuple(), 1, NELEMS, nranks, 0, 20)
    return [
        slice(first, min(first + plan["tile_nelems"], NELEMS))
        for first in range(0, NELEMS, plan["tile_nelems"])
    ]


def kept_by(frame):
    """Return the indices of a topk frame of one tile."""
    nelems, frac_e9 = _core.frame_info(capsule(frame))["nelems"], frame[12:16].view(torch.int32)
    nkept = -(-nelems * int(frac_e9) // 10**9)
    return frame[64 : 64 + 2 * nkept].view(torch.uint16).long()


def reference(results, spec, momentum):
    """Yield the means: each rank encodes its velocity with its residual; two ranks, one phase."""
    owed = [torch.zeros(NELEMS) for _ in results]
    velocity = [torch.zeros(NELEMS) for _ in results]
    for by_rank in zip(*(rounds for rounds, _ in results), strict=True):
        mean = torch.zeros(NELEMS)
        for rank, (own, _) in enumerate(by_rank):
            if not own.any():
                continue
            before = velocity[rank]
            now = own + momentum * before
            velocity[rank] = torch.where(now.isfinite(), now, before)
            for tile in tiles_of(spec):
                frame = agentcomm.encode(now[tile], spec, residual=owed[rank][tile])
                sent, kept = agentcomm.decode(frame), kept_by(frame)
                mean[tile] += sent * 0.5
                # What is lost leaves the velocity as it was.
                velocity[rank][tile][kept] = torch.where(
                    sent[kept].isfinite(), torch.zeros(len(kept)), before[tile][kept]
                )
        yield mean
    for rank, (_, residual) in enumerate(results):
        assert torch.equal(residual, owed[rank])


@pytest.mark.parametrize("values", ["", "+int8"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nan_round", [-1, 3])
def test_momentum_correction_is_the_papers(momentum, values, nan_round):
    option = f"[momentum={momentum}]" if momentum else ""
    results = run_ranks(2, gradients, f"topk:0.05{values}{option}", 6, {}, nan_round)
    expected = reference(results, f"topk:0.05{values}", momentum)
    for number, mean in enumerate(expected):
        for rounds, _ in results:
            equal = torch.equal(rounds[number][1].nan_to_num(7e37), mean.nan_to_num(7e37))
            assert equal, f"round {number}"


def test_ramp_of_the_fraction():
    """After two dense rounds four fractions for two rounds each, then the one asked for."""
    results = run_ranks(2, gradients, "topk:0.01[ramp=8]", 12, {"warmup_nrounds": 2})
    nkept = [
        int((rounds[number][1] != 0).sum()) for rounds, _ in results[:1] for number in range(12)
    ]
    fractions = [1, 1] + [0.01 ** (stage / 5) for stage in (1, 1, 2, 2, 3, 3, 4, 4)] + [0.01, 0.01]
    for number, (n, frac) in enumerate(zip(nkept, fractions, strict=True)):
        # The union of what two ranks keep; rank 1 keeps nothing that is not zero in round 2.
        assert frac * NELEMS * 0.99 <= n <= 2 * (frac * NELEMS + 2), (number, n, frac)
    for first, second in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(first[1], second[1])
    codec = agentcomm.TopK(0.01, ramp=8)
    assert [codec.at_round(i).keep_frac for i in (8, 9, 1000)] == [0.01] * 3
    assert codec.at_round(8).ramp == 0


def kept_after_set_codec(rank, nranks):
    ddp, handle = wrap(OneParameter(), "topk:0.5", min_compress_nelems=0, warmup_nrounds=1)
    nkept = []
    for number in range(12):
        if number == 3:
            handle.set_codec("topk:0.01[ramp=8]")
        ddp.zero_grad()
        ddp(batch(0, number, WIDTH)).square().sum().backward()  # the same on both ranks
        nkept.append(int((ddp.module.weight.grad != 0).sum()))
    return nkept


def test_a_ramp_begins_where_set_codec_was_called():
    nkept, other = run_ranks(2, kept_after_set_codec)
    assert nkept == other
    fractions = [0.01 ** (stage / 5) for stage in (1, 1, 2, 2, 3, 3, 4, 4)] + [0.01]
    for n, frac in zip(nkept[3:], fractions, strict=True):
        assert frac * NELEMS <= n < frac * NELEMS + 2


def layers_of_two_sizes(rank, nranks, spec):
    """The first layer's gradients are a thousand times those of the second."""
    ddp, _ = wrap(mlp(32, 32, 40), spec, min_compress_nelems=0)
    ddp.module[0].weight.register_hook(lambda grad: grad * 1000)
    ddp(batch(rank, 0, 32)).square().sum().backward()
    counts = {name: int((p.grad != 0).sum()) for name, p in ddp.module.named_parameters()}
    return counts, {name: p.numel() for name, p in ddp.module.named_parameters()}, digest_grads(ddp)


@pytest.mark.parametrize("nranks", [2, 3])
def test_scope_tensor_serves_every_parameter(nranks):
    of_tile = run_ranks(nranks, layers_of_two_sizes, "topk:0.05")
    counts, _, _ = of_tile[0]
    if nranks == 2:  # tiles are so cut that it lies in the shadow of the layer's weight
        assert counts["0.bias"] == 0
    of_tensor = run_ranks(nranks, layers_of_two_sizes, "topk:0.05[scope=tensor]")
    counts, sizes, _ = of_tensor[0]
    for name, count in counts.items():
        share = 0.05 * sizes[name]
        assert share * 0.5 <= count <= nranks * (share + 2), name
    assert all_equal([digest for *_, digest in of_tile])
    assert all_equal([digest for *_, digest in of_tensor])


def randk_of_ranks(rank, nranks, spec):
    ddp, _ = wrap(OneParameter(), spec, min_compress_nelems=0)
    places = []
    for number in range(3):
        ddp.zero_grad()
        ddp(batch(rank, number, WIDTH)).square().sum().backward()
        places.append(ddp.module.weight.grad.reshape(-1).nonzero().reshape(-1))
    return places


@pytest.mark.parametrize("nranks", [2, 3])
def test_randk_draws_the_same_places_on_all_ranks(nranks):
    """So the mean of n ranks has no more non-zeros than one contribution."""
    nkept = sum(-(-(t.stop - t.start) // 10) for t in tiles_of("randk:0.1", nranks))
    (places, *others) = run_ranks(nranks, randk_of_ranks, "randk:0.1")
    assert [len(p) for p in places] == [nkept] * 3
    assert not torch.equal(places[0], places[1])  # new ones in every round
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(places, other, strict=True))


def refused(rank, nranks):
    tensor = torch.ones(100)
    for call in (
        lambda: agentcomm.encode(tensor, "topk:0.1[momentum=0.9]"),
        lambda: agentcomm.all_reduce(tensor, "topk:0.1[ramp=10]"),
    ):
        with pytest.raises(agentcomm.SpecError, match="work in attach, and must be left out here"):
            call()


def test_rounds_belong_to_attach():
    run_ranks(2, refused)


# ---- training ------------------------------------------------------------------------------------

NSTEPS = 400
# What docs/codecs.md advises for topk:0.01, and how far it may be from dense training: loss after
# NSTEPS of a small perceptron, mean of three seeds. Short trainings lag: an element travels two or
# three times after the ramp. 1.7 % were seen, between 1.2 and 2.1 from seed to seed.
ADVISED = f"topk:0.01[ramp={2 * NSTEPS // 5}]"
LAG_MAX = 0.04


def final_losses(rank, nranks):
    """Losses with and without compression, on data that no rank has trained on, by seed."""
    losses = []
    for seed in range(3):
        teacher = mlp(24, 32, 10, seed=100 + seed)
        held_out = batch(99, 999, 24, nrows=2048)
        for spec in (None, ADVISED):
            ddp, _ = wrap(mlp(24, 128, 128, 10, seed=seed), spec)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
            for step in range(NSTEPS):
                for group in optimizer.param_groups:
                    group["lr"] = 0.1 * (1 - step / NSTEPS)
                x = batch(rank, 1000 * seed + step, 24, nrows=64)
                with torch.no_grad():
                    labels = teacher(x).argmax(1)
                optimizer.zero_grad()
                nn.functional.cross_entropy(ddp(x), labels).backward()
                optimizer.step()
            with torch.no_grad():
                labels = teacher(held_out).argmax(1)
                losses.append(nn.functional.cross_entropy(ddp.module(held_out), labels).item())
    return losses


def test_pc_025_topk_with_momentum_and_weight_decay():
    losses, other = run_ranks(2, final_losses)
    assert losses == other
    dense, compressed = sum(losses[::2]) / 3, sum(losses[1::2]) / 3
    assert compressed < dense * (1 + LAG_MAX), losses
