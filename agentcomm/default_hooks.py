"""The names of torch's ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks``, on agentcomm.

Only the import changes::

    from agentcomm import default_hooks
    ddp.register_comm_hook(state=None, hook=default_hooks.fp16_compress_hook)

The state is the process group, None being WORLD, as torch has it. Gradients travel through
agentcomm's engine: in chunks, averaged in float32, and bfloat16 works on the CPU too. For anything
else (another codec, rules, statistics) use ``agentcomm.attach``.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as _torch_hooks
from torch.utils.weak import WeakIdKeyDictionary

from agentcomm.errors import StateError
from agentcomm.hook import HookState

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
]

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


class _Connection:
    """The state of one DDP: a hook is not told whose bucket it gets."""

    def __init__(self, spec: str, group: dist.ProcessGroup | None) -> None:
        self.key = (spec, group)
        # Every parameter, as torch's hooks do it, however small.
        self.state = HookState(spec, group=group, min_compress_nelems=0)
        self.last_index = -1
        self.complete = False  # every bucket of a round has been seen

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.last_index = bucket.index()
        self.complete |= bucket.is_last()
        return self.state.exchange(bucket)


_of_params: Any = WeakIdKeyDictionary()  # connections, by parameter


def _exchange(
    spec: str, group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    if isinstance(bucket, tuple):  # from DDP's Python reducer: a gradient and its parameter
        shared: _Connection = _of_params.get(bucket[1]) or _python_reducers(spec, group)
        _of_params[bucket[1]] = shared
        return shared.state.exchange(bucket)
    params = bucket.parameters()
    connection: _Connection | None = _of_params.get(params[0])
    if connection is None or connection.key != (spec, group):
        connection = _connection_of_new(spec, group, bucket.index())
    for param in params:
        _of_params[param] = connection
    return connection.exchange(bucket)


def _python_reducers(spec: str, group: dist.ProcessGroup | None) -> _Connection:
    """Return the connection that all DDP modules with the Python reducer share."""
    found = [each for each in _known(spec, group) if each.last_index == -1]
    return found[0] if found else _Connection(spec, group)


def _known(spec: str, group: dist.ProcessGroup | None) -> set[_Connection]:
    return {each for each in _of_params.values() if each.key == (spec, group)}


def _connection_of_new(spec: str, group: dist.ProcessGroup | None, index: int) -> _Connection:
    """Return the connection of a bucket whose parameters were never seen: of a first round.

    Raises:
        StateError: two DDP modules are in their first round at once.
    """
    if index == 0:
        return _Connection(spec, group)
    found = [
        each for each in _known(spec, group) if not each.complete and each.last_index == index - 1
    ]
    if len(found) != 1:
        raise StateError(
            "agentcomm.default_hooks cannot tell two DDP modules apart whose first backward passes"
            " run at once; give each a state of its own:"
            f" ddp.register_comm_hook(agentcomm.HookState({spec!r}), agentcomm.comm_hook)"
        )
    return found[0]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def allreduce_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients as they are: codec ``raw``.

    Args:
        process_group: of the DDP; None is WORLD.
        bucket: DDP's bucket.

    Returns:
        A future of the bucket's buffer.

    Raises:
        MismatchError, PeerError: in ``backward()``, on every rank.
    """
    return _exchange("raw", process_group, bucket)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def fp16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Send gradients as IEEE half floats, and average them in float32: codec ``fp16``.

    Arguments, result and errors are those of ``allreduce_hook``.
    """
    return _exchange("fp16", process_group, bucket)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def bf16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Send gradients as bfloat16, and average them in float32: codec ``bf16``.

    Arguments, result and errors are those of ``allreduce_hook``.
    """
    return _exchange("bf16", process_group, bucket)


# DDP refuses hooks of torch's name where NCCL is missing, which this one does not need.
bf16_compress_hook.__name__ = "agentcomm_bf16_compress_hook"

_SPEC_OF = {
    allreduce_hook: "raw",
    fp16_compress_hook: "fp16",
    bf16_compress_hook: "bf16",
    _torch_hooks.allreduce_hook: "raw",
    _torch_hooks.fp16_compress_hook: "fp16",
    _torch_hooks.bf16_compress_hook: "bf16",
}


def spec_of(hook: object) -> str | None:
    """Return the spec that means what a default hook does, torch's or ours; None for others."""
    try:
        return _SPEC_OF.get(hook)
    except TypeError:  # cannot be hashed
        return None


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Return ``hook`` with gradients as half floats around it.

    Around ``allreduce_hook`` that is ``fp16_compress_hook``, around a compressing one of this
    module the hook itself: it is no more exact than that. Any other gets torch's own wrapper.
    """
    return _wrapped(hook, fp16_compress_hook, _torch_hooks.fp16_compress_wrapper)


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Return ``hook`` with gradients as bfloat16 around it: see ``fp16_compress_wrapper``."""
    return _wrapped(hook, bf16_compress_hook, _torch_hooks.bf16_compress_wrapper)


def _wrapped(hook: Hook, same: Hook, wrapper: Callable[[Any], Any]) -> Hook:
    spec = spec_of(hook)
    if spec is None:
        wrapped: Hook = wrapper(hook)
        return wrapped
    return same if spec == "raw" else hook
