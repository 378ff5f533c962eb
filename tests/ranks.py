"""Runs functions on several ranks, each a process of its own, connected by gloo.

A process that imports torch takes seconds to start, so the ranks of most tests are workers that
serve one call after another, each call with a process group of its own. A function is called as
``fn(rank, nranks, *args)`` and must stand at the top of its module, so that it can be pickled.
"""

import atexit
import contextlib
import faulthandler
import functools
import gc
import logging
import multiprocessing
import os
import pickle
import random
import signal
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait

import numpy as np
import torch
import torch.distributed as dist

CALL_TIMEOUT_S = 90.0
GROUP_TIMEOUT_S = 30.0
EXIT_TIMEOUT_S = 20.0  # an interpreter that has nothing to wait for ends within a second or two
_spawn = multiprocessing.get_context("spawn")


@dataclass
class Outcome:
    """What became of a function on one rank."""

    value: object = None
    error: str = ""  # class of the exception, "" without one
    text: str = ""
    attributes: dict = field(default_factory=dict)
    traceback: str = ""
    exitcode: int | None = None  # of a process that was started for this one function


def run_ranks(nranks, fn, *args, timeout_s=CALL_TIMEOUT_S):
    """Call ``fn(rank, nranks, *args)`` on every rank; return the list of what they returned."""
    outcomes = _pool(nranks).call(nranks, fn, args, timeout_s)
    if any(outcome.error for outcome in outcomes):
        _stop_pool()
        raise AssertionError(_describe(outcomes))
    return [outcome.value for outcome in outcomes]


def run_ranks_raising(nranks, fn, *args, timeout_s=CALL_TIMEOUT_S):
    """Call a function that may raise; return an ``Outcome`` per rank."""
    return _pool(nranks).call(nranks, fn, args, timeout_s)


def run_ranks_dying(nranks, fn, *args, timeout_s=CALL_TIMEOUT_S):
    """Call a function that may end its process, in processes that serve for this alone.

    Fails if a process is still there ``EXIT_TIMEOUT_S`` after its function has ended.
    """
    pool = _Pool(nranks, one_call=True)
    try:
        outcomes = pool.call(nranks, fn, args, timeout_s)
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        for rank, worker in enumerate(pool.workers):
            worker.process.join(max(deadline - time.monotonic(), 0.01))
            if worker.process.exitcode is None:
                pool.dump_stacks()
                raise AssertionError(f"rank {rank} does not end\n{_describe(outcomes)}")
            outcomes[rank].exitcode = worker.process.exitcode
    finally:
        pool.kill()
    return outcomes


def _describe(outcomes):
    parts = []
    for rank, outcome in enumerate(outcomes):
        parts.append(f"---- rank {rank}: {outcome.error or 'returned'} ----")
        parts.append(outcome.traceback or repr(outcome.value)[:300])
    return "\n".join(parts)


class _Worker:
    def __init__(self, rank, one_call):
        self.connection, theirs = _spawn.Pipe()
        self.process = _spawn.Process(target=_serve, args=(rank, theirs, one_call), daemon=True)
        self.process.start()
        theirs.close()


class _Pool:
    def __init__(self, nranks, *, one_call=False):
        self.one_call = one_call
        # The store is this process's, as it is the launcher's under torchrun: it outlives rank 0.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ncalls = 0
        self.workers = []
        self.grow(nranks)

    def grow(self, nranks):
        while len(self.workers) < nranks:
            self.workers.append(_Worker(len(self.workers), self.one_call))

    def call(self, nranks, fn, args, timeout_s):
        try:
            return self._call(nranks, fn, args, timeout_s)
        except BaseException:
            self.kill()  # whatever they are doing, they could not serve the next call
            raise

    def _call(self, nranks, fn, args, timeout_s):
        self.ncalls += 1
        workers = self.workers[:nranks]
        for worker in workers:
            call = (self.store.port, self.ncalls, nranks, fn, args)
            worker.connection.send_bytes(pickle.dumps(call))
        outcomes = [None] * nranks
        deadline = time.monotonic() + timeout_s
        while None in outcomes:
            waiting = [w.connection for w, o in zip(workers, outcomes, strict=True) if o is None]
            ready = wait(waiting, max(deadline - time.monotonic(), 0))
            if not ready:
                self.dump_stacks()
                late = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
                for rank in late:
                    outcomes[rank] = Outcome(error="(no answer)")
                raise AssertionError(
                    f"ranks {late} did not end within {timeout_s} s; their stacks are on stderr\n"
                    + _describe(outcomes)
                )
            for rank, worker in enumerate(workers):
                if worker.connection in ready:
                    outcomes[rank] = self.receive(worker)
        return outcomes

    def receive(self, worker):
        try:
            return pickle.loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            worker.process.join(EXIT_TIMEOUT_S)
            return Outcome(error="(process ended)", exitcode=worker.process.exitcode)

    def dump_stacks(self):
        for worker in self.workers:
            if worker.process.exitcode is None:
                os.kill(worker.process.pid, signal.SIGUSR1)
        time.sleep(0.5)

    def kill(self):
        for worker in self.workers:
            worker.process.kill()
            worker.process.join()
            worker.connection.close()
        self.workers = []


_current = None


def _pool(nranks):
    global _current
    if _current is None or any(w.process.exitcode is not None for w in _current.workers):
        _stop_pool()
        _current = _Pool(nranks)
    _current.grow(nranks)
    return _current


@atexit.register
def _stop_pool():
    global _current
    if _current is not None:
        _current.kill()
    _current = None


# ---- in the ranks' processes ---------------------------------------------------------------------


def _serve(rank, connection: Connection, one_call):
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    gc.freeze()  # the modules' objects need no looking through after every call
    while True:
        try:
            port, number, nranks, fn, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        outcome = _call(rank, nranks, _store(port, number), fn, args)
        connection.send_bytes(pickle.dumps(outcome))
        if one_call:
            return  # the interpreter must end by itself, whatever fn has left behind
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()


@functools.cache
def _client(port):
    return dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=GROUP_TIMEOUT_S))


def _store(port, number):
    return dist.PrefixStore(f"call {number}", _client(port))


def _call(rank, nranks, store, fn, args):
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (what scripts use)
    torch.manual_seed(0)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=nranks, timeout=timeout)
    dist.barrier()  # a rank that ended now would break the others' connecting
    try:
        outcome = Outcome(fn(rank, nranks, *args))
    except BaseException as error:  # pytest's Failed is no Exception
        attributes = {
            name: value for name, value in vars(error).items() if isinstance(value, int | str)
        }
        outcome = Outcome(
            error=type(error).__name__,
            text=str(error),
            attributes=attributes,
            traceback=traceback.format_exc(),
        )
    return outcome


@contextlib.contextmanager
def captured_log():
    """Capture what the logger ``agentcomm`` says, as a list of (level, text)."""
    records = []

    class Handler(logging.Handler):
        def emit(self, record):
            records.append((record.levelname, record.getMessage()))

    handler = Handler()
    logger = logging.getLogger("agentcomm")
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)


__all__ = ["Outcome", "captured_log", "run_ranks", "run_ranks_dying", "run_ranks_raising"]
