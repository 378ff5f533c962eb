"""Error feedback: against a single-process reference, and no gradient mass is lost or made."""

import pytest
import torch
from ranks import run_ranks
from reference import Int8Reference
from torch import nn
from toys import CODECS, FEEDBACK, all_equal, batch, digest_params, mlp, train, wrap

import agentcomm

EPS = 2.0**-24


class Recorder:
    """Notes, per round, the buckets as the hook sees them and the gradients that come out."""

    def __init__(self, ddp, handle):
        self.ddp, self.handle = ddp, handle
        self.names = {id(param): name for name, param in ddp.module.named_parameters()}
        self.rounds = []
        self._pending = []
        self._exchange = handle.exchange
        handle.exchange = self._record

    def _record(self, bucket):
        # torch gives each part of the bucket the parameter's shape, but not its strides.
        grads = {
            self.names[id(param)]: part.clone().as_strided(param.shape, param.stride()).reshape(-1)
            for param, part in zip(bucket.parameters(), bucket.gradients(), strict=True)
        }
        self._pending.append((bucket.index(), grads))
        return self._exchange(bucket)

    def end_round(self):
        """Note the results of the backward pass that has just ended."""
        results = {
            name: None if param.grad is None else param.grad.detach().clone().reshape(-1)
            for name, param in self.ddp.module.named_parameters()
        }
        self.rounds.append((self._pending, results))
        self._pending = []

    def residuals(self):
        named = self.ddp.module.named_parameters()
        return {name: self.handle.residual(param).reshape(-1) for name, param in named}


def equal_layers(rank, nranks, width, nsteps):
    layers = [nn.Linear(width, width, bias=False) for _ in range(3)]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    torch.manual_seed(0)
    for param in model.parameters():
        nn.init.normal_(param, std=0.2)
    ddp, handle = wrap(model, "int8", {"bucket_cap_mb": 100}, min_compress_nelems=0)
    recorder = Recorder(ddp, handle)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    for step in range(nsteps):
        optimizer.zero_grad()
        ddp(batch(rank, step, width)).square().sum().backward()
        recorder.end_round()
        optimizer.step()
    return recorder.rounds, recorder.residuals()


def check_against_reference(results):
    """Compare every round's means, and what is owed at the end.

    Returns the layouts met, and whether the last one's buckets are direct.
    """
    nranks, rounds_of = len(results), [rounds for rounds, _ in results]
    sizes = {name: grad.numel() for name, grad in rounds_of[0][0][1].items()}
    reference, layouts = Int8Reference(nranks, sizes), []
    for by_rank in zip(*rounds_of, strict=True):
        layout = {bucket: list(grads) for bucket, grads in by_rank[0][0]}
        if not layouts or layout != layouts[-1]:
            layouts.append(layout)
            reference.set_layout(layout)
        for bucket, names in layout.items():
            grads = [
                {name: grad.numpy() for name, grad in dict(buckets)[bucket].items()}
                for buckets, _ in by_rank
            ]
            means = reference.exchange(bucket, grads)
            for name in names:
                for _, found in by_rank:
                    assert torch.equal(found[name], torch.from_numpy(means[name])), name
    for rank, (_, residuals) in enumerate(results):
        for name, owed in residuals.items():
            assert torch.equal(owed, torch.from_numpy(reference.owed(rank, name))), name
            assert owed.any()
    return layouts, [reference.is_direct(bucket) for bucket in layouts[-1]]


@pytest.mark.parametrize(
    ("nranks", "width", "direct"),
    # Widths at which tiles cross parameters, and blocks too (a multiple of 256 elements is none).
    [(2, 31, True), (2, 190, True), (3, 101, False), (3, 31, True), (5, 150, False)],
)
def test_pc_001_residual_follows_the_parameter(nranks, width, direct):
    results = run_ranks(nranks, equal_layers, width, 6)
    layouts, directs = check_against_reference(results)
    assert directs == [direct]
    # The case: one bucket that keeps its length while its parameters change places.
    assert len(layouts) == 2
    assert all(list(layout) == [0] for layout in layouts)
    assert layouts[0][0] == layouts[1][0][::-1]


def several_buckets(rank, nranks, nsteps):
    ddp, handle = wrap(mlp(64, 300, 200, 64), "int8", {"bucket_cap_mb": 0.1}, min_compress_nelems=0)
    recorder = Recorder(ddp, handle)
    for step in range(nsteps):
        ddp.zero_grad()
        ddp(batch(rank, step, 64)).square().sum().backward()
        recorder.end_round()
    return recorder.rounds, recorder.residuals()


@pytest.mark.parametrize("nranks", [2, 3])
def test_pc_001_residual_moves_between_buckets(nranks):
    layouts, directs = check_against_reference(run_ranks(nranks, several_buckets, 5))
    assert len(layouts) == 2
    assert len(layouts[1]) > 1
    assert all(directs) == (nranks == 2)


def conserving(rank, nranks, codec, nsteps):
    ddp, handle = wrap(mlp(64, 300, 200, 64), codec, {"bucket_cap_mb": 0.1}, feedback=True)
    recorder = Recorder(ddp, handle)
    for step in range(nsteps):
        ddp.zero_grad()
        ddp(batch(rank, step, 64)).square().sum().backward()
        recorder.end_round()
    return recorder.rounds, recorder.residuals()


def check_conservation(results):
    """Sum of gradients in = n * sum of means + sum of residuals, per parameter."""
    nranks, nsteps = len(results), len(results[0][0])
    all_grads = [
        {name: grad for _, grads in buckets for name, grad in grads.items()}
        for rounds, _ in results
        for buckets, _ in rounds
    ]
    largest = max(g.abs().max().item() for gs in all_grads for g in gs.values() if g.numel())
    # Per rank and step: adding the residual, decoding (scale times weight, times q), subtracting
    # and summing up n ranks are at most 8 + n roundings of numbers of at most 2 * largest; the
    # owner's step costs no more than that of a further rank.
    bound = (8 + nranks) * EPS * 2 * largest * nsteps * (nranks + 1)
    for name in all_grads[0]:
        gone_in = sum(grads[name].double() for grads in all_grads if name in grads)
        means = [means[name] for _, means in results[0][0] if means[name] is not None]
        come_out = sum(mean.double() for mean in means)
        owed = sum(residuals[name].double() for _, residuals in results)
        assert ((gone_in - nranks * come_out - owed).abs() <= bound).all(), name
    # The bound would notice if residuals were lost.
    assert any((r.abs() > 4 * bound).any() for _, rs in results for r in rs.values())


@pytest.mark.parametrize("nranks", [2, 3, 5])
@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8", "int8[block=64,rounding=stochastic]"])
def test_gradient_mass_is_conserved(codec, nranks):
    check_conservation(run_ranks(nranks, conserving, codec, 5))


def with_and_without_feedback(rank, nranks, codec):
    runs = {}
    for feedback in (True, False, "auto"):
        ddp, handle = wrap(mlp(64, 128, 64), codec, feedback=feedback)
        digests = train(ddp, rank, 4, width=64)
        runs[feedback] = digests[-1], handle.stats().residual_norm
    return runs


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != "raw"])
def test_pc_026_feedback_that_is_configured_is_used(codec):
    results = run_ranks(2, with_and_without_feedback, codec)
    digests = [{key: digest for key, (digest, _) in runs.items()} for runs in results]
    assert all_equal(digests)
    assert digests[0][True] != digests[0][False]
    assert digests[0]["auto"] == digests[0][codec in FEEDBACK]
    for runs in results:
        assert runs[True][1] > 0
        assert runs[False][1] == 0


def refused(rank, nranks):
    ddp, _ = wrap(mlp(8, 8))
    with pytest.raises(agentcomm.SpecError, match=r"feedback=True with the lossless codec raw"):
        agentcomm.attach(ddp, "raw", feedback=True)
    with pytest.raises(agentcomm.SpecError, match=r"feedback='yes' is unknown"):
        agentcomm.attach(ddp, "int8", feedback="yes")
    agentcomm.attach(ddp, "int8", feedback=True)


def test_pc_026_feedback_of_a_lossless_codec_is_refused():
    run_ranks(2, refused)


def switching(rank, nranks):
    ddp, handle = wrap(mlp(64, 300, 200, 64), "int8", {"bucket_cap_mb": 0.1})
    recorder = Recorder(ddp, handle)
    norms = []
    for step, codec in enumerate(["int8", "int8", "int8", "raw", "raw", "int8", "fp16"]):
        handle.set_codec(codec)
        ddp.zero_grad()
        ddp(batch(rank, step, 64)).square().sum().backward()
        recorder.end_round()
        norms.append(handle.stats().residual_norm)
        if step == 2:
            owed = recorder.residuals()
    return recorder.rounds, recorder.residuals(), norms, owed


@pytest.mark.parametrize("nranks", [2, 3])
def test_lossless_codec_sends_what_is_owed(nranks):
    results = run_ranks(nranks, switching)
    for rounds, residuals, norms, _ in results:
        assert [norm > 0 for norm in norms] == [True, True, True, False, False, True, True]
        assert residuals.keys() == rounds[0][1].keys()
    # Round 3 goes raw: its mean is that of gradient plus residual.
    for name in results[0][3]:
        parts = [dict(item for _, g in r[0][3][0] for item in g.items())[name] for r in results]
        total = sum(part.double() for part in parts) + sum(r[3][name].double() for r in results)
        found = results[0][0][3][1][name].double()
        largest = max(part.abs().max().item() for part in parts)
        # Adding the residual, the weight, the sum: n + 3 roundings of at most 2 * largest.
        assert (found - total / nranks).abs().max() <= (nranks + 3) * EPS * 2 * largest


def resetting(rank, nranks):
    ddp, handle = wrap(mlp(64, 300, 64), "int8")
    train(ddp, rank, 3, width=64)
    before = handle.stats().residual_norm
    handle.reset_residuals()
    after = handle.stats().residual_norm
    train(ddp, rank, 1, width=64, first=3)
    return before, after, digest_params(ddp)


def test_reset_residuals():
    results = run_ranks(3, resetting)
    assert all(before > 0 and after == 0 for before, after, _ in results)
    assert all_equal([digest for _, _, digest in results])
