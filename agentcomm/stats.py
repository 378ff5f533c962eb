"""Statistics of a handle."""

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol


class ScalarWriter(Protocol):
    """What TensorBoard's and tensorboardX's ``SummaryWriter`` have in common."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Record one number."""


@dataclass(frozen=True, slots=True)
class BucketStats:
    """One bucket's part of the totals, since its layout was last built.

    Attributes:
        index: DDP's number of the bucket.
        rounds: how often it was exchanged.
        dense_nbytes: bytes that a dense ring would have sent from this rank.
        wire_nbytes: bytes that this rank handed to the transport.
        encode_s: seconds spent encoding.
        wait_s: seconds spent waiting for other ranks.
        decode_s: seconds spent decoding and summing.
    """

    index: int
    rounds: int
    dense_nbytes: int
    wire_nbytes: int
    encode_s: float
    wait_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals of one rank since ``attach``.

    Attributes:
        rounds: synchronised backward passes.
        buckets: buckets exchanged.
        dense_nbytes: bytes that a dense ring would have sent from this rank: 2 (n-1)/n of the
            buckets.
        wire_nbytes: bytes that this rank handed to the transport to send, headers included.
        encode_s: seconds that the progress thread spent encoding.
        wait_s: seconds that it spent waiting for other ranks or for the network.
        decode_s: seconds that it spent decoding and summing.
        residual_norm: L2 norm of what this rank still owes (error feedback).
        sparse_nbytes: bytes of sparse gradients, which go through the group's own allreduce.
        chunk_nbytes: dense bytes per chunk in the latest round.
        per_bucket: the parts of the buckets.
    """

    rounds: int = 0
    buckets: int = 0
    dense_nbytes: int = 0
    wire_nbytes: int = 0
    encode_s: float = 0.0
    wait_s: float = 0.0
    decode_s: float = 0.0
    residual_norm: float = 0.0
    sparse_nbytes: int = 0
    chunk_nbytes: int = 0
    per_bucket: tuple[BucketStats, ...] = field(default=())

    @property
    def ratio(self) -> float:
        """Dense bytes per byte sent; 1.0 while nothing was sent."""
        return self.dense_nbytes / self.wire_nbytes if self.wire_nbytes else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, for loggers and JSON."""
        return asdict(self) | {"ratio": self.ratio}

    def log(self, writer: ScalarWriter, step: int, prefix: str = "agentcomm/") -> None:
        """Write every total to a TensorBoard writer.

        Args:
            writer: has ``add_scalar(tag, value, step)``.
            step: the training step.
            prefix: of the tags.
        """
        for name, value in self.to_dict().items():
            if isinstance(value, int | float):
                writer.add_scalar(prefix + name, value, step)

    def __str__(self) -> str:
        """Return a table: a line per bucket and the totals."""
        head = f"{'bucket':>6} {'rounds':>8} {'dense MB':>10} {'sent MB':>10} {'ratio':>6}"
        head += f" {'encode s':>9} {'wait s':>9} {'decode s':>9}"
        rows = [
            _row(
                str(b.index),
                b.rounds,
                b.dense_nbytes,
                b.wire_nbytes,
                b.encode_s,
                b.wait_s,
                b.decode_s,
            )
            for b in self.per_bucket
        ]
        total = _row(
            "all",
            self.rounds,
            self.dense_nbytes,
            self.wire_nbytes,
            self.encode_s,
            self.wait_s,
            self.decode_s,
        )
        return "\n".join([head, *rows, total, f"residual norm {self.residual_norm:.6g}"])


def _row(
    name: str,
    rounds: int,
    dense_nbytes: int,
    wire_nbytes: int,
    encode_s: float,
    wait_s: float,
    decode_s: float,
) -> str:
    ratio = dense_nbytes / wire_nbytes if wire_nbytes else 1.0
    return (
        f"{name:>6} {rounds:>8} {dense_nbytes / 1e6:>10.3f} {wire_nbytes / 1e6:>10.3f}"
        f" {ratio:>6.2f}"
        f" {encode_s:>9.3f} {wait_s:>9.3f} {decode_s:>9.3f}"
    )
