"""One engine of the core, from Python: what DDP hooks and ``all_reduce`` share."""

import hashlib
import logging
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from agentcomm import _core, errors
from agentcomm._options import Lane
from agentcomm._rendezvous import Failure, Meeting, Notices
from agentcomm._tensors import capsule
from agentcomm.errors import SpecError

logger = logging.getLogger("agentcomm")

LATE_S = 10.0


class _Failed:
    """Stands for the result of a future that failed.

    DDP reads a hook's result in C++, where it would turn any exception into a RuntimeError. But to
    complain that this object is no tensor it asks for its text; raising there makes ``backward()``
    raise our exception, with its own type. Each time a new one: DDP keeps the future, and the
    traceback of a kept exception would keep the frames that hold the DDP.
    """

    def __init__(
        self, class_name: str, status: str, text: str, rank: int, global_ranks: list[int]
    ) -> None:
        self._class: type[errors.AgentCommError] = getattr(errors, class_name)
        self._status, self._text = status, text
        self._rank = global_ranks[rank] if rank >= 0 else None

    def __str__(self) -> str:
        self.throw()

    def throw(self, _: object = None) -> NoReturn:
        error = self._class(self._text)
        error.status, error.rank = self._status, self._rank
        raise error


# A future, its result, and what to do with a failure.
Token = tuple[torch.futures.Future[Any], Any, Notices]


def _on_done(kept: tuple[Token, object], failure: Failure | None) -> None:
    """Complete a future: called by the progress thread, which holds the GIL for just this."""
    future, value, notices = kept[0]
    if failure is None:
        future.set_result(value)
        return
    failed = _Failed(*notices.settle(failure), notices.global_ranks)
    # For those who wait in Python; what Future.set_exception does, with another value.
    future._set_unwrap_func(failed.throw)
    future.set_result(failed)


def _on_late(rank: int, round_: int, bucket: int, seconds: float) -> None:
    logger.warning(
        "rank %d has kept this rank waiting for %.1f s in round %d bucket %d",
        rank,
        seconds,
        round_,
        bucket,
    )


class Exchange:
    """Connections to the members of a group, and the engine that uses them."""

    def __init__(
        self,
        meeting: Meeting,
        config: dict[str, Any],
        seed: int,
        chunk_log2: int,
        elem_nbytes_max: int,
    ) -> None:
        """Meet the other ranks: a collective.

        Args:
            meeting: the attempt.
            config: settings that must be equal on all ranks; those under "local" need not be.
            seed: of random numbers.
            chunk_log2: 0 for "auto"; rank 0's is taken.
            elem_nbytes_max: largest element of any tensor that will be exchanged.

        Raises:
            PeerError: a rank did not come in time.
            MismatchError: settings differ between ranks.
        """
        # Not the group: all_reduce keeps exchanges by group, for as long as the script keeps that.
        self._global_ranks = meeting.members.global_ranks
        self._notices = Notices(meeting)
        mine = config | {"local": {"chunk_log2": chunk_log2}}
        meeting.publish(mine)
        configs = meeting.compare(mine)
        digest = hashlib.blake2b(
            repr((meeting.name, sorted(config.items()))).encode(), digest_size=8
        ).digest()
        self._engine = _core.Engine(
            transport=meeting.connect(),
            stream=int.from_bytes(digest, "little"),
            seed=seed,
            chunk_log2=configs[0]["local"]["chunk_log2"],
            elem_nbytes_max=elem_nbytes_max,
            timeout_s=meeting.timeout_s,
            late_s=min(LATE_S, meeting.timeout_s / 4),
            rank_names=self._global_ranks,
            on_done=_on_done,
            on_late=_on_late,
        )
        self.add_param: Callable[[int], int] = self._engine.add_param
        self.reset_buckets: Callable[[], None] = self._engine.reset_buckets
        self.stats: Callable[[], dict[str, Any]] = self._engine.stats
        self.bucket_stats: Callable[[int], dict[str, Any] | None] = self._engine.bucket_stats
        self.residual_norm: Callable[[], float] = self._engine.residual_norm
        self.clear_residuals: Callable[[], None] = self._engine.clear_residuals
        # Closed, not just dropped: the last reference may go on one of the engine's own threads.
        # And closed at exit: these threads call into Python, so they must end before it does.
        weakref.finalize(self, self._engine.close)

    def define_bucket(
        self,
        index: int,
        dtype: int,
        params: list[int],
        lane_of: list[int],
        lanes: list[Lane],
        *,
        sum_: bool = False,
    ) -> None:
        """Describe a bucket: its parameters in order of memory, and the lane of each."""
        if len(lanes) > 255:
            raise SpecError(f"a bucket has {len(lanes)} different codecs; at most 255 are possible")
        self._engine.define_bucket(index, dtype, params, lane_of, lanes, sum_)

    def submit(
        self,
        index: int,
        round_: int,
        nforwards: int,
        absent: bool,
        tensor: torch.Tensor,
        value: object,
    ) -> torch.futures.Future[Any]:
        """Start the exchange of a real tensor in place; the future's result is ``value``.

        absent: this rank does not count in the mean.
        """
        future: torch.futures.Future[Any] = torch.futures.Future()
        token: Token = (future, value, self._notices)
        self._engine.submit(index, round_ & 0xFFFFFFFF, nforwards, absent, capsule(tensor), token)
        return future

    def residual(self, param: int, nelems: int, *, owner: bool = True) -> torch.Tensor:
        """Return a copy of what this rank owes of a parameter; with the owner's part, times n."""
        out = torch.empty(nelems, dtype=torch.float32)
        self._engine.residual(param, owner, capsule(out))
        return out

    def close(self) -> None:
        """End the threads and the connections; idempotent."""
        self._engine.close()
