"""Compressed collectives without DDP."""

import weakref
from typing import Any

import torch
import torch.distributed as dist

from agentcomm import _core
from agentcomm._exchange import Exchange
from agentcomm._options import check_timeout, chunk_log2_of
from agentcomm._rendezvous import Meeting, group_timeout_s, members_of, tell_failure
from agentcomm._tensors import as_real, check_tensor, dtype_id, is_dense
from agentcomm.errors import SpecError, StateError
from agentcomm.specs import Codec, check_without_rounds, parse
from agentcomm.stats import Stats


class Work:
    """An all-reduce under way, in the manner of ``torch.distributed.Work``."""

    def __init__(self, future: "torch.futures.Future[torch.Tensor]") -> None:
        self._future = future

    def wait(self) -> bool:
        """Wait until the tensor holds the result.

        Raises:
            PeerError, MismatchError: see ``all_reduce``.
        """
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._future.done()

    def result(self) -> torch.Tensor:
        """Wait, and return the tensor."""
        return self._future.wait()

    def get_future(self) -> "torch.futures.Future[torch.Tensor]":
        """Return a future of the tensor."""
        return self._future


class _GroupReducer:
    """The engine of one process group, and the kinds of tensors that it has met."""

    def __init__(
        self, group: dist.ProcessGroup | None, timeout_s: float | None, chunk_nbytes: int | str
    ) -> None:
        members = members_of(group)
        config = {"wire version": _core.WIRE_VERSION, "call": "all_reduce"}
        try:
            meeting = Meeting(members, timeout_s or group_timeout_s(members.group))
        except StateError as error:
            tell_failure(group, error)
            raise
        self.exchange = Exchange(meeting, config, 0, chunk_log2_of(chunk_nbytes), 8)
        self.kinds: dict[tuple[Any, ...], int] = {}
        self.round = 0

    def start(self, real: torch.Tensor, value: torch.Tensor, codec: Codec, op: str) -> Work:
        kind = (real.dtype, real.numel(), codec, op)
        index = self.kinds.get(kind)
        if index is None:
            index = len(self.kinds) % (1 << 16)
            if len(self.kinds) == 1 << 16:
                self.exchange.reset_buckets()
                self.kinds.clear()
                index = 0
            number = self.exchange.add_param(real.numel())
            lanes = [(codec.to_tuple(), False, False, *codec.lane_options)]
            self.exchange.define_bucket(
                index, dtype_id(real.dtype), [number], [0], lanes, sum_=op == "sum"
            )
            self.kinds[kind] = index
        self.round += 1
        return Work(self.exchange.submit(index, self.round, 0, False, real, value))


_reducers: "weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupReducer]" = (
    weakref.WeakKeyDictionary()
)


def all_reduce(
    tensor: torch.Tensor,
    spec: str | Codec = "int8",
    group: dist.ProcessGroup | None = None,
    op: str = "mean",
    async_op: bool = False,
    *,
    timeout_s: float | None = None,
    chunk_nbytes: int | str = "auto",
) -> Work | None:
    """Average or sum a tensor over a group, compressed, in place. A collective.

    There is no error feedback: the tensor of one call need not have to do with the next one's. All
    ranks end with the same bits.

    Shapes:
        tensor: any shape, contiguous, CPU; float32, float16, bfloat16, float64 or complex.

    Args:
        tensor: is replaced by the result.
        spec: the codec.
        group: None is WORLD; on ranks outside (``NON_GROUP_MEMBER``) nothing happens.
        op: "mean" or "sum".
        async_op: return at once, with a ``Work``. The tensor must not be touched until its
            ``wait``.
        timeout_s: seconds until a silent rank is an error; the first call of a group decides; None:
            the group's timeout.
        chunk_nbytes: as for ``attach``; the first call of a group decides.

    Returns:
        A ``Work`` if async_op, else None.

    Raises:
        SpecError: a spec, op or tensor that does not fit.
        StateError: torch.distributed is not initialised.
        MismatchError: another rank calls with another spec, op, size or data type; on every rank.
        PeerError: a rank is gone or silent.
    """
    outside: object = dist.GroupMember.NON_GROUP_MEMBER
    if group is outside:
        return None
    codec = parse(spec)
    check_without_rounds(codec)
    if op not in ("mean", "sum"):
        raise SpecError(f"op={op!r} is unknown; it must be 'mean' or 'sum'")
    check_timeout(timeout_s)
    check_tensor(tensor, "tensor")
    if not is_dense(tensor):
        raise SpecError(
            "the tensor is not dense and contiguous; pass one that is, it is replaced by the result"
        )
    real = as_real(tensor.detach())
    dtype_id(real.dtype)
    members = members_of(group)
    if members.nranks == 1:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(tensor)
        return Work(future) if async_op else None
    reducer = _reducers.get(members.group)
    if reducer is None:
        reducer = _reducers[members.group] = _GroupReducer(members.group, timeout_s, chunk_nbytes)
    work = reducer.start(real, tensor, codec, op)
    if async_op:
        return work
    work.wait()
    return None


def reducer_stats(group: dist.ProcessGroup | None = None) -> Stats:
    """Return this rank's totals over all calls of ``all_reduce`` on a group."""
    reducer = _reducers.get(members_of(group).group)
    if reducer is None:
        return Stats()
    total = reducer.exchange.stats()
    return Stats(chunk_nbytes=1 << total.pop("chunk_log2"), **total)
