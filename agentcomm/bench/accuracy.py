"""Train small models with plain DDP and with every codec, and compare what they reach.

Two processes of this machine train over gloo: gpt, a byte-level GPT of 0.5 M parameters on the
source text of the standard library, and digits, a perceptron on scikit-learn's digits. For each
seed all modes have the same data, first weights, batches and optimizer; what differs is how
gradients travel. Sparse codecs have a ramp over two fifths of the steps, ternary and sign a tenth
of dense rounds first, as docs/codecs.md advises. The table, as text and in DIR/accuracy.md, and the
plot DIR/accuracy.png set the final validation loss or test accuracy against the bytes that a rank
has sent; DIR/accuracy.json has every run with its training loss.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from agentcomm.bench._ranks import PLAIN, Job, Outcome, run_job
from agentcomm.bench._report import compare, markdown, plot, text_tables
from agentcomm.bench._shared import (
    all_specs,
    environment,
    file_path,
    header,
    positive,
    progress,
    require,
    settings,
    spec_text,
    write_json,
    write_text,
)
from agentcomm.bench._tasks import TASKS

OUT_DEFAULT = Path("bench_out")
NRANKS_MAX = 16  # digits has no more images for one step


def _nranks(text: str) -> int:
    number = positive(text)
    if not 2 <= number <= NRANKS_MAX:
        raise argparse.ArgumentTypeError(f"{number} is out of range; it must be in 2..{NRANKS_MAX}")
    return number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``agentcomm bench accuracy``."""
    parser.add_argument(
        "--out", type=Path, default=OUT_DEFAULT, metavar="DIR",
        help=f"folder of the results (default: {OUT_DEFAULT})",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=file_path, metavar="FILE", help="instead of DIR/accuracy.json"
    )
    parser.add_argument(
        "--task", choices=TASKS, nargs="+", default=list(TASKS), help="(default: both)"
    )
    parser.add_argument("--seeds", type=positive, default=3, metavar="N", help="(default: 3)")
    parser.add_argument(
        "--spec", type=spec_text, nargs="+", metavar="SPEC",
        help="codecs beside plain DDP (default: all but the lossless)",
    )  # fmt: skip
    defaults = ", ".join(f"{task.nsteps_default} for {name}" for name, task in TASKS.items())
    parser.add_argument(
        "--nsteps", type=positive, metavar="N", help=f"of every run (default: {defaults})"
    )
    parser.add_argument("--nranks", type=_nranks, default=2, metavar="N", help="(default: 2)")
    parser.add_argument(
        "--timeout-s", type=positive, default=900, metavar="S", help="for one run (default: 900)"
    )


def _record(outcome: Outcome, job: Job) -> dict[str, Any]:
    """Return one run for the results file."""
    run: dict[str, Any] = {"task": job.task, "seed": job.seed, "mode": outcome.mode}
    run |= {"nsteps": job.nsteps, "error": outcome.error or None}
    if outcome.error:
        return run
    by_rank = outcome.results
    for key in ("sent_nbytes", "dense_nbytes"):
        run[key] = sum(result[key] for result in by_rank) / len(by_rank)
    run["sent_nbytes_by_rank"] = [result["sent_nbytes"] for result in by_rank]
    for key in ("final", "nparameters", "train_s", "step_s_median", "train_loss"):
        run[key] = by_rank[0][key]
    return run


def _line(run: dict[str, Any], took_s: float) -> str:
    where = f"{run['task']}, seed {run['seed']}, {run['mode']}"
    if run["error"]:
        return f"{where}: FAILED\n{run['error']}"
    final = ", ".join(f"{metric} {value:.4f}" for metric, value in run["final"].items())
    return (
        f"{where}: {final}, {run['sent_nbytes'] / 1e6:.2f} MB sent per "
        f"rank, {1e3 * run['step_s_median']:.0f} ms per step, {took_s:.0f} s"
    )


def _show_step(bar: Any, job: Job, nbefore: int, mode: str, nsteps: int, loss: float) -> None:
    """Move the bar: ``nbefore`` steps were done when the job began."""
    bar.set_description(f"{job.task}, seed {job.seed}, {mode}", refresh=False)
    bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
    bar.update(nbefore + job.modes.index(mode) * job.nsteps + nsteps - bar.n)


def run(args: argparse.Namespace) -> int:
    """Run ``agentcomm bench accuracy``.

    Returns:
        0, or 1 if a run failed.

    Raises:
        BenchError: a module of the extra ``bench`` is missing.
    """
    for module in ("tqdm", "matplotlib", *(["sklearn"] if "digits" in args.task else [])):
        require(module)
    args.out.mkdir(parents=True, exist_ok=True)
    json_path = args.json or args.out / "accuracy.json"
    modes = (PLAIN, *dict.fromkeys(args.spec or all_specs(lossless=False)))
    env = environment("accuracy", link="loopback", nranks=args.nranks)
    print(header(env))
    jobs = [
        Job(
            name,
            seed,
            modes,
            args.nsteps or TASKS[name].nsteps_default,
            args.nranks,
            args.timeout_s,
        )
        for name in dict.fromkeys(args.task)
        for seed in range(1, args.seeds + 1)
    ]
    document = {"schema": 1, "environment": env, "settings": settings(args)}
    runs: list[dict[str, Any]] = []
    with progress(sum(job.nsteps * len(modes) for job in jobs), "step") as bar:
        for job in jobs:
            nbefore = bar.n
            start = time.monotonic()
            for outcome in run_job(job, partial(_show_step, bar, job, nbefore)):
                runs.append(_record(outcome, job))
                now = time.monotonic()
                nbefore_next = nbefore + job.nsteps * (modes.index(outcome.mode) + 1)
                bar.update(nbefore_next - bar.n)
                bar.write(_line(runs[-1], now - start), file=sys.stderr)
                start = now
                rows = compare(runs, modes)
                write_json(json_path, document | {"results": rows, "runs": runs})
    print("\n" + text_tables(rows, runs))
    write_text(args.out / "accuracy.md", markdown(rows, runs, env))
    plot(rows, args.out / "accuracy.png")
    print(f"\nwrote {json_path}, {args.out / 'accuracy.md'} and {args.out / 'accuracy.png'}")
    return int(any(run["error"] for run in runs))
