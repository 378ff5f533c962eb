"""The DDP modules of this process, from when they are built: hooks, notices, the report's part."""

import fnmatch
import functools
import logging
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.nn.parallel import DistributedDataParallel

from agentcomm import default_hooks
from agentcomm._names import Names
from agentcomm.errors import StateError
from agentcomm.hook import Handle, HookState, attach, state_of
from agentcomm.run import _cpu_device, _parts
from agentcomm.run._patches import settings
from agentcomm.run._variables import PARTS
from agentcomm.stats import Stats

WRITE_S = 1.0  # between two writes of the part during the run
OURS = "agentcomm"
_BUILTINS = {BuiltinCommHookType.ALLREDUCE: "raw", BuiltinCommHookType.FP16_COMPRESS: "fp16"}
_logger = logging.getLogger("agentcomm")


class _Model:
    """What the launcher knows of one DDP module."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp = weakref.ref(ddp)
        self.name = type(ddp.module).__name__
        self.nparameters = sum(p.numel() for p in ddp.module.parameters() if p.requires_grad)
        self.hook = OURS
        self.codec = settings().codec
        self.by_script = False  # the script has registered its hook
        self.state: HookState | None = None
        self._stats: Stats | None = None
        self._watched: Handle | None = None

    def watch(self) -> None:
        """See to it that the present handle's last statistics are read before it closes."""
        ddp = self.ddp()
        if self.state is not None and self.state.handle is not self._watched and ddp is not None:
            self._watched = self.state.handle
            # Of finalizers the youngest runs first: this one before those that close the handle.
            weakref.finalize(ddp, self.stats)

    def stats(self) -> dict[str, Any] | None:
        """Return the latest statistics, None where the gradients are not ours."""
        if self.state is not None and not self.state.handle.closed:
            with suppress(StateError):  # closed at exit
                self._stats = self.state.handle.stats()
        return None if self._stats is None else self._stats.to_dict()

    def to_dict(self) -> dict[str, Any]:
        stats = self.stats()
        keys = ("name", "nparameters", "codec", "hook")
        return {key: getattr(self, key) for key in keys} | {"stats": stats}


class _Process:
    """This process's models and its part of the report."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.models: list[_Model] = []
        self.notices: list[str] = []
        self.rank, self.nranks = 0, 1
        self._written = 0.0
        self._nrounds = 0  # of all models

    def note(self, text: str) -> None:
        """Say something once, by rank 0, and put it in the report."""
        if text not in self.notices:
            self.notices.append(text)
            rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
            _logger.log(logging.DEBUG if rank else logging.INFO, text)

    def after_round(self, model: _Model) -> None:
        """Write the part in the first rounds, then if it is time: the process may be killed."""
        model.watch()  # set_codec keeps the handle, another attach of the script's does not
        self._nrounds += 1
        # The last round submitted is still under way: the second has the first one's numbers.
        if self._nrounds <= 2 or time.monotonic() - self._written >= WRITE_S:
            self.write()

    def write(self, finished: bool = False) -> None:
        """Write the part."""
        path = os.environ.get(PARTS)
        if path is None or not (self.models or self.notices):
            return
        self._written = time.monotonic()
        part = {
            "rank": self.rank,
            "nranks": self.nranks,
            "host": socket.gethostname(),
            "pid": self.pid,
            "finished": finished,
            "notices": self.notices,
            "models": [model.to_dict() for model in self.models],
        }
        try:
            _parts.write(path, settings().to_dict(), part)
        except OSError as error:
            _logger.warning("the report %s cannot be written: %s", path, error)


_models: "weakref.WeakKeyDictionary[DistributedDataParallel, _Model]" = weakref.WeakKeyDictionary()
_process: _Process | None = None


def _this_process() -> _Process:
    """Return this process's record: a forked child begins one of its own."""
    global _process
    if _process is None or _process.pid != os.getpid():
        _process = _Process()
        _set_up_logging()
        # Runs in children of multiprocessing too, which never reach atexit.
        Finalize(None, _process.write, kwargs={"finished": True}, exitpriority=0)
    return _process


def _set_up_logging() -> None:
    level = settings().log.upper()
    _logger.setLevel(logging.CRITICAL + 1 if level == "QUIET" else level)
    if not _logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("agentcomm: %(message)s"))
        _logger.addHandler(handler)
        _logger.propagate = False


# ---- what the patches call -----------------------------------------------------------------------


def ddp_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the positional arguments of DDP; without devices where CUDA stands for the CPU."""
    return _cpu_device.ddp_arguments(args, kwargs) if _cpu_device.installed else args


def adopt(ddp: DistributedDataParallel) -> None:
    """Attach to a DDP module that was just built: a collective of its group.

    Raises:
        SpecError: the rules match no parameter of the first model.
        MismatchError, PeerError: as ``attach``.
    """
    process = _this_process()
    process.rank, process.nranks = dist.get_rank(), dist.get_world_size()
    model = _Model(ddp)
    process.models.append(model)
    _models[ddp] = model
    options = settings().attach_options(max((p.numel() for p in ddp.parameters()), default=0))
    options["rules"] = _rules_for(ddp, model, process)
    try:
        attach(ddp, settings().codec, **options)
    except StateError as error:
        model.hook, model.codec = "torch", "dense"
        process.note(f"{model.name} stays with torch's own exchange: {error}")
        return
    _bind(ddp, model, process)


def _bind(ddp: DistributedDataParallel, model: _Model, process: _Process) -> None:
    model.state = state_of(ddp)
    assert model.state is not None
    model.state.after_round = functools.partial(process.after_round, model)
    model.watch()
    process.write()


def _rules_for(ddp: DistributedDataParallel, model: _Model, process: _Process) -> dict[str, str]:
    """Return the rules that match something in this model: a script may have several models."""
    names = Names(ddp).all
    found = {}
    for pattern, spec in settings().rules.items():
        if any(fnmatch.fnmatchcase(name, pattern) for name in names):
            found[pattern] = spec
        else:
            process.note(f"--rules: pattern {pattern!r} matches no parameter of {model.name}")
    if settings().rules and not found and len(process.models) == 1:
        Names(ddp).check_patterns("--rules", settings().rules)  # raises, with near names
    return found


def replace_hook(ddp: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> bool:
    """Let a hook that the script registers take effect; False if torch's own way is to do it."""
    model = _models.get(ddp)
    if model is None or model.by_script or model.state is None:
        return False
    spec = default_hooks.spec_of(hook)
    if spec is not None and (state is None or state is ddp.process_group):
        _use_ours(ddp, model, hook.__name__, spec)
        return True
    ddp._check_comm_hook(hook)  # type: ignore[no-untyped-call]
    model.state.delegate(state, hook)
    model.by_script = True
    model.hook, model.codec = f"the script's {hook.__qualname__}", "none"
    ddp.logger._set_comm_hook_name(hook.__qualname__)  # type: ignore[union-attr]
    ddp._comm_hooks[:] = [(hook, state)]
    _this_process().note(f"{model.name} has a hook of the script's, {hook.__qualname__}: it stays")
    return True


def replace_builtin(ddp: DistributedDataParallel, comm_hook_type: BuiltinCommHookType) -> bool:
    """Replace a built-in hook by ours of the same meaning; False if torch is to do it."""
    model = _models.get(ddp)
    if model is None or model.by_script or model.state is None or comm_hook_type not in _BUILTINS:
        return False
    _use_ours(ddp, model, str(comm_hook_type), _BUILTINS[comm_hook_type])
    return True


def _use_ours(ddp: DistributedDataParallel, model: _Model, name: str, spec: str) -> None:
    attach(ddp, spec, min_compress_nelems=0)
    model.watch()
    model.by_script = True
    model.codec = spec
    process = _this_process()
    process.note(f"{model.name}: torch's {name} is replaced by agentcomm's codec {spec}")


def note(text: str) -> None:
    """Say something once, by rank 0, and put it in the report."""
    _this_process().note(text)


def note_copy(ddp: DistributedDataParallel) -> None:
    """Say that torch leaves the hook behind when a DDP module is copied or pickled."""
    note(
        f"a copied or unpickled DistributedDataParallel of {type(ddp.module).__name__} has no hook:"
        " if it trains, it does so dense; build another of the model instead"
    )


def note_unsupported(name: str) -> None:
    """Say that a kind of data parallelism is not ours."""
    _this_process().note(
        f"{name} exchanges its gradients itself: not supported yet, so they travel dense; use"
        " DistributedDataParallel to compress them"
    )
