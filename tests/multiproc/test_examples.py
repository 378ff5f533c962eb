"""The examples, each as its first lines say to run it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NLINES_MAX = 100
LARGER = {"char_gpt.py", "demo.py"}  # the demo, which make runs
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(*command):
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=150, check=False,
        cwd=EXAMPLES.parent, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "terminate called" not in done.stderr
    return done


def last_loss(text):
    return float(re.findall(r"loss +([\d.]+)", text)[-1])


def test_examples_are_short():
    for path in EXAMPLES.iterdir():
        if path.suffix in (".py", ".sh") and path.name not in LARGER:
            assert len(path.read_text().splitlines()) < NLINES_MAX, path.name


@pytest.mark.parametrize("spec", ["int8", "topk:0.1"])
def test_spawn_regression(spec):
    done = run(sys.executable, EXAMPLES / "spawn_regression.py", spec)
    assert last_loss(done.stdout) < 0.05
    assert "residual norm" in done.stdout


def test_comm_hook():
    done = run(sys.executable, *TORCHRUN, EXAMPLES / "comm_hook.py")
    assert last_loss(done.stdout) < 0.1
    assert float(done.stdout.split()[-4]) > 5


def test_fp16_drop_in():
    lines = run(sys.executable, *TORCHRUN, EXAMPLES / "fp16_drop_in.py").stdout.splitlines()
    losses = [float(line.split()[-1]) for line in lines]
    assert len(losses) == 3
    assert max(losses) < 1.1 * min(losses)


def test_gradient_accumulation():
    done = run(sys.executable, *TORCHRUN, EXAMPLES / "gradient_accumulation.py")
    assert "100 rounds for 400 backward passes" in done.stdout
    assert last_loss(done.stdout) < 1.0


def test_unchanged():
    command = (*TORCHRUN, "-m", "agentcomm", "run", "--codec", "int8", EXAMPLES / "unchanged.py")
    done = run(sys.executable, *command)
    assert last_loss(done.stdout) < 1.5
    assert "Sequential, 38,410 parameters: int8, 64 rounds" in done.stderr


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and iproute2: namespaces"
)
def test_two_nodes():
    done = run("bash", EXAMPLES / "two_nodes.sh", "none")
    assert last_loss(done.stdout) < 1.5
    assert "of 2 had one DDP model" in done.stderr


def test_lightning_fit():
    pytest.importorskip("lightning")
    done = run(sys.executable, EXAMPLES / "lightning_fit.py")
    assert last_loss(done.stdout) < 1.5
    assert "3.7" in done.stdout.splitlines()[-1]


def test_accelerate_loop():
    pytest.importorskip("accelerate")
    done = run(sys.executable, *TORCHRUN, EXAMPLES / "accelerate_loop.py")
    assert last_loss(done.stdout) < 1.5
    assert done.stdout.splitlines()[-1].startswith("64 rounds, 3.")
