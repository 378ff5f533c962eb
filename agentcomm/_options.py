"""The keywords of ``attach``, checked. Needs no torch: the launcher checks them before it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentcomm import _core
from agentcomm.errors import SpecError
from agentcomm.specs import Codec, SpecTuple, check_rounding, check_whole, parse, with_rounding

Feedback = bool | str
# struct agc_lane_desc: spec, feedback, in half the memory, LaneOptions.
Lane = tuple[SpecTuple, bool, bool, bool, float]


def chunk_log2_of(chunk_nbytes: int | str) -> int:
    """Return log2 of a chunk size, 0 for "auto".

    Raises:
        SpecError: neither "auto" nor a number in range.
    """
    low, high = 1 << _core.CHUNK_LOG2_MIN, 1 << _core.CHUNK_LOG2_MAX
    if chunk_nbytes == "auto":
        return 0
    if (
        isinstance(chunk_nbytes, bool)
        or not isinstance(chunk_nbytes, int)
        or not low <= chunk_nbytes <= high
    ):
        raise SpecError(
            f'chunk_nbytes={chunk_nbytes!r} is out of range; it must be "auto" or a number of dense'
            " bytes in"
            f" {low}..{high} (rounded down to a power of two)"
        )
    return chunk_nbytes.bit_length() - 1


def check_timeout(timeout_s: float | None) -> None:
    """Raise SpecError unless the timeout is None or a positive number of seconds."""
    if timeout_s is None:
        return
    if (
        isinstance(timeout_s, bool)
        or not isinstance(timeout_s, int | float)
        or not 0 < timeout_s < 1e8
    ):
        raise SpecError(
            f"timeout_s={timeout_s!r} is out of range; it must be None or seconds"
            " above 0 and below 1e+08"
        )


@dataclass(frozen=True)
class Options:
    """The keywords of ``attach``, checked.

    Attributes and their meaning: see ``attach``.
    """

    spec: str | Codec = "int8"
    chunk_nbytes: int | str = "auto"
    feedback: Feedback = "auto"
    rules: Mapping[str, str | Codec] = field(default_factory=dict)
    min_compress_nelems: int = 1024
    warmup_nrounds: int = 0
    rounding: str | None = None
    seed: int = 0
    timeout_s: float | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            SpecError: names the field, its value and what it may be.
        """
        self.codec()
        self.rule_codecs()
        chunk_log2_of(self.chunk_nbytes)
        check_timeout(self.timeout_s)
        if not isinstance(self.feedback, bool) and self.feedback not in ("auto", "bf16"):
            raise SpecError(
                f'feedback={self.feedback!r} is unknown; it must be True, False, "auto" or "bf16"'
            )
        if self.rounding is not None:
            check_rounding(self.rounding)
        check_whole("min_compress_nelems", self.min_compress_nelems, 0, 1 << 62)
        check_whole("warmup_nrounds", self.warmup_nrounds, 0, 1 << 31)
        check_whole("seed", self.seed, 0, (1 << 32) - 1)
        if self.name is not None and not isinstance(self.name, str):
            raise SpecError(f"name={self.name!r} is no text; it must be None or a text")
        if self.feedback is True and self.codec().lossless:
            raise SpecError(
                f"feedback=True with the lossless codec {self.codec()}: it has no loss to keep;"
                ' leave feedback at "auto"'
            )

    def codec(self) -> Codec:
        """Return the codec of the parameters that no rule names."""
        return with_rounding(parse(self.spec), self.rounding)

    def rule_codecs(self) -> dict[str, Codec]:
        """Return the rules with their codecs parsed."""
        return {
            pattern: with_rounding(parse(spec), self.rounding)
            for pattern, spec in self.rules.items()
        }

    def lane(self, codec: Codec) -> Lane:
        """Return the lane of a codec: its spec, whether it keeps a residual, its options."""
        feedback = (
            codec.feedback_default
            if self.feedback in ("auto", "bf16")
            else bool(self.feedback) and not codec.lossless
        )
        return codec.to_tuple(), feedback, self.feedback == "bf16", *codec.lane_options

    def config(self) -> dict[str, Any]:
        """Return the settings that must be equal on all ranks."""
        return {
            "wire version": _core.WIRE_VERSION,
            "spec": str(self.codec()),
            "rules": {pattern: str(codec) for pattern, codec in self.rule_codecs().items()},
            "min_compress_nelems": self.min_compress_nelems,
            "feedback": self.feedback,
            "warmup_nrounds": self.warmup_nrounds,
            "seed": self.seed,
            "name": self.name,
        }
