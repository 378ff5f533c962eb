"""Scripts whose ranks are started by torchrun, spawn, fork and an elastic agent."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "train_ddp.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def run(*args, **env):
    """Return {rank: [digests]} of what a script prints."""
    done = subprocess.run(
        [sys.executable, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "terminate called" not in done.stderr
    assert "Traceback" not in done.stderr
    digests = {}
    for line in done.stdout.splitlines():
        rank, digest = line.split()
        digests.setdefault(int(rank), []).append(digest)
    return digests


@pytest.fixture(scope="module")
def expected():
    """What two ranks of torchrun get."""
    digests = run(*TORCHRUN, 2, SCRIPT, "torchrun")
    assert digests[0] == digests[1]
    return digests


def test_torchrun(expected):
    assert sorted(expected) == [0, 1]


def test_pc_052_torchrun_with_one_process():
    ((compressed, plain),) = run(*TORCHRUN, 1, SCRIPT, "both").values()
    assert compressed == plain


@pytest.mark.parametrize("interfaces", ["lo", "lo,lo"])
def test_interfaces_by_environment(expected, interfaces):
    assert run(*TORCHRUN, 2, SCRIPT, "torchrun", GLOO_SOCKET_IFNAME=interfaces) == expected


def test_pc_050_forked_ranks_with_forked_data_loaders(expected, tmp_path):
    assert run(SCRIPT, "fork", tmp_path) == expected


def test_pc_051_state_travels_through_spawn(expected, tmp_path):
    assert run(SCRIPT, "spawn", tmp_path) == expected


def test_pc_051_state_travels_through_elastic_launch(expected):
    assert run(SCRIPT, "elastic") == expected
