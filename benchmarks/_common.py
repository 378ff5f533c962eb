"""What the benchmarks share: starting the ranks, describing the machine, statistics, checks.

A benchmark is one script for both roles. Started by a user it is the *launcher*: it starts itself
once per rank, through ``netlab.sh`` (network namespaces, shaped links) or as plain processes on
127.0.0.1, and supervises the ranks. Started with ``RANK`` in the environment it is a *rank*; that
also makes it usable under torchrun.
"""

import argparse
import datetime
import faulthandler
import gc
import hashlib
import itertools
import json
import os
import platform
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
NETLAB = HERE / "netlab.sh"

# Set by the launcher for its ranks: the link they really run on.
LINK_VARIABLE = "AGENTCOMM_BENCH_LINK"
GRACE_S = 5  # what the other ranks get to report what they saw, once one has failed

_RATE = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<prefix>[kmgt]?)bit")
_RATE_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


# -- command line ----------------------------------------------------------------------------------


def link(text: str) -> str:
    """Parse a ``--link`` argument: ``loopback``, ``none`` or a rate in tc's words."""
    if text not in ("loopback", "none") and not _RATE.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"'{text}' is no link: expected loopback, none, or a rate like 1gbit or 100mbit"
        )
    return text


def chunk_nbytes(text: str) -> int | str:
    """Parse a ``--chunk-nbytes`` argument: ``auto`` or a number of dense bytes."""
    return text if text == "auto" else positive(text)


def positive(text: str) -> int:
    """Parse an integer above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above 0")
    return number


def _writable_path(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.parent}")
    return path


def argument_parser(description: str | None, *, link_default: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--link",
        type=link,
        default=link_default,
        help="loopback (processes on 127.0.0.1), none (veth pairs, unshaped) or a rate like 1gbit "
        "(veth pairs, shaped); all but loopback need root and iproute2",
    )
    parser.add_argument("--nranks", type=positive, default=2, help="number of ranks")
    parser.add_argument(
        "--timeout-s", type=positive, default=600, help="bound on the whole run, in seconds"
    )
    parser.add_argument(
        "--json", type=_writable_path, metavar="FILE", help="write all samples to FILE"
    )
    return parser


def add_turn_arguments(parser: argparse.ArgumentParser, *, turns: int, steps: int) -> None:
    """Add the options of benchmarks that call ``take_turn``, with these defaults."""
    parser.add_argument("--turns", type=positive, default=turns, help="turns of each mode")
    parser.add_argument("--steps", type=positive, default=steps, help="measured steps in a turn")
    parser.add_argument(
        "--warmup-steps", type=positive, default=1, help="steps before them that are discarded"
    )


def add_settle_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option of benchmarks in which agentcomm searches for its chunk size."""
    parser.add_argument(
        "--settle",
        type=int,
        default=100,
        metavar="STEPS",
        help="steps of each agentcomm mode before anything is measured: the search for the chunk "
        "size takes up to 100 (with a fixed size none are needed)",
    )


def describe_turns(args: argparse.Namespace) -> str:
    """Say what the options of ``add_turn_arguments`` mean."""
    return f"{args.turns} turns of {args.warmup_steps} warm-up and {args.steps} measured steps"


def line_rate_bps(link_name: str) -> float | None:
    """Return the rate of a link in bit/s, None where nothing limits it."""
    match = _RATE.fullmatch(link_name)
    return float(match["number"]) * _RATE_PREFIX[match["prefix"]] if match else None


# -- ranks -----------------------------------------------------------------------------------------


def main(args: argparse.Namespace, rank_main: Callable[[argparse.Namespace], int]) -> int:
    """Run ``rank_main`` in every rank and return the exit status.

    Args:
        args: the parsed command line, from a parser that ``argument_parser`` made.
        rank_main: called in every rank inside an initialised gloo group; returns an exit status.
    """
    if "RANK" in os.environ:
        _run_rank(args, rank_main)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    command = [sys.executable, *sys.argv]
    if args.link == "loopback":
        return _launch_loopback(command, args.nranks, args.timeout_s)
    return _launch_netlab(command, args.nranks, args.link, args.timeout_s)


def _run_rank(args: argparse.Namespace, rank_main: Callable[[argparse.Namespace], int]) -> NoReturn:
    # A rank that is stuck says where, in all its threads, before the launcher kills it.
    faulthandler.dump_traceback_later(args.timeout_s, exit=True)
    try:
        dist.init_process_group(
            "gloo", timeout=datetime.timedelta(seconds=min(120, args.timeout_s))
        )
        status = rank_main(args)
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        # One write, so that the tracebacks of several ranks do not mix. No clean-up: the group may
        # wait for a rank that is gone.
        sys.stdout.flush()
        rank = os.environ["RANK"]
        sys.stderr.write(f"--- rank {rank} failed:\n{traceback.format_exc()}")
        sys.stderr.flush()
        os._exit(1)
    # Not by way of the interpreter's exit: torch 2.13 may abort there ("terminate called without an
    # active exception") when a gloo thread drops the last reference to a tensor.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _launch_netlab(command: list[str], nranks: int, link_name: str, timeout_s: int) -> int:
    # netlab.sh must outlive the ranks' own timeout, and we must outlive netlab.sh, which cleans up.
    netlab_timeout_s = timeout_s + 15
    env = {
        **os.environ,
        LINK_VARIABLE: link_name,
        "NETLAB_TIMEOUT_S": str(netlab_timeout_s),
        "NETLAB_GRACE_S": str(GRACE_S),
    }
    # The addresses of a lab have no names, and c10d warns about each.
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    lab = subprocess.Popen(
        [str(NETLAB), str(nranks), link_name, *command], env=env, start_new_session=True
    )
    try:
        return lab.wait(netlab_timeout_s + GRACE_S + 30)
    finally:
        if lab.poll() is None:
            lab.terminate()
            lab.wait(30)


def _launch_loopback(command: list[str], nranks: int, timeout_s: int) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks: list[subprocess.Popen[bytes]] = []
    first_status = 0
    deadline = time.monotonic() + timeout_s + 15
    try:
        for rank in range(nranks):
            env = {
                **os.environ,
                LINK_VARIABLE: "loopback",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(nranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            }
            ranks.append(subprocess.Popen(command, env=env, start_new_session=True))
        while any(rank.poll() is None for rank in ranks):
            if time.monotonic() > deadline:
                first_status = first_status or 124
                print("killing the ranks that are left", file=sys.stderr)
                break
            if not first_status:
                first_status = next((rank.returncode for rank in ranks if rank.returncode), 0)
                if first_status:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
            time.sleep(0.05)
    finally:
        _kill_sessions(ranks)
    failed = first_status or next((rank.returncode for rank in ranks if rank.returncode), 0)
    return failed if failed >= 0 else 128 - failed


def _kill_sessions(leaders: Iterable[subprocess.Popen[bytes]]) -> None:
    """Kill the leaders that still run, with their children (each leads a session of its own)."""
    for leader in leaders:
        if leader.poll() is None:
            os.killpg(leader.pid, signal.SIGKILL)
            leader.wait()


def gather(value: Any) -> list[Any]:
    """Return every rank's value, in rank order, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# -- environment -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Environment:
    """Where the numbers come from."""

    benchmark: str
    link: str
    nranks: int
    cores: int
    cpu: str
    kernel: str
    python: str
    torch: str
    agentcomm: str
    commit: str
    date: str
    load_average: float
    command: str

    def __str__(self) -> str:
        return (
            f"{self.benchmark}: link {self.link}, {self.nranks} ranks on {self.cores} cores "
            f"({self.cpu})\n"
            f"torch {self.torch}, agentcomm {self.agentcomm}, commit {self.commit}, "
            f"Python {self.python}, Linux {self.kernel}\n"
            f"{self.date}, load average at the start {self.load_average:.2f}\n"
            f"{self.command}"
        )


def environment(benchmark: str, args: argparse.Namespace) -> Environment:
    """Describe this run. If others started the ranks, ``--link`` is what the user says it is."""
    return Environment(
        benchmark=benchmark,
        link=os.environ.get(LINK_VARIABLE, f"external, said to be {args.link}"),
        nranks=dist.get_world_size(),
        cores=len(os.sched_getaffinity(0)),
        cpu=_cpu_model(),
        kernel=platform.release(),
        python=platform.python_version(),
        torch=torch.__version__,
        agentcomm=_agentcomm_version(),
        commit=_commit(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        load_average=os.getloadavg()[0],
        command=" ".join(sys.argv),
    )


def _cpu_model() -> str:
    match = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1] if match else platform.machine()


def _agentcomm_version() -> str:
    try:
        import agentcomm
    except ImportError:
        return "not importable"
    return str(getattr(agentcomm, "__version__", "unknown"))


def _commit() -> str:
    try:
        described = subprocess.run(
            ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return described.stdout.strip() or "unknown"


def link_sent_nbytes() -> int | None:
    """Return what this rank's link has sent so far, headers included; None without a lab.

    The counter sees packets before they are cut to the MTU, so most TCP/IP headers are not in it.
    """
    if os.environ.get(LINK_VARIABLE, "loopback") == "loopback":
        return None  # on 127.0.0.1 one counter holds all ranks
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise RuntimeError(f"interface {interface} is not in /proc/self/net/dev")


# -- turns -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turn:
    """What one mode did in one turn, on one rank."""

    step_s: list[float]  # the measured steps, without the warm-up
    nsteps: int  # all steps, with the warm-up
    counted: dict[str, float]  # what the counters gained, over all steps


def take_turn(
    step: Callable[[], object],
    *,
    nsteps: int,
    nwarmup: int,
    counters: Callable[[], dict[str, float]] = dict,
) -> Turn:
    """Run one turn of a mode between two barriers. A collective.

    Args:
        step: what is measured.
        nsteps: how often, back to back.
        nwarmup: how many steps before those are run and not measured.
        counters: reads counters that only grow; ``link_nbytes`` is added where there is one.
    """

    def count() -> dict[str, float]:
        link_nbytes = link_sent_nbytes()
        return counters() | ({} if link_nbytes is None else {"link_nbytes": link_nbytes})

    gc.collect()
    before = count()
    dist.barrier()
    gc.disable()
    times_s = [time.perf_counter()]
    for _ in range(nwarmup + nsteps):
        step()
        times_s.append(time.perf_counter())
    gc.enable()
    dist.barrier()
    after = count()
    step_s = [end - start for start, end in itertools.pairwise(times_s)]
    counted = {name: after[name] - before[name] for name in before}
    return Turn(step_s[nwarmup:], nwarmup + nsteps, counted)


def turn_samples(ranks: Sequence[Sequence[Turn]]) -> list[float]:
    """Return one sample per turn from the turns of all ranks: seconds per step, slowest rank."""
    return [
        max(sum(turn.step_s) / len(turn.step_s) for turn in same_turn)
        for same_turn in zip(*ranks, strict=True)
    ]


def per_step(ranks: Sequence[Sequence[Turn]], counter: str) -> float | None:
    """Return the mean of one counter per step, over all turns and ranks; None if not counted."""
    turns = [turn for rank_turns in ranks for turn in rank_turns]
    if any(counter not in turn.counted for turn in turns):
        return None
    return sum(turn.counted[counter] for turn in turns) / sum(turn.nsteps for turn in turns)


# -- statistics ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Summary:
    """Median, quartiles and minimum of samples."""

    median: float
    q1: float
    q3: float
    min: float
    nsamples: int


def summarise(samples: Sequence[float]) -> Summary:
    """Summarise at least one sample."""
    if len(samples) == 1:
        q1 = q3 = samples[0]
    else:
        q1, _, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return Summary(statistics.median(samples), q1, q3, min(samples), len(samples))


def speedup(baseline: Sequence[float], samples: Sequence[float]) -> Summary:
    """Summarise baseline / sample, pair by pair: above 1 is faster than the baseline.

    The two samples of a pair were taken one after the other, so what slows down the machine for
    longer than that slows down both, and falls out of their ratio.
    """
    return summarise([base / sample for base, sample in zip(baseline, samples, strict=True)])


# -- checks ----------------------------------------------------------------------------------------

# Relative error (L2) that a codec may have in a result that is the mean over a few rounds. For a
# Gaussian block of 256 the absolute maximum is about 2.9 sigma: int8 has a step of 2.9 / 127 sigma
# and an error of step / sqrt(12) = 0.7 %, int4 12 %; two quantisations and a residual that goes in
# and out double that at most; the bounds leave a factor of two.
_RELATIVE_ERROR_MAX = {
    "raw": 1e-6,
    "plain": 1e-6,
    "dense": 1e-6,
    "fp16-hook": 2e-3,
    "dense-fp16": 2e-3,
    "fp16": 2e-3,
    "bf16": 1.6e-2,
    "fp8": 1e-1,
    "int8": 3e-2,
    "int4": 5e-1,
}
# Codecs that leave out most of the gradient (top-k, sign, ...) must at least point its way. Even
# 1 % of the elements chosen at random give 0.1; a wrong result of 10^6 elements gives 0.001.
_COSINE_MIN = 0.02


def check_result(name: str, result: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise RuntimeError on every rank unless ``result`` is right. A collective.

    Args:
        name: the mode or spec that made the result.
        result: what this rank got: equal on all ranks, bit for bit.
        expected: the exact result: equal to ``result`` within what the codec may lose.
    """
    digest = hashlib.sha256(result.numpy().tobytes()).hexdigest()
    codec = re.split(r"[\[:]", name)[0]
    norm = expected.norm().item()
    problem = None
    if codec in _RELATIVE_ERROR_MAX and "+" not in name:
        error = (result - expected).norm().item() / norm
        bound = _RELATIVE_ERROR_MAX[codec]
        if not error <= bound:  # a NaN is no pass
            problem = f"relative error {error:.3g}, more than {bound:.3g}"
    else:
        cosine = torch.dot(result, expected).item() / (result.norm().item() * norm + 1e-30)
        if not cosine >= _COSINE_MIN:
            problem = f"cosine to the exact result {cosine:.3g}, less than {_COSINE_MIN}"
    answers = gather((digest, problem))
    problems = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text]
    if len({answer for answer, _ in answers}) != 1:
        problems.append("the ranks have different bits")
    if problems:
        raise RuntimeError(f"{name} gives a wrong result: " + "; ".join(problems))


# -- output ----------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out rows as text: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = []
    for row in (header, ["-" * width for width in widths], *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def number(value: float | None, format_spec: str, *, scale: float = 1.0) -> str:
    """Format ``value / scale``, where the value may be missing."""
    return "-" if value is None else format(value / scale, format_spec)


MILLISECONDS_HEADER = ["median ms", "IQR ms", "min ms"]


def milliseconds(seconds: dict[str, Any]) -> list[str]:
    """Format a Summary, as a dict, for the columns of ``MILLISECONDS_HEADER``."""
    values = (seconds["median"], seconds["q3"] - seconds["q1"], seconds["min"])
    return [f"{value * 1e3:.1f}" for value in values]


def write_json(args: argparse.Namespace, env: Environment, results: list[dict[str, Any]]) -> None:
    """Write a results file that ``compare.py`` reads, if ``--json`` was given."""
    if args.json is None:
        return
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "timeout_s")}
    document = {
        "schema": 1,
        "environment": asdict(env),
        "settings": settings,
        "results": results,
    }
    args.json.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {args.json}")
