"""What DDP offers works under the hook as it does without: options, accumulation, Join, graphs."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from codec_cases import step_error
from ranks import run_ranks
from test_feedback import Recorder, check_conservation
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint
from toys import CODECS, ZERO_STAYS, all_equal, batch, digest, digest_params, mlp, train, wrap

OPTIONS = {
    "default": {},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "tiny buckets": {"bucket_cap_mb": 1e-4},
    "one bucket": {"bucket_cap_mb": 1000},
    "list of buckets": {"bucket_cap_mb_list": [0.01, 0.02, 0.5]},
    "batched copy": {"batched_grad_copy": True, "gradient_as_bucket_view": True},
}


def with_options(rank, nranks, codec, ddp_options):
    """Return the digests with the codec, and those of plain DDP."""
    runs = []
    for spec in (codec, None):
        ddp, handle = wrap(mlp(64, 200, 100, 64), spec, ddp_options)
        runs.append(train(ddp, rank, 6, width=64))
        assert handle is None or handle.stats().rounds == 6
    return runs


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("codec", CODECS)
def test_ddp_options(codec, options):
    results = run_ranks(2, with_options, codec, OPTIONS[options])
    assert all_equal(results)
    ours, plain = results[0]
    assert (ours == plain) == (codec == "raw")


def accumulating(rank, nranks, codec, ddp_options):
    """25 rounds, some after three micro-batches."""
    ddp, handle = wrap(mlp(64, 300, 64), codec, ddp_options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    digests = []
    for step in range(25):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step % 3 == 0:
            with ddp.no_sync():
                for micro in (1, 2):
                    ddp(batch(rank, step + 100 * micro, 64)).square().mean().backward()
        ddp(batch(rank, step, 64)).square().mean().backward()
        assert all(bool(param.grad.isfinite().all()) for param in ddp.parameters())
        optimizer.step()
        digests.append(digest_params(ddp))
    assert handle.stats().rounds == 25
    return digests


@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_pc_003_bucket_views_change_nothing(codec, nranks):
    runs = []
    for view in (False, True):
        options = {"gradient_as_bucket_view": view, "bucket_cap_mb": 0.05}
        runs.append(run_ranks(nranks, accumulating, codec, options))
    assert all_equal(runs[0] + runs[1])


# ---- parameters that are not used ---------------------------------------------------------------


class Branches(nn.Module):
    """A trunk and two branches, of which a call uses those that it names."""

    def __init__(self, width):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(width, width)
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)

    def forward(self, x, names):
        x = self.trunk(x).tanh()
        return sum((getattr(self, name)(x) for name in names), x)


# At 160 the branches are exchanged in two phases on three ranks, whatever the codec.
BRANCH_WIDTHS = {2: 64, 3: 160}


def branch_on_even_steps(rank, nranks, codec, options):
    width = BRANCH_WIDTHS[nranks]
    options = {"find_unused_parameters": True, **options}
    ddp, handle = wrap(Branches(width), codec, options, min_compress_nelems=0)
    recorder = Recorder(ddp, handle) if handle else None
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    weight = ddp.module.b.weight
    digests = []
    for step in range(8):
        optimizer.zero_grad()
        used = step % 2 == 0
        before = weight.detach().clone()
        owed = handle.residual(weight) if handle and step else None
        ddp(batch(rank, step, width), "ab" if used else "a").square().mean().backward()
        if recorder:
            recorder.end_round()
        assert (weight.grad is not None) == used
        optimizer.step()
        if not used:
            assert torch.equal(before, weight)
            if owed is not None and codec in ZERO_STAYS:
                assert torch.equal(owed, handle.residual(weight))  # not sent: DDP throws it away
        digests.append(digest_params(ddp))
    return digests, (recorder.rounds, recorder.residuals()) if recorder else None


@pytest.mark.parametrize(
    "options",
    [{}, {"skip_all_reduce_unused_params": True, "bucket_cap_mb": 1e-4}],
    ids=["sent", "skipped"],
)
@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_pc_004_parameters_that_no_rank_uses(codec, nranks, options):
    results = run_ranks(nranks, branch_on_even_steps, codec, options)
    assert all_equal([digests for digests, _ in results])
    if codec == "raw" and nranks == 2:
        assert results[0][0] == run_ranks(nranks, branch_on_even_steps, None, options)[0][0]
    if codec == "int8":
        # In the odd rounds nothing of b comes out, so nothing may have been sent.
        check_conservation([record for _, record in results])


def branch_of_the_rank(rank, nranks, codec):
    """Rank 0 uses branch a, rank 1 branch b, further ranks none. Return errors over bounds."""
    width = BRANCH_WIDTHS[nranks]
    options = {"find_unused_parameters": True}
    ddp, _ = wrap(Branches(width), codec, options, min_compress_nelems=0)
    used = {0: "a", 1: "b"}.get(rank, "")
    x = batch(rank, 0, width)
    local = Branches(width)
    local(x, used).square().sum().backward()
    ddp(x, used).square().sum().backward()
    worst = {}
    for (name, param), twin in zip(ddp.module.named_parameters(), local.parameters(), strict=True):
        grad = twin.grad if twin.grad is not None else torch.zeros_like(twin)
        parts = [torch.empty_like(grad) for _ in range(nranks)]
        dist.all_gather(parts, grad)
        worst[name] = (
            (param.grad - sum(parts) / nranks).abs().max().item(),
            max(part.abs().max().item() for part in parts),
        )
    return worst, digest(param.grad for param in ddp.parameters())


@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_pc_006_parameters_that_one_rank_uses(codec, nranks):
    results = run_ranks(nranks, branch_of_the_rank, codec)
    assert all_equal([digests for _, digests in results])
    largest = max(size for _, size in results[0][0].values())
    for name, (error, size) in results[0][0].items():
        # Blocks lie across parameters, so `largest`; each rank's part is divided by n, and the
        # owner's error is no larger. A rank that sends zeros adds none: for a and b there is one
        # contribution, for the trunk n.
        contributions = nranks if name.startswith("trunk") else 1
        assert size > 0
        assert error <= 1.01 * max(step_error(codec), 2.0**-22) * largest * (
            contributions / nranks + 1
        ), name


# ---- static graph, accumulation ------------------------------------------------------------------


def static_graph(rank, nranks, codec, pattern):
    """Return (digests, error) of plain DDP or of a codec."""
    ddp, handle = wrap(mlp(64, 128, 64), codec, {"static_graph": True})
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    digests = []
    try:
        for step in range(6):
            optimizer.zero_grad()
            if pattern == "accumulate":
                for micro in range(4):
                    with ddp.no_sync() if micro < 3 else contextlib.nullcontext():
                        ddp(batch(rank, 10 * step + micro, 64)).square().mean().backward()
            else:
                first = ddp(batch(rank, 10 * step, 64)).square().mean()
                (first + ddp(batch(rank, 10 * step + 1, 64)).square().mean()).backward()
            optimizer.step()
            digests.append(digest_params(ddp))
        assert handle is None or handle.stats().rounds == 6
    except RuntimeError as error:
        return digests, f"{type(error).__name__}: {error}"[:100]
    return digests, ""


@pytest.mark.parametrize("pattern", ["accumulate", "two forwards"])
def test_pc_007_static_graph(pattern):
    plain = run_ranks(2, static_graph, None, pattern)
    assert run_ranks(2, static_graph, "raw", pattern) == plain
    compressed = run_ranks(2, static_graph, "int8", pattern)
    assert all_equal(compressed)
    assert compressed[0][1] == plain[0][1]


def toggling(rank, nranks, codec, how):
    """nanoGPT's way of accumulation sets an attribute instead of using no_sync."""
    ddp, handle = wrap(mlp(64, 128, 64), codec)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    calls = []
    exchange = handle.exchange
    handle.exchange = lambda bucket: calls.append(bucket.index()) or exchange(bucket)
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(5):
            context = contextlib.nullcontext()
            if how == "attribute":
                ddp.require_backward_grad_sync = micro == 4
            elif micro < 4:
                context = ddp.no_sync()
            with context:
                ddp(batch(rank, 10 * step + micro, 64)).square().mean().backward()
            norms.append(handle.stats().residual_norm)
        optimizer.step()
    assert calls == [0] * 4
    assert handle.stats().rounds == 4
    assert handle.stats().buckets == 4
    return digest_params(ddp), norms


def test_pc_008_accumulation_by_attribute():
    runs = {how: run_ranks(2, toggling, "int8", how) for how in ("no_sync", "attribute")}
    assert runs["no_sync"] == runs["attribute"]
    assert all_equal([digest for digest, _ in runs["attribute"]])
    for _, norms in runs["attribute"]:
        # What is owed changes with the fifth micro-batch of each step and with nothing else.
        changes = [i for i in range(1, len(norms)) if norms[i] != norms[i - 1]]
        assert changes == [4, 9, 14, 19]


# ---- uneven inputs -------------------------------------------------------------------------------


def joined(rank, nranks, codec, divide):
    ddp, handle = wrap(mlp(64, 200, 100, 64), codec, {"bucket_cap_mb": 0.05})
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    nbatches = [5, 7, 8, 8, 8][rank]
    with Join([ddp], divide_by_initial_world_size=divide):
        for step in range(nbatches):
            optimizer.zero_grad()
            ddp(batch(rank, step, 64)).square().mean().backward()
            optimizer.step()
    if handle is not None:
        assert handle.stats().rounds == 8
    return [param.detach().clone() for param in ddp.parameters()]


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("codec", CODECS)
def test_pc_009_join(codec, divide):
    results = [digest(params) for params in run_ranks(3, joined, codec, divide)]
    assert all_equal(results)


@pytest.mark.parametrize("divide", [True, False])
def test_pc_009_join_divides_as_plain_ddp(divide):
    ours = run_ranks(3, joined, "raw", divide)[0]
    plain = run_ranks(3, joined, None, divide)[0]
    other = run_ranks(3, joined, None, not divide)[0]
    for mine, theirs in zip(ours, plain, strict=True):
        # Eight steps of lr 0.05 on gradients that agree to a few units of 2^-24.
        assert (mine - theirs).abs().max() <= 1e-6
    # Another divisor would show.
    assert max((a - b).abs().max() for a, b in zip(plain, other, strict=True)) > 1e-4


def joined_with_feedback(rank, nranks):
    ddp, handle = wrap(mlp(64, 300, 64), "int8")
    weight = ddp.module[0].weight
    owed = []
    with Join([ddp]):
        for step in range(3 if rank == 0 else 6):
            ddp.zero_grad()
            ddp(batch(rank, step, 64)).square().mean().backward()
            owed.append(handle.residual(weight))
    return torch.equal(owed[-1], handle.residual(weight)) if rank == 0 else owed[-1].any().item()


def test_pc_009_joined_rank_keeps_its_residual():
    assert run_ranks(2, joined_with_feedback) == [True, True]


# ---- odd models ----------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(100, 32)
        self.body = nn.Linear(32, 32)
        self.head = nn.Linear(32, 100, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens)).tanh())


def tied(rank, nranks, codec, view):
    ddp, handle = wrap(
        Tied(), codec, {"gradient_as_bucket_view": view}, rules={"head.*": codec}, feedback="auto"
    )
    recorder = Recorder(ddp, handle)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(10):
        optimizer.zero_grad()
        tokens = torch.randint(
            0, 100, (8, 16), generator=torch.Generator().manual_seed(10 * step + rank)
        )
        ddp(tokens).logsumexp(-1).sum().backward()
        recorder.end_round()
        optimizer.step()
    return digest_params(ddp), (recorder.rounds, recorder.residuals())


@pytest.mark.parametrize("nranks", [2, 3])
def test_pc_014_tied_weights(nranks):
    runs = [run_ranks(nranks, tied, "int8", view) for view in (False, True)]
    assert all_equal([digests for run in runs for digests, _ in run])
    for run in runs:
        _, residuals = run[0][1]
        assert list(residuals) == ["embedding.weight", "body.weight", "body.bias"]
        check_conservation([record for _, record in run])


def gradient_penalty(rank, nranks, codec):
    ddp, _ = wrap(mlp(32, 64, 1), codec)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    digests = []
    for step in range(4):
        optimizer.zero_grad()
        x = batch(rank, step, 32).requires_grad_()
        out = ddp(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.square().mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()
        digests.append(digest_params(ddp))
    return digests


def test_pc_017_gradient_penalty():
    plain = run_ranks(2, gradient_penalty, None)
    assert run_ranks(2, gradient_penalty, "raw") == plain
    assert all_equal(run_ranks(2, gradient_penalty, "int8"))


def gan(rank, nranks, codec):
    generator, first = wrap(mlp(16, 64, 32), codec)
    critic, second = wrap(mlp(32, 64, 1, seed=1), codec)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05) for net in (generator, critic)]
    digests = []
    for step in range(4):
        fake = generator(batch(rank, step, 16))
        optimizers[1].zero_grad()
        real = critic(batch(rank, 100 + step, 32))
        critic(fake.detach()).mean().sub(real.mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        for param in critic.parameters():
            param.requires_grad_(False)
        (-critic.module(fake)).mean().backward()
        for param in critic.parameters():
            param.requires_grad_(True)
        optimizers[0].step()
        digests.append(digest_params(generator) + digest_params(critic))
    # And with the generator's output not detached: one backward pass through both.
    loss = critic(generator(batch(rank, 50, 16))).square().mean()
    loss.backward()
    digests.append(digest(p.grad for net in (generator, critic) for p in net.parameters()))
    if codec is not None:
        assert (first.stats().rounds, second.stats().rounds) == (5, 5)
        return digests, [handle.stats().residual_norm for handle in (first, second)]
    return digests, None


@pytest.mark.parametrize("codec", CODECS)
def test_pc_055_two_models(codec):
    results = run_ranks(2, gan, codec)
    assert all_equal([digests for digests, _ in results])
    if codec == "raw":
        assert results[0][0] == run_ranks(2, gan, None)[0][0]
    if codec == "int8":
        assert all(first != second > 0 for _, (first, second) in results)


# ---- compiled and checkpointed -------------------------------------------------------------------


@contextlib.contextmanager
def dynamo(optimize_ddp):
    """Set how dynamo treats DDP; leave no trace in this process."""
    rules = torch._dynamo.trace_rules
    inlined = set(rules.LEGACY_MOD_INLINELIST)
    torch._dynamo.reset()
    torch._dynamo.config.optimize_ddp = optimize_ddp
    try:
        yield
    finally:
        torch._dynamo.config.optimize_ddp = True
        torch._inductor.config._fuse_ddp_communication = False
        rules.LEGACY_MOD_INLINELIST.intersection_update(inlined)
        rules.get_legacy_mod_inlinelist.cache_clear()
        torch._dynamo.reset()


def compiled(rank, nranks, how, optimize_ddp, bucket_cap_mb):
    """Train three layers, of which two fit a bucket of 1 MiB; or one parameter per bucket."""
    compile_ = functools.partial(torch.compile, backend="eager")
    with dynamo(optimize_ddp):
        model = mlp(32, 1024, 128, 32)
        if how == "DDP(compile)":
            model = compile_(model)
        ddp, handle = wrap(model, "int8", {"bucket_cap_mb": bucket_cap_mb})
        run = compile_(ddp) if how == "compile(DDP)" else ddp
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        digests = []
        for step in range(4):
            optimizer.zero_grad()
            loss = run(batch(rank, step, 32)).square().mean()
            if how == "compiled autograd":
                with torch._dynamo.compiled_autograd._enable(compile_):
                    loss.backward()
            else:
                loss.backward()
            optimizer.step()
            digests.append(digest_params(ddp))
        assert handle.stats().rounds == 4
        return digests


@pytest.mark.parametrize("optimize_ddp", [True, False])
@pytest.mark.parametrize("how", ["compile(DDP)", "DDP(compile)"])
def test_pc_061_compiled(how, optimize_ddp):
    uncompiled = run_ranks(2, compiled, "", True, 1)
    assert all_equal(uncompiled)
    assert run_ranks(2, compiled, how, optimize_ddp, 1) == uncompiled


@pytest.mark.parametrize("how", ["", "compile(DDP)", "DDP(compile)", "compiled autograd"])
def test_pc_061_python_reducer(how):
    # It has no buckets and calls the hook with one gradient at a time.
    by_parameter = run_ranks(2, compiled, "", True, 1e-4)
    assert run_ranks(2, compiled, how, "python_reducer", 1e-4) == by_parameter


class Checkpointed(nn.Module):
    def __init__(self, reentrant, twice):
        super().__init__()
        self.first, self.block, self.last = mlp(32, 32), mlp(32, 64, 32), mlp(32, 32)
        self.reentrant, self.twice = reentrant, twice

    def forward(self, x):
        x = self.first(x)
        for _ in range(2 if self.twice else 1):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.last(x)


def checkpointed(rank, nranks, codec, reentrant, twice, static):
    ddp, _ = wrap(Checkpointed(reentrant, twice), codec, {"static_graph": static})
    try:
        return train(ddp, rank, 4, width=32), ""
    except RuntimeError as error:
        return [], f"{type(error).__name__}: {error}"[:60]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_pc_062_activation_checkpointing(reentrant, twice, static):
    plain = run_ranks(2, checkpointed, None, reentrant, twice, static)
    assert run_ranks(2, checkpointed, "raw", reentrant, twice, static) == plain
    compressed = run_ranks(2, checkpointed, "int8", reentrant, twice, static)
    assert all_equal(compressed)
    assert compressed[0][1] == plain[0][1]
