"""``agentcomm run`` on training scripts that know nothing of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "plain_ddp.py"
PLAIN = (sys.executable,)
LAUNCHED = (sys.executable, "-m", "agentcomm", "run")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCH = (sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2")
AGENTCOMM = ("-m", "agentcomm", "run")
TIMEOUT_S = 100


def start(*command, returncode=0, **env):
    """Return the finished process and {rank: what it said}."""
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
    )  # fmt: skip
    assert done.returncode == returncode, done.stdout + done.stderr
    assert "terminate called" not in done.stderr, done.stderr
    said = {}
    for line in done.stdout.splitlines():
        rank, text = line.split(maxsplit=1)
        said.setdefault(int(rank), []).append(text)
    return done, said


def spawn(folder, what, *args, options=("--codec", "int8"), how="spawn", **env):
    """Run the script's ``what`` under the launcher: the process, what ranks said, the report."""
    report = folder / "report.json"
    options = (*options, "--report", report)
    done, said = start(*LAUNCHED, *options, SCRIPT, how, folder, what, *args, **env)
    return done, said, json.loads(report.read_text()) if report.exists() else None


def models(report):
    """Return every rank's models."""
    return [rank["models"] for rank in report["ranks"]]


@pytest.fixture(scope="module")
def plain():
    """The digest of the model under python, dense."""
    _, said = start(*TORCHRUN, SCRIPT, "env", "one_model")
    assert said[0] == said[1]
    return said[0]


@pytest.fixture(scope="module")
def compressed():
    """The digest of the model under the launcher, with int8."""
    _, said = start(*TORCHRUN, *AGENTCOMM, "--codec", "int8", SCRIPT, "env", "one_model")
    assert said[0] == said[1]
    return said[0]


def test_int8_is_not_dense(plain, compressed):
    assert compressed != plain


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_started_by_the_script(how, tmp_path, plain, compressed):
    done, said, report = spawn(tmp_path, "one_model", how=how)
    assert said == {0: compressed, 1: compressed}
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert all(rank["finished"] for rank in report["ranks"])
    for (model,) in models(report):
        assert (model["name"], model["codec"], model["hook"]) == ("Sequential", "int8", "agentcomm")
        assert model["stats"]["rounds"] == 6
        assert 0 < model["stats"]["wire_nbytes"] < model["stats"]["dense_nbytes"]
    assert "agentcomm: rank 0 of 2 had one DDP model; the report has ranks 0, 1" in done.stderr
    assert "int8, 6 rounds" in done.stderr


def test_raw_equals_plain_ddp(tmp_path, plain):
    _, said, _ = spawn(tmp_path, "one_model", options=("--codec", "raw"))
    assert said == {0: plain, 1: plain}


@pytest.mark.parametrize("launch", [TORCHRUN, LAUNCH], ids=["torchrun", "torch.distributed.launch"])
def test_started_by_torch(launch, tmp_path, compressed):
    report = tmp_path / "r.json"
    report.write_text("what an earlier run has left")
    done, said = start(
        *launch, *AGENTCOMM, "--codec", "int8", "--report", report, SCRIPT, "env", "one_model",
        MASTER_PORT="0",
    )  # fmt: skip
    assert said == {0: compressed, 1: compressed}
    assert [rank["rank"] for rank in json.loads(report.read_text())["ranks"]] == [0, 1]
    assert done.stderr.count("had one DDP model") == 1  # rank 0 alone


def test_the_launcher_around_torchrun(compressed):
    module = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done, said = start(*LAUNCHED, *module, SCRIPT, "env", "one_model")
    assert said == {0: compressed, 1: compressed}
    assert "one DDP model; the report has ranks 0, 1" in done.stderr


def test_two_models(tmp_path):
    rules = '{"0.*": "raw"}'
    _, said, report = spawn(tmp_path, "two_models", options=("--rules", rules))
    assert said[0] == said[1]
    for first, second in models(report):
        assert (first["nparameters"], second["nparameters"]) == (1348, 676)
        assert first["stats"]["rounds"] == second["stats"]["rounds"] == 3


def test_a_model_that_is_gone_is_in_the_report(tmp_path, compressed):
    _, said, report = spawn(tmp_path, "deleted_model")
    assert said[0] == compressed
    assert [model["stats"]["rounds"] for (model,) in models(report)] == [6, 6]


def test_a_model_that_lives_until_the_end_is_in_the_report(tmp_path):
    report = tmp_path / "r.json"
    done, _ = start(*TORCHRUN, *AGENTCOMM, "--report", report, SCRIPT, "env", "kept_to_the_end")
    assert "Traceback" not in done.stderr
    for (model,) in models(json.loads(report.read_text())):
        assert (model["codec"], model["stats"]["rounds"]) == ("fp16", 6)


def test_a_copy_is_not_silently_dense(tmp_path):
    done, _ = start(
        *TORCHRUN, *AGENTCOMM, SCRIPT, "env", "copied", TMPDIR=str(tmp_path), AGENTCOMM_LOG="info"
    )
    assert done.stderr.count("copied or unpickled DistributedDataParallel of Sequential") == 1
    assert "no accelerator" not in done.stderr
    assert not list(tmp_path.glob("agentcomm-*"))  # no rank's part is left behind


def test_a_process_that_is_killed_is_in_the_report(tmp_path):
    _, _, report = spawn(tmp_path, "killed")
    assert [rank["finished"] for rank in report["ranks"]] == [False, False]
    assert all(model["stats"]["rounds"] for (model,) in models(report))


@pytest.mark.parametrize(
    ("name", "codec"),
    [("allreduce_hook", "raw"), ("fp16_compress_hook", "fp16"), ("bf16_compress_hook", "bf16")],
)
def test_torchs_hooks_become_ours(name, codec, tmp_path, plain):
    done, said, report = spawn(tmp_path, "hook_of_torch", name, options=("--codec", "int4"))
    assert said[0] == said[1]
    assert (said[0] == plain) == (codec == "raw")
    assert [model["codec"] for (model,) in models(report)] == [codec, codec]
    assert done.stderr.count(f"torch's {name} is replaced by agentcomm's codec {codec}") == 1


def test_a_built_in_hook_becomes_ours(tmp_path):
    _, said, report = spawn(tmp_path, "built_in_hook")
    assert [model["codec"] for (model,) in models(report)] == ["fp16", "fp16"]
    assert said[0] == said[1]


def test_a_hook_of_the_script_stays(tmp_path, plain):
    done, said, report = spawn(tmp_path, "hook_of_script")
    assert said[0] == said[1] == [f"{plain[0]} 6 own_hook"]
    for (model,) in models(report):
        assert model["hook"] == "the script's own_hook"
        assert not model["stats"] or not model["stats"]["rounds"]
    assert done.stderr.count("has a hook of the script's, own_hook: it stays") == 1


@pytest.mark.parametrize("first", ["own", "torch"])
def test_registering_twice_fails_as_under_plain_ddp(first, tmp_path):
    _, said, _ = spawn(tmp_path, "two_hooks", first)
    (tmp_path / "store").unlink(missing_ok=True)
    _, expected = start(*PLAIN, SCRIPT, "spawn", tmp_path, "two_hooks", first)
    assert "can only be called once" in expected[0][0]
    assert said == expected


def test_a_wrong_hook_fails_as_under_plain_ddp(tmp_path):
    _, said, _ = spawn(tmp_path, "wrong_hook")
    assert said[0] == ["Communication hook must be callable."]


def test_mixed_precision_of_ddp_stays(tmp_path):
    done, _, report = spawn(tmp_path, "mixed_precision")
    assert [model["codec"] for (model,) in models(report)] == ["dense", "dense"]
    assert "stays with torch's own exchange" in done.stderr


def test_a_script_for_gpus_runs_on_the_cpu(plain, tmp_path):
    report = tmp_path / "r.json"
    done, said = start(
        *TORCHRUN, *AGENTCOMM, "--codec", "raw", "--report", report, SCRIPT, "env", "gpu_script"
    )
    assert said == {0: plain, 1: plain}
    assert done.stderr.count("there is no accelerator: cuda means the CPU here") == 1


def test_device_cuda_leaves_everything_alone():
    done, _ = start(
        *TORCHRUN, *AGENTCOMM, "--device", "cuda", SCRIPT, "env", "gpu_script", returncode=1
    )
    assert "cuda means the CPU" not in done.stderr


def test_no_ddp():
    done, said = start(*TORCHRUN, *AGENTCOMM, SCRIPT, "env", "no_ddp")
    assert said == {0: ["[2, 2, 2]"], 1: ["[2, 2, 2]"]}
    assert done.stderr.count("no DistributedDataParallel was built") == 1


def test_fsdp_is_not_silently_dense(tmp_path):
    done, _, report = spawn(tmp_path, "sharded")
    for name in ("FullyShardedDataParallel", "fully_shard"):
        assert done.stderr.count(f"{name} exchanges its gradients itself: not supported yet") == 1
        assert any(name in notice for notice in report["ranks"][0]["notices"])


def test_rules_that_match_nothing_end_the_script(tmp_path):
    rules = '{"0.weights": "raw"}'
    done, _ = start(
        *LAUNCHED, "--rules", rules, SCRIPT, "spawn", tmp_path, "one_model", returncode=1
    )
    assert "pattern '0.weights' in --rules matches no parameter" in done.stderr
    assert "did you mean '0.weight'" in done.stderr
