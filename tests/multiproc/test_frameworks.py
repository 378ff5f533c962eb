"""Lightning, Fabric, Accelerate, the Trainer and torch.compile: by attach and by the launcher."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "frameworks.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PYTHON = (sys.executable,)
RUN = ("-m", "agentcomm", "run")

# How each is started, and the package that it needs.
FRAMEWORKS = {
    "lightning": (PYTHON, "lightning"),
    "fabric": (PYTHON, "lightning"),
    "accelerate": (TORCHRUN, "accelerate"),
    "trainer": (TORCHRUN, "transformers"),
}


def start(*command):
    """Return what each rank said, and stderr."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=200, check=False, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr
    words = [line.split() for line in done.stdout.splitlines()]
    said = {int(line[0]): line[1] for line in words if len(line) == 2 and line[0] in ("0", "1")}
    assert set(said) == {0, 1}, done.stdout + done.stderr
    return said, done.stderr


def needs(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}: pip install 'agentcomm[frameworks]'")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_framework(name, tmp_path):
    launch, package = FRAMEWORKS[name]
    needs(package)
    dense, _ = start(*launch, SCRIPT, name)
    raw, _ = start(*launch, *RUN, "--codec", "raw", SCRIPT, name)
    assert raw == dense  # the launcher changes nothing but how gradients travel

    report = tmp_path / "report.json"
    by_launcher, _ = start(*launch, *RUN, "--codec", "int8", "--report", report, SCRIPT, name)
    by_attach, _ = start(*launch, SCRIPT, name, "int8")
    assert by_launcher == by_attach
    assert by_launcher[0] == by_launcher[1] != dense[0]
    ranks = json.loads(report.read_text())["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    for rank in ranks:
        (model,) = rank["models"]
        assert model["stats"]["rounds"] >= 8
        assert model["stats"]["ratio"] > 2.5


@pytest.mark.parametrize("mode", ["ddp_optimizer", "no", "python_reducer"])
def test_compiled(mode):
    dense, _ = start(*TORCHRUN, SCRIPT, "compiled", "", mode)
    raw, _ = start(*TORCHRUN, *RUN, "--codec", "raw", SCRIPT, "compiled", "", mode)
    assert raw == dense
    by_launcher, said = start(*TORCHRUN, *RUN, "--codec", "int8", SCRIPT, "compiled", "", mode)
    by_attach, _ = start(*TORCHRUN, SCRIPT, "compiled", "int8", mode)
    assert by_launcher == by_attach
    assert by_launcher[0] == by_launcher[1] != dense[0]
    assert "int8" in said
