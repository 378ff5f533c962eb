"""The ranks of ``agentcomm bench accuracy``: processes on 127.0.0.1 that train mode after mode.

A failure ends its processes, since what is left of a process group then is nothing to train with;
the modes that remain get new ones.
"""

import faulthandler
import hashlib
import multiprocessing
import os
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import agentcomm
from agentcomm.bench._tasks import TASKS, Task
from agentcomm.specs import Codec, Sign, SparseCodec, Ternary, parse

PLAIN = "plain"  # DDP without a hook; every other mode is a spec
REPORT_NSTEPS = 10
GROUP_TIMEOUT_S = 120.0  # at most: less than a mode may take, so that the ranks say what is wrong
GRACE_S = 10.0  # what the other ranks get to say what they saw, once one has failed
STACKS_S = 1.0  # what a rank gets to print its stacks
GRADIENT_NORM_MAX = 1.0
# Shares of a training: what sparse codecs take to come down to their fraction, and what goes dense
# before codecs of less than two bits.
RAMP_FRAC, DENSE_FRAC = 0.4, 0.1
_spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Job:
    """Modes to train one after the other, from the same start and on the same batches.

    Attributes:
        task: name of the task.
        seed: of weights, data and batches.
        modes: "plain" or specs.
        nsteps: of each mode.
        nranks: number of processes.
        timeout_s: for one mode.
    """

    task: str
    seed: int
    modes: tuple[str, ...]
    nsteps: int
    nranks: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a mode.

    Attributes:
        mode: "plain" or a spec.
        results: what ``_train`` returned, by rank; empty if the mode failed.
        error: "" or what each rank says of the failure.
    """

    mode: str
    results: tuple[dict[str, Any], ...]
    error: str


def run_job(job: Job, on_step: Callable[[str, int, float], None]) -> Iterator[Outcome]:
    """Train every mode of a job; yields each outcome when it is there.

    Args:
        job: what to train.
        on_step: called now and then with the mode, the number of steps done and rank 0's loss.
    """
    modes = job.modes
    while modes:
        for outcome in _until_failure(replace(job, modes=modes), on_step):
            modes = modes[1:]
            yield outcome


# ---- the launcher --------------------------------------------------------------------------------


@contextmanager
def _processes(job: Job) -> Iterator[list[tuple[Any, Connection]]]:
    """Start the ranks; yields their processes and connections, and ends them all."""
    # The store lives here, at a port of the system's choice, and outlives every rank.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: list[tuple[Any, Connection]] = []
    try:
        for rank in range(job.nranks):
            ours, theirs = _spawn.Pipe()
            arguments = (job, rank, store.port, theirs)
            process = _spawn.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        yield ranks
    finally:
        for process, connection in ranks:
            process.kill()
            process.join()
            connection.close()


def _until_failure(job: Job, on_step: Callable[[str, int, float], None]) -> Iterator[Outcome]:
    with _processes(job) as ranks:
        for mode in job.modes:
            outcome = _await_mode(job, mode, ranks, on_step)
            yield outcome
            if outcome.error:
                return


def _await_mode(
    job: Job,
    mode: str,
    ranks: Sequence[tuple[Any, Connection]],
    on_step: Callable[[str, int, float], None],
) -> Outcome:
    """Wait until every rank has answered for a mode, or has no time left to."""
    results: dict[int, dict[str, Any]] = {}
    errors: dict[int, str] = {}
    deadline = time.monotonic() + job.timeout_s
    while missing := [rank for rank in range(job.nranks) if rank not in {*results, *errors}]:
        connections = {ranks[rank][1]: rank for rank in missing}
        ready = wait(list(connections), max(deadline - time.monotonic(), 0))
        if not ready:
            errors |= _give_up(missing, ranks, f"no answer for {mode} in time")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = connections[connection]
            try:
                kind, value = connection.recv()
            except (EOFError, ConnectionResetError):
                ranks[rank][0].join(GRACE_S)
                kind = "error"
                value = f"the process ended with exit code {ranks[rank][0].exitcode}"
            if kind == "step":
                on_step(mode, *value)
            elif kind == "result":
                results[rank] = value
            else:
                errors[rank] = value
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if not errors:
        return Outcome(mode, tuple(results[rank] for rank in range(job.nranks)), "")
    said = (f"rank {rank}: {errors.get(rank, 'finished')}" for rank in range(job.nranks))
    return Outcome(mode, (), "\n".join(said))


def _give_up(
    missing: Sequence[int], ranks: Sequence[tuple[Any, Connection]], reason: str
) -> dict[int, str]:
    """Let silent ranks print their stacks on stderr; return what to say of them."""
    for rank in missing:
        if ranks[rank][0].is_alive():
            os.kill(ranks[rank][0].pid, signal.SIGUSR1)
    time.sleep(STACKS_S)
    return dict.fromkeys(missing, f"{reason}; its stacks are on stderr")


def advised(spec: str, nsteps: int) -> tuple[Codec, dict[str, Any]]:
    """Return a codec and the options of ``attach`` that docs/codecs.md advises for a training.

    Args:
        spec: as it was asked for; a ramp that it has stays.
        nsteps: of the training.
    """
    codec = parse(spec)
    if isinstance(codec, SparseCodec):
        return (codec if codec.ramp else replace(codec, ramp=int(RAMP_FRAC * nsteps))), {}
    if isinstance(codec, Sign | Ternary):
        return codec, {"warmup_nrounds": int(DENSE_FRAC * nsteps)}
    return codec, {}


# ---- in the ranks' processes ---------------------------------------------------------------------


def _serve(job: Job, rank: int, port: int, connection: Connection) -> None:
    """Be one rank: send a result per mode, or an error, and end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher ends its ranks
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        timeout = timedelta(seconds=min(GROUP_TIMEOUT_S, job.timeout_s / 2))
        store = TCPStore("127.0.0.1", port, timeout=timeout)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=job.nranks, timeout=timeout
        )
        task = TASKS[job.task](job.seed)
        for mode in job.modes:
            connection.send(("result", _train(task, mode, job.nsteps, connection)))
        dist.barrier()  # nobody leaves while another still sends
    except BaseException:
        connection.send(("error", traceback.format_exc()))
        os._exit(1)  # at once: the other ranks see it by their connections
    dist.destroy_process_group()


def _train(task: Task, mode: str, nsteps: int, connection: Connection) -> dict[str, Any]:
    """Train one mode and return what this rank measured."""
    rank, nranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(task.seed)
    model = task.model()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = task.optimizer(ddp.parameters())
    handle = None
    if mode != PLAIN:
        codec, options = advised(mode, nsteps)
        handle = agentcomm.attach(ddp, codec, **options)
    losses = torch.zeros(nsteps, dtype=torch.float64)
    step_s = []
    for step in range(nsteps):
        items = task.batch(step, rank, nranks)
        for group in optimizer.param_groups:
            group["lr"] = task.learning_rate(step, nsteps)
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = task.loss(ddp, items)
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(ddp.parameters(), GRADIENT_NORM_MAX)
        optimizer.step()
        losses[step] = loss.item()
        step_s.append(time.perf_counter() - start)
        if rank == 0 and (step + 1) % REPORT_NSTEPS == 0:
            connection.send(("step", (step + 1, losses[step].item())))
    grad_nbytes = sum(param.nbytes for param in ddp.parameters() if param.requires_grad)
    dense_nbytes = nsteps * 2 * (nranks - 1) * grad_nbytes // nranks
    sent_nbytes = dense_nbytes
    if handle is not None:
        stats = handle.stats()
        sent_nbytes, dense_nbytes = stats.wire_nbytes, stats.dense_nbytes
        handle.close()
    _check_replicas(model)
    with torch.no_grad():
        total = torch.tensor(task.evaluate(model, rank, nranks), dtype=torch.float64)
    dist.all_reduce(total)
    dist.all_reduce(losses)
    return {
        "final": dict(zip(task.metrics, (total[:-1] / total[-1]).tolist(), strict=True)),
        "train_loss": (losses / nranks).tolist(),
        "sent_nbytes": sent_nbytes,
        "dense_nbytes": dense_nbytes,
        "nparameters": sum(param.numel() for param in model.parameters()),
        "train_s": sum(step_s),
        "step_s_median": statistics.median(step_s),
    }


def _check_replicas(model: torch.nn.Module) -> None:
    """Raise unless all ranks ended with the same bits."""
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.detach().numpy().tobytes())
    digests: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    if len(set(digests)) != 1:
        raise RuntimeError(f"the ranks ended with different parameters: {digests}")
