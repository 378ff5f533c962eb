"""Encoding and decoding in several threads: the same bytes, whatever their number."""

import os

import pytest
import torch

import agentcomm

SPECS = ["raw", "bf16", "int8[rounding=stochastic]", "sign", "topk:0.01+int8", "randk:0.1"]
NELEMS = 9 * 65536 + 5


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_do_not_show(spec, dtype):
    x = torch.randn(NELEMS, generator=torch.Generator().manual_seed(4)).to(dtype)
    results = []
    for nthreads in (1, 2, 3, 4, 100):
        residual, total = torch.full((NELEMS,), 1e-3), torch.ones(NELEMS)
        frame = agentcomm.encode(x, spec, residual, None, nthreads, seed=3, checksum=True)
        agentcomm.decode(frame, total, True, nthreads)
        results.append((frame, residual, total, agentcomm.decode(frame, nthreads=nthreads)))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_threads_after_a_fork():
    """The threads of a call are gone when it returns: a forked child has its own."""
    x = torch.randn(NELEMS, generator=torch.Generator().manual_seed(4))
    frame = agentcomm.encode(x, "int8", nthreads=4)
    pid = os.fork()
    if pid == 0:
        # Bytes, since torch's own threads do not survive a fork.
        again = agentcomm.encode(x, "int8", nthreads=4).numpy().tobytes()
        os._exit(0 if again == frame.numpy().tobytes() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("nthreads", [0, -1, 1 << 16, 1.5, True, None])
def test_numbers_of_threads_that_are_refused(nthreads):
    x = torch.ones(10)
    frame = agentcomm.encode(x, "int8")
    with pytest.raises(agentcomm.SpecError, match=r"nthreads=.* is .*; it must be a whole"):
        agentcomm.encode(x, "int8", nthreads=nthreads)
    with pytest.raises(agentcomm.SpecError, match=r"nthreads=.* is .*; it must be a whole"):
        agentcomm.decode(frame, nthreads=nthreads)
