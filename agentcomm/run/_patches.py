"""What the launcher changes in torch's modules, each right after it was imported.

torch is not complete at that time: everything here is small, and loads ``_live`` when it is called.
"""

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from agentcomm.run._settings import Settings


@functools.cache
def settings() -> Settings:
    """Return the settings of this run."""
    return Settings.read({}, os.environ)


def after_import(name: str, module: ModuleType) -> None:
    """Change a module that was just imported."""
    patch = _PATCHES[name]
    patch(module)


def _patch_torch(torch: Any) -> None:
    if settings().device == "cuda":
        return
    from agentcomm.run import _cpu_device

    _cpu_device.install(torch, always=settings().device == "cpu")


def _patch_ddp(module: Any) -> None:
    cls = module.DistributedDataParallel
    init, set_state = cls.__init__, cls.__setstate__
    register, builtin = cls.register_comm_hook, cls._register_builtin_comm_hook

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from agentcomm.run import _live

        init(self, *_live.ddp_arguments(args, kwargs), **kwargs)
        _live.adopt(self)

    @functools.wraps(set_state)
    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        from agentcomm.run import _live

        set_state(self, state)
        _live.note_copy(self)

    @functools.wraps(register)
    def register_comm_hook(self: Any, state: object, hook: Callable[..., Any]) -> None:
        from agentcomm.run import _live

        if not _live.replace_hook(self, state, hook):
            register(self, state, hook)

    @functools.wraps(builtin)
    def _register_builtin_comm_hook(self: Any, comm_hook_type: Any) -> None:
        from agentcomm.run import _live

        if not _live.replace_builtin(self, comm_hook_type):
            builtin(self, comm_hook_type)

    cls.__init__, cls.__setstate__ = __init__, __setstate__
    cls.register_comm_hook = register_comm_hook
    cls._register_builtin_comm_hook = _register_builtin_comm_hook


def _patch_fsdp(module: Any) -> None:
    cls = module.FullyShardedDataParallel
    init = cls.__init__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from agentcomm.run import _live

        init(self, *args, **kwargs)
        _live.note_unsupported("FullyShardedDataParallel")

    cls.__init__ = __init__


def _patch_fsdp2(module: Any) -> None:
    fully_shard = module.fully_shard

    @functools.wraps(fully_shard)
    def noted(*args: Any, **kwargs: Any) -> Any:
        from agentcomm.run import _live

        _live.note_unsupported("fully_shard")
        return fully_shard(*args, **kwargs)

    module.fully_shard = noted


_PATCHES: dict[str, Callable[[Any], None]] = {
    "torch": _patch_torch,
    "torch.nn.parallel.distributed": _patch_ddp,
    "torch.distributed.fsdp.fully_sharded_data_parallel": _patch_fsdp,
    "torch.distributed.fsdp._fully_shard._fully_shard": _patch_fsdp2,
}
