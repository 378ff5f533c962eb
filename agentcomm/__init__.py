"""agentcomm: a communication layer for PyTorch that sends compressed, chunked gradients.

``import agentcomm`` costs nothing: names load at first use, and torch with them.

Example:
    handle = agentcomm.attach(ddp, "int8")    # ddp: a DistributedDataParallel module
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentcomm import default_hooks
    from agentcomm.collectives import Work, all_reduce
    from agentcomm.errors import (
        AgentCommError,
        FrameError,
        MismatchError,
        PeerError,
        SpecError,
        StateError,
    )
    from agentcomm.frames import codecs, decode, encode
    from agentcomm.hook import Handle, HookState, attach, comm_hook
    from agentcomm.specs import Bf16, Codec, Fp8, Fp16, Int4, Int8, RandK, Raw, Sign, Ternary, TopK
    from agentcomm.stats import BucketStats, Stats

__version__ = "0.1.0"

_HOMES = {
    "agentcomm.collectives": ("Work", "all_reduce"),
    "agentcomm.errors": (
        "AgentCommError",
        "FrameError",
        "MismatchError",
        "PeerError",
        "SpecError",
        "StateError",
    ),
    "agentcomm.frames": ("codecs", "decode", "encode"),
    "agentcomm.hook": ("Handle", "HookState", "attach", "comm_hook"),
    "agentcomm.specs": (
        "Bf16",
        "Codec",
        "Fp16",
        "Fp8",
        "Int4",
        "Int8",
        "RandK",
        "Raw",
        "Sign",
        "Ternary",
        "TopK",
    ),
    "agentcomm.stats": ("BucketStats", "Stats"),
}
_MODULES = {"default_hooks"}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AgentCommError",
    "Bf16",
    "BucketStats",
    "Codec",
    "Fp8",
    "Fp16",
    "FrameError",
    "Handle",
    "HookState",
    "Int4",
    "Int8",
    "MismatchError",
    "PeerError",
    "RandK",
    "Raw",
    "Sign",
    "SpecError",
    "StateError",
    "Stats",
    "Ternary",
    "TopK",
    "Work",
    "all_reduce",
    "attach",
    "codecs",
    "comm_hook",
    "decode",
    "default_hooks",
    "encode",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its module (PEP 562)."""
    if name in _MODULES:
        return importlib.import_module(f"agentcomm.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'agentcomm' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})
