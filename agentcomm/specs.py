"""Specs: the text or object that names a codec.

A spec is written as ``name[option=value,...]``, for instance ``"int8"`` or ``"int8[block=128]"``;
each codec has a frozen dataclass that prints as its spec, so that ``parse(str(spec)) == spec``.
"""

import difflib
import re
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar

from agentcomm.errors import SpecError

BLOCK_MIN, BLOCK_MAX, BLOCK_DEFAULT = 32, 4096, 256
ROUNDINGS = ("nearest", "stochastic")

# (codec id, block, rounding, kept fraction in 10^-9, codec id of the values): struct agc_spec.
SpecTuple = tuple[int, int, int, int, int]


@cache
def codec_table() -> dict[str, dict[str, Any]]:
    """Facts about every codec of this build, by name."""
    from agentcomm import _core

    return {row["name"]: row for row in _core.codec_table()}


@dataclass(frozen=True, slots=True)
class Codec:
    """Base of the codecs' dataclasses.

    Attributes:
        name: what the codec is called in a spec.
    """

    name: ClassVar[str] = ""

    def __str__(self) -> str:
        """Return the spec text, options at their defaults left out."""
        options = ",".join(
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        )
        return f"{self.name}[{options}]" if options else self.name

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back what was encoded."""
        return bool(codec_table()[self.name]["lossless"])

    @property
    def feedback_default(self) -> bool:
        """Whether ``feedback="auto"`` keeps a residual for this codec."""
        return bool(codec_table()[self.name]["feedback"])

    def to_tuple(self) -> SpecTuple:
        """Return the form that the core takes."""
        return (codec_table()[self.name]["id"], 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Raw(Codec):
    """The numbers themselves, in the tensor's own data type. Lossless."""

    name: ClassVar[str] = "raw"


@dataclass(frozen=True, slots=True)
class Fp16(Codec):
    """IEEE 754 half precision: 16 bits per element, overflows to infinity at 65520."""

    name: ClassVar[str] = "fp16"


@dataclass(frozen=True, slots=True)
class Bf16(Codec):
    """bfloat16: 16 bits per element, the range of float32, relative error at most 2^-8."""

    name: ClassVar[str] = "bf16"


@dataclass(frozen=True, slots=True)
class BlockCodec(Codec):
    """Base of the codecs with a float32 scale per block.

    Args:
        block: elements that share a scale, a power of two in 32..4096.

    Raises:
        SpecError: an option is out of range.
    """

    block: int = BLOCK_DEFAULT

    def __post_init__(self) -> None:
        """Check the options."""
        check_block(self.block)

    def to_tuple(self) -> SpecTuple:
        """Return the form that the core takes."""
        return (codec_table()[self.name]["id"], self.block, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class RoundingCodec(BlockCodec):
    """Base of the codecs with blocks that can round either way.

    Args:
        block: elements that share a scale, a power of two in 32..4096.
        rounding: "nearest" (ties to even), or "stochastic" (unbiased, twice the largest error).

    Raises:
        SpecError: an option is out of range.
    """

    rounding: str = "nearest"

    def __post_init__(self) -> None:
        """Check the options."""
        check_block(self.block)
        check_rounding(self.rounding)

    def to_tuple(self) -> SpecTuple:
        """Return the form that the core takes."""
        return (codec_table()[self.name]["id"], self.block, ROUNDINGS.index(self.rounding), 0, 0)


@dataclass(frozen=True, slots=True)
class Fp8(RoundingCodec):
    """Eight bits of floating point (E4M3) per element and a scale per block: absmax / 448.

    The error is at most a sixteenth of the element, or 2^-10 scales. Options as in
    ``RoundingCodec``.

    Source:
        Micikevicius et al., "FP8 Formats for Deep Learning" (2022); OCP OFP8 1.0.
    """

    name: ClassVar[str] = "fp8"


@dataclass(frozen=True, slots=True)
class Int8(RoundingCodec):
    """Eight bits per element and a scale per block: -127..127 times absmax / 127.

    The error is at most half a scale. Options as in ``RoundingCodec``.

    Source:
        Blockwise absmax quantisation, Dettmers et al., "8-bit Optimizers via Block-wise
        Quantization" (2022), with a linear code.
    """

    name: ClassVar[str] = "int8"


@dataclass(frozen=True, slots=True)
class Int4(RoundingCodec):
    """Four bits per element and a scale per block: -7..7 times absmax / 7.

    The error is at most half a scale: use it with error feedback. Options as in ``RoundingCodec``.

    Source:
        As ``Int8``, with 7 levels to each side.
    """

    name: ClassVar[str] = "int4"


@dataclass(frozen=True, slots=True)
class Ternary(RoundingCodec):
    """-s, 0 or s: 1.6 bits per element and a scale per block. Zero stays zero.

    Magnitudes above three quarters of the block's mean one are sent as the mean s of those; with
    rounding="stochastic" s is the largest, and an element is sent with probability
    abs(x) / s. Use it with error feedback. Options as in ``RoundingCodec``.

    Source:
        Li, Zhang, Liu, "Ternary Weight Networks" (2016); Wen et al., "TernGrad" (2017).
    """

    name: ClassVar[str] = "ternary"


@dataclass(frozen=True, slots=True)
class Sign(BlockCodec):
    """The sign of each element and the mean magnitude of each block: one bit per element.

    A zero is sent as plus or minus that mean, unless its whole block is zero: where zeros must stay
    zero (rows of an embedding that are not used), take ``Ternary``. Use it with error feedback.

    Args:
        block: elements that share a scale, a power of two in 32..4096.

    Raises:
        SpecError: an option is out of range.

    Source:
        Seide et al., "1-Bit Stochastic Gradient Descent" (2014); Karimireddy et al., "Error
        Feedback Fixes SignSGD" (2019).
    """

    name: ClassVar[str] = "sign"


CODECS: dict[str, type[Codec]] = {
    cls.name: cls for cls in (Raw, Fp16, Bf16, Fp8, Int8, Int4, Ternary, Sign)
}


def check_block(block: object) -> None:
    """Raise SpecError unless block is a power of two in 32..4096."""
    if not isinstance(block, int) or not BLOCK_MIN <= block <= BLOCK_MAX or block & (block - 1):
        raise SpecError(
            f"block={block!r} is out of range; it must be a power of two in"
            f" {BLOCK_MIN}..{BLOCK_MAX}, for example block={BLOCK_DEFAULT}"
        )


def check_rounding(rounding: object) -> None:
    """Raise SpecError unless rounding is one of ROUNDINGS."""
    if rounding not in ROUNDINGS:
        raise SpecError(f"rounding={rounding!r} is unknown; it must be 'nearest' or 'stochastic'")


def suggest(word: str, known: list[str]) -> str:
    """Return " (did you mean ...?)" for the nearest known words, "" if none is near."""
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""


_SPEC = re.compile(r"\s*(?P<name>[A-Za-z][\w:.+-]*)\s*(?:\[(?P<options>[^\[\]]*)\])?\s*")


def parse(spec: str | Codec) -> Codec:
    """Return the codec that a spec names.

    Args:
        spec: a spec text such as ``"int8[block=128]"``, or a codec object, which is returned as it
            is.

    Raises:
        SpecError: the text names no codec or no option of that codec; the message shows what would.

    Example:
        >>> parse("int8[block=128]")
        Int8(block=128, rounding='nearest')
        >>> str(parse("int8[rounding=nearest]"))
        'int8'
    """
    if isinstance(spec, Codec) and spec.name:
        return spec
    if not isinstance(spec, str):
        raise SpecError(
            f"a spec is a text such as 'int8' or a codec object, not {type(spec).__name__} {spec!r}"
        )
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise SpecError(
            f"{spec!r} is no spec; write name[option=value,...], for example 'int8[block=128]'"
        )
    name = match["name"]
    cls = CODECS.get(name)
    if cls is None:
        known = ", ".join(CODECS)
        raise SpecError(
            f"{name!r} in spec {spec!r} is no codec; there are {known}{suggest(name, list(CODECS))}"
        )
    return cls(**_options(cls, spec, match["options"] or ""))


def _options(cls: type[Codec], spec: str, text: str) -> dict[str, Any]:
    """Read the options between the brackets of a spec."""
    known = {field.name: field.type for field in fields(cls)}
    options: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = (part.strip() for part in item.partition("="))
        if key in known and not value:
            raise SpecError(f"{item!r} in spec {spec!r} has no value; write {key}=VALUE")
        if key not in known:
            there_are = f"there are {', '.join(known)}" if known else f"{cls.name} has none"
            raise SpecError(
                f"{item!r} in spec {spec!r} is no option; {there_are}{suggest(key, list(known))}"
            )
        if key in options:
            raise SpecError(f"option {key!r} stands twice in spec {spec!r}")
        if known[key] is int:
            try:
                options[key] = int(value)
            except ValueError:
                raise SpecError(
                    f"{item!r} in spec {spec!r}: {key} must be a whole number"
                ) from None
        else:
            options[key] = value
    return options


def with_rounding(codec: Codec, rounding: str | None) -> Codec:
    """Return the codec with another rounding, if it rounds at all and its spec does not say how."""
    if rounding is None or not isinstance(codec, RoundingCodec) or codec.rounding != "nearest":
        return codec
    return replace(codec, rounding=rounding)
