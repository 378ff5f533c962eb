"""``agentcomm bench accuracy``: short runs over real ranks, and ranks that fail."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest

from agentcomm.bench._ranks import Job, run_job
from agentcomm.bench._tasks import TASKS

pytest.importorskip("sklearn")


def bench(*words):
    return subprocess.run(
        [sys.executable, "-m", "agentcomm", "bench", "accuracy", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def ignore_step(mode, nsteps, loss):
    pass


def test_digits(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    words = "--task digits --seeds 1 --nsteps 5 --spec int8 --timeout-s 90 --out".split()
    done = bench(*words, tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "accuracy.json").read_text())
    assert sorted(document) == ["environment", "results", "runs", "schema", "settings"]
    plain, int8 = document["runs"]
    assert (plain["mode"], int8["mode"]) == ("plain", "int8")
    for run in (plain, int8):
        assert run["error"] is None
        assert (run["task"], run["seed"], run["nsteps"]) == ("digits", 1, 5)
        assert len(run["train_loss"]) == 5
        assert list(run["final"]) == list(TASKS["digits"].metrics)
        assert run["sent_nbytes"] == sum(run["sent_nbytes_by_rank"]) / 2
    # Before the first update nothing depends on the mode.
    assert plain["train_loss"][0] == int8["train_loss"][0]
    assert plain["sent_nbytes"] == plain["dense_nbytes"] == 5 * 4 * plain["nparameters"]
    assert int8["dense_nbytes"] == plain["dense_nbytes"]
    # A byte and 1/64 for an element of four; biases, 0.6 % of the elements, go raw, and so does
    # the header of every message, of which there are few.
    assert 3.7 < plain["sent_nbytes"] / int8["sent_nbytes"] < 4
    by_mode = {row["mode"]: row for row in document["results"]}
    for metric in TASKS["digits"].metrics:
        expected = int8["final"][metric] - plain["final"][metric]
        assert by_mode["int8"]["minus_plain"][metric] == {"mean": expected, "std": None}
    assert "int8" in done.stdout
    assert "| int8 | 1 |" in (tmp_path / "accuracy.md").read_text()
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_spec_that_does_not_parse_starts_nothing(tmp_path):
    done = bench("--task", "digits", "--spec", "int8", "int9", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "'int9' in spec 'int9' is no codec" in done.stderr
    assert not (tmp_path / "out").exists()


def test_failure_of_one_mode_leaves_the_others():
    """Every rank is heard, and the modes after it run."""
    job = Job("digits", 1, ("int8", "no-such-codec", "int4"), nsteps=3, nranks=2, timeout_s=90)
    int8, wrong, int4 = run_job(job, ignore_step)
    assert (int8.error, int4.error) == ("", "")
    assert len(int8.results) == len(int4.results) == 2
    assert wrong.results == ()
    for rank in range(2):
        assert f"rank {rank}: Traceback" in wrong.error
    assert wrong.error.count("SpecError: 'no-such-codec'") == 2


def test_rank_that_dies_is_named():
    def kill_a_rank(mode, nsteps, loss):
        # The last one to be started; those of other tests have lower numbers.
        children = multiprocessing.active_children()
        rank_1 = max(children, key=lambda process: int(process.name.rpartition("-")[2]))
        os.kill(rank_1.pid, signal.SIGKILL)

    job = Job("digits", 1, ("int8",), nsteps=2000, nranks=2, timeout_s=90)
    (outcome,) = run_job(job, kill_a_rank)
    assert "rank 0: Traceback" in outcome.error
    assert "rank 1 is gone" in outcome.error
    assert "rank 1: the process ended with exit code -9" in outcome.error


def test_seed_decides_everything():
    """Two runs of a mode are equal to the bit, whatever was trained before in the processes."""
    job = Job("digits", 3, ("int8", "plain", "int8"), nsteps=4, nranks=2, timeout_s=90)
    first, plain, again = run_job(job, ignore_step)
    assert first.results[0]["train_loss"] == again.results[0]["train_loss"]
    assert first.results[0]["final"] == again.results[0]["final"]
    assert first.results[0]["train_loss"] != plain.results[0]["train_loss"]
