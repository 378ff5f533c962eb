"""How the handles of a process group find each other, compare their settings and connect.

Everything goes through the group's store, under keys that only its members read: no collective of
ours is ever queued on the script's own group, where it could pair up with one of the script's. The
connections are a gloo group of their own. It is built directly from the store;
``torch.distributed.new_group`` would have to be called by every rank of the job, and with
``use_local_synchronization`` it derives its name from how many groups *this* rank has made, which
hangs where ranks have different histories.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from agentcomm.errors import AgentCommError, MismatchError, PeerError, StateError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

_FALLBACK_TIMEOUT_S = 1800.0
_NOTICE_S = 2.0  # what the news of a failure may cost

# Exception class, status, text, rank of the group or -1.
Failure = tuple[str, str, str, int]


@dataclass(frozen=True, slots=True)
class Members:
    """A process group, seen from one of its ranks."""

    group: dist.ProcessGroup
    store: Store
    rank: int
    nranks: int
    global_ranks: list[int]


def members_of(group: dist.ProcessGroup | None) -> Members:
    """Return the members of a group, ``None`` being WORLD.

    Raises:
        StateError: torch.distributed is not initialised, or this rank is outside the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise StateError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group first"
        )
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):  # NON_GROUP_MEMBER is none
        raise StateError(f"this rank is no member of the group {group!r}")
    _, store = distributed_c10d._world.pg_map[group]
    ranks = dist.get_process_group_ranks(group)
    return Members(group, store, dist.get_rank(group), dist.get_world_size(group), ranks)


def group_timeout_s(group: dist.ProcessGroup) -> float:
    """Return the timeout that the group was made with, in seconds."""
    for device in ("cpu", "cuda"):
        try:
            options = group._get_backend(torch.device(device)).options
            return float(options._timeout.total_seconds())
        except (RuntimeError, AttributeError):
            continue
    return _FALLBACK_TIMEOUT_S


@contextlib.contextmanager
def _store_in_use() -> Iterator[None]:
    """Tell the loss of the store from the absence of a rank."""
    try:
        yield
    except dist.DistNetworkError as error:
        raise PeerError(
            "the store of the process group is gone: the process that serves it has ended, which"
            f" is rank 0's or the launcher's ({str(error).splitlines()[0][:200]})"
        ) from None


def _gloo_options(timeout: timedelta) -> Any:
    """Return gloo's usual options, with two connections per pair of ranks.

    Each direction has its own (see tag_of in transport.cpp). Both share one event loop.

    Raises:
        StateError: an interface that GLOO_SOCKET_IFNAME names has no address.
    """
    gloo: Any = dist.ProcessGroupGloo
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    try:
        devices = [gloo.create_device(interface=name) for name in interfaces]
    except RuntimeError as error:
        raise StateError(
            f"gloo cannot use the network interfaces GLOO_SOCKET_IFNAME={','.join(interfaces)!r}:"
            f" {str(error).splitlines()[0][:300]}; name interfaces that this machine has"
        ) from error
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [
        device for device in devices or [gloo.create_default_device()] for _ in range(2)
    ]
    options._threads = 1  # for collectives, which this group never runs
    return options


class Meeting:
    """One attempt of all members to connect; the k-th of one rank meets the k-th of the others."""

    def __init__(self, members: Members, timeout_s: float, *, to_connect: bool = True) -> None:
        """Open the attempt.

        Args:
            members: who takes part.
            timeout_s: how long to wait for the others.
            to_connect: False for a rank that can only say that it cannot take part.

        Raises:
            StateError: this rank cannot connect to anybody; before the attempt counts.
        """
        self.members = members
        self.timeout_s = timeout_s
        self._gloo: Any = _gloo_options(timedelta(seconds=timeout_s)) if to_connect else None
        with _store_in_use():
            attempt = members.store.add(f"agentcomm/attempts/{members.rank}", 1)
        self.name = f"agentcomm/{members.group.group_name}/{attempt}"
        self._prefix = f"agentcomm/{attempt}"

    def publish(self, config: dict[str, Any]) -> None:
        """Tell the others this rank's settings, or ``{"error": text}`` if it cannot take part."""
        with _store_in_use():
            self.members.store.set(f"{self._prefix}/config/{self.members.rank}", json.dumps(config))

    def compare(self, config: dict[str, Any]) -> list[dict[str, Any]]:
        """Wait for everybody's settings and compare them with this rank's.

        Raises:
            PeerError: a rank did not come in time.
            MismatchError: settings differ, or a rank could not take part; on every rank.
        """
        deadline = time.monotonic() + self.timeout_s
        configs = [self._read(rank, deadline) for rank in range(self.members.nranks)]
        for rank, other in enumerate(configs):
            if "error" in other:
                name = self.members.global_ranks[rank]
                raise MismatchError(f"rank {name} could not attach: {other['error']}")
        for rank, other in enumerate(configs):
            for key in sorted({*config, *other} - {"local"}):
                if config.get(key) == other.get(key):
                    continue
                here, there = (
                    self.members.global_ranks[self.members.rank],
                    self.members.global_ranks[rank],
                )
                raise MismatchError(
                    f"the ranks are configured differently: {key} is {config.get(key)!r} on rank"
                    f" {here}"
                    f" and {other.get(key)!r} on rank {there}; pass the same to every rank"
                )
        return configs

    def _read(self, rank: int, deadline: float) -> dict[str, Any]:
        key, pause_s = f"{self._prefix}/config/{rank}", 0.001
        with _store_in_use():
            # Not Store.wait, which keeps other threads from the store for as long as it lasts.
            while not self.members.store.check([key]):
                if time.monotonic() >= deadline:
                    raise self._missing(rank)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.05)
            loaded: dict[str, Any] = json.loads(self.members.store.get(key))
        return loaded

    def _missing(self, rank: int) -> PeerError:
        name = self.members.global_ranks[rank]
        error = PeerError(
            f"rank {name} did not register agentcomm within {self.timeout_s:.1f} s (timeout_s): it"
            " is gone, or its script does not call attach() or register the hook, which every rank"
            " of the group must do"
        )
        error.rank = name
        return error

    def notice_board(self) -> tuple[Store, str]:
        """Return the store and the prefix of the keys of ``Notices``."""
        return self.members.store, f"{self._prefix}/notices"

    def connect(self) -> object:
        """Connect the members; returns the transport, a capsule for ``_core.Engine``."""
        from agentcomm._extension import c10d

        members = self.members
        store = PrefixStore(f"{self._prefix}/gloo", members.store)
        try:
            backend = dist.ProcessGroupGloo(store, members.rank, members.nranks, self._gloo)
        except RuntimeError as error:
            raise PeerError(
                f"the ranks of group {members.global_ranks} could not connect within"
                f" {self.timeout_s:.1f} s:"
                f" {str(error).splitlines()[0][:300]}"
            ) from error
        group = dist.ProcessGroup(store, members.rank, members.nranks)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        name = cast("GroupName", self.name)
        group._set_group_name(name)
        # The transport finds the group by its name, and from then on holds it alone.
        torch._C._distributed_c10d._register_process_group(name, group)
        try:
            return c10d().open(self.name)
        finally:
            torch._C._distributed_c10d._unregister_process_group(name)


def tell_failure(group: dist.ProcessGroup | None, error: Exception) -> None:
    """Say in the place of this rank's settings that it cannot take part, and why."""
    try:
        members = members_of(group)
    except AgentCommError:
        return  # there is nobody to tell
    if members.nranks > 1:
        meeting = Meeting(members, 1.0, to_connect=False)
        meeting.publish({"error": f"{type(error).__name__}: {error}"})


class Notices:
    """What the ranks say, in the store, about why they give up.

    A rank that gives up tells the others over its connections, but does not wait long for those
    that are busy elsewhere: to them it would seem to be the one that died.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._rank, self.global_ranks = meeting.members.rank, meeting.members.global_ranks
        self._store, self._prefix = meeting.notice_board()
        self._settled: Failure | None = None

    def settle(self, failure: Failure) -> Failure:
        """Post this rank's failure; return it, or that of a peer which has left because of it."""
        if failure[1] == "AGC_ERR_CLOSED":
            return failure
        if self._settled is None:
            self._settled = failure
            # A store that does not answer must not hold up the failure.
            worker = threading.Thread(target=self._post, args=(failure,), daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter is ending
                worker.start()
                worker.join(_NOTICE_S)
        return self._settled

    def _post(self, failure: Failure) -> None:
        with contextlib.suppress(RuntimeError):  # there is no store any more
            self._settled = self._cause(failure)
            self._store.set(f"{self._prefix}/{self._rank}", json.dumps(self._settled))

    def _cause(self, failure: Failure) -> Failure:
        _, status, _, rank = failure
        if status != "AGC_ERR_PEER" or not self._store.check([f"{self._prefix}/{rank}"]):
            return failure
        class_name, status, text, culprit = json.loads(self._store.get(f"{self._prefix}/{rank}"))
        by = f"reported by rank {self.global_ranks[rank]}, which has left"
        return class_name, status, f"{text} ({by})", culprit
