"""Specs: the text or object that names a codec.

A spec is written as ``name[option=value,...]``, for instance ``"int8"`` or ``"int8[block=128]"``;
each codec has a frozen dataclass that prints as its spec, so that ``parse(str(spec)) == spec``.
"""

import re
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar

from agentcomm.errors import SpecError

BLOCK_MIN, BLOCK_MAX, BLOCK_DEFAULT = 32, 4096, 256
ROUNDINGS = ("nearest", "stochastic")
SCOPES = ("tile", "tensor")
FRAC_UNIT = 10**9
RAMP_NSTAGES = 4
MOMENTUM_MAX = 0.9999  # float32's steps below 1 are 6e-8
ROUNDS_MAX = 1 << 31

# (codec id, block, rounding, kept fraction in 10^-9, codec id of the values): struct agc_spec.
SpecTuple = tuple[int, int, int, int, int]
# (top-k of each parameter inside a tile, momentum): the rest of struct agc_lane_desc but feedback.
LaneOptions = tuple[bool, float]


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

    @property
    def lane_options(self) -> LaneOptions:
        """Return what the engine is told of a lane beside the spec."""
        return False, 0.0

    def at_round(self, round_: int) -> "Codec":
        """Return the codec to use in a round: another one while a ramp lasts."""
        return self


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
    abs(x) / s. Use the former with error feedback, the latter without, as ``feedback="auto"`` does.
    Options as in ``RoundingCodec``.

    Source:
        Li, Zhang, Liu, "Ternary Weight Networks" (2016); Wen et al., "TernGrad" (2017).
    """

    name: ClassVar[str] = "ternary"

    @property
    def feedback_default(self) -> bool:
        """Whether ``feedback="auto"`` keeps a residual: not with stochastic rounding.

        Its error is larger than what it sends, so that a residual would grow without bound.
        """
        return self.rounding == "nearest"


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


@dataclass(frozen=True, slots=True)
class SparseCodec(Codec):
    """Base of the codecs that send a fraction of the elements and keep the others back.

    Args:
        keep_frac: fraction of the elements that is sent, above 0 and at most 1, in steps of 10^-9.
            A tile of n elements (65,536 of a large tensor) sends max(1, ceil(n keep_frac)).
        values: codec of the values that are sent: "raw" (the tensor's own data type), "fp16",
            "fp8", "int8", "int4" or "sign".
        block: elements that share a scale, for values of fp8, int8, int4, sign.
        rounding: "nearest" or "stochastic", for values of fp8, int8, int4.
        momentum: of momentum correction, at least 0 and below 1. In ``attach`` only: each rank
            sends from its velocity u = momentum u + gradient, which is forgotten where it is sent;
            the optimizer should have no momentum of its own.
        ramp: rounds in which the fraction comes down to keep_frac, in four steps of equal ratio. In
            ``attach`` only; it begins after the rounds of ``warmup_nrounds``.

    Raises:
        SpecError: an option is out of range, or does not belong to these values.

    Source:
        Momentum correction, momentum factor masking and the exponential ramp: Lin et al., "Deep
        Gradient Compression" (2018), equations 4 to 6 and section 3.3.
    """

    keep_frac: float
    values: str = "raw"
    block: int = BLOCK_DEFAULT
    rounding: str = "nearest"
    momentum: float = 0.0
    ramp: int = 0

    def __post_init__(self) -> None:
        """Check the options."""
        # What the core takes, so that equal codecs are equal objects and print alike.
        object.__setattr__(self, "keep_frac", check_keep_frac(self.keep_frac) / FRAC_UNIT)
        known = ["raw", *(name for name, row in codec_table().items() if row["values"])]
        if self.values not in known:
            raise SpecError(
                f"values={self.values!r} is unknown; {self.name} sends values as"
                f" {', '.join(known)}, for example '{self.name}:0.01+int8'"
                f"{suggest(str(self.values), known)}"
            )
        check_block(self.block)
        check_rounding(self.rounding)
        must = f"a number in 0..{MOMENTUM_MAX}, for example momentum=0.9"
        if not 0 <= _check_type("momentum", self.momentum, int | float, must) <= MOMENTUM_MAX:
            raise SpecError(f"momentum={self.momentum!r} is out of range; it must be {must}")
        check_whole("ramp", self.ramp, 0, ROUNDS_MAX)
        row = codec_table()[self.values]
        if self.block != BLOCK_DEFAULT and not row["block_nelems"]:
            raise SpecError(f"block={self.block} with values={self.values!r}: these have no blocks")
        if self.rounding != "nearest" and not row["stochastic"]:
            raise SpecError(
                f"rounding={self.rounding!r} with values={self.values!r}: these are not rounded so"
            )

    def __str__(self) -> str:
        """Return the spec text, options at their defaults left out."""
        frac = f"{self.keep_frac:.9f}".rstrip("0").rstrip(".")
        values = "" if self.values == "raw" else f"+{self.values}"
        options = ",".join(
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if field.name not in ("keep_frac", "values")
            and getattr(self, field.name) != field.default
        )
        return f"{self.name}:{frac}{values}" + (f"[{options}]" if options else "")

    def at_round(self, round_: int) -> "SparseCodec":
        """Return the codec of a round of the ramp; from its end on this one without a ramp.

        In quarter r of the ramp (0..3) the fraction is keep_frac^((r + 1) / 5): for 0.001 about
        0.25, 0.063, 0.016, 0.004.
        """
        if self.ramp == 0:
            return self
        exponent = (self.ramp_stage(round_) + 1) / (RAMP_NSTAGES + 1)
        return replace(self, keep_frac=self.keep_frac**exponent, ramp=0)

    def ramp_stage(self, round_: int) -> int:
        """Return the quarter of the ramp that a round is in, 4 from its end on."""
        if self.ramp == 0:
            return RAMP_NSTAGES
        return min(RAMP_NSTAGES * max(round_, 0) // self.ramp, RAMP_NSTAGES)

    @property
    def lane_options(self) -> LaneOptions:
        """Return what the engine is told of a lane beside the spec."""
        return False, self.momentum

    @property
    def _frac_e9(self) -> int:
        return round(self.keep_frac * FRAC_UNIT)

    def to_tuple(self) -> SpecTuple:
        """Return the form that the core takes."""
        table = codec_table()
        values = table[self.values]
        return (
            table[self.name]["id"],
            self.block if values["block_nelems"] else 0,
            ROUNDINGS.index(self.rounding),
            self._frac_e9,
            0 if self.values == "raw" else values["id"],
        )


@dataclass(frozen=True, slots=True)
class TopK(SparseCodec):
    """The elements of each tile with the largest magnitudes, and where they are.

    Exactly max(1, ceil(n keep_frac)) of a tile of n elements, ties to the lowest index. An index
    takes 16 bits. Use it with error feedback. Options as in ``SparseCodec``, and

    Args:
        scope: "tile": the largest of each tile. "tensor": where a tile holds several parameters,
            the largest of each, in proportion to their lengths and at least one.

    Source:
        Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory" (2018); Lin et al., "Deep Gradient
        Compression" (2018).
    """

    name: ClassVar[str] = "topk"
    scope: str = "tile"

    def __post_init__(self) -> None:
        """Check the options."""
        SparseCodec.__post_init__(self)
        if self.scope not in SCOPES:
            raise SpecError(f"scope={self.scope!r} is unknown; it must be 'tile' or 'tensor'")

    @property
    def lane_options(self) -> LaneOptions:
        """Return what the engine is told of a lane beside the spec."""
        return self.scope == "tensor", self.momentum


@dataclass(frozen=True, slots=True)
class RandK(SparseCodec):
    """Elements at random places that are the same on all ranks: no index travels.

    The places are drawn anew in every round, one in each of k equal runs of a tile. Values are not
    scaled up: what is not sent stays in the residual. Use it with error feedback. Options as in
    ``SparseCodec``.

    Source:
        Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory" (2018).
    """

    name: ClassVar[str] = "randk"


CODECS: dict[str, type[Codec]] = {
    cls.name: cls for cls in (Raw, Fp16, Bf16, Fp8, Int8, Int4, Ternary, Sign, TopK, RandK)
}


def _check_type(name: str, value: object, wanted: Any, must: str) -> Any:
    """Return the value, if its type is what is wanted.

    Raises:
        SpecError: it is something else, though it may look like a number; ``must`` says what it
            must be.
    """
    if isinstance(value, bool) or not isinstance(value, wanted):
        kind = type(value)
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        raise SpecError(
            f"{name}={_short(value)} is a {module}{kind.__qualname__}; it must be {must}"
        )
    return value


def _short(value: object) -> str:
    """Return a value as an error shows it: a number of thousands of digits helps nobody."""
    try:
        text = repr(value)
    except ValueError:  # more digits than Python writes
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"


def check_whole(name: str, value: object, low: int, high: int) -> None:
    """Raise SpecError unless the value is a whole number in a range."""
    must = f"a whole number in {low}..{high}"
    if not low <= _check_type(name, value, int, must) <= high:
        raise SpecError(f"{name}={_short(value)} is out of range; it must be {must}")


def check_keep_frac(frac: object) -> int:
    """Return a fraction in parts of 10^9.

    Raises:
        SpecError: it is not above 0 and at most 1.
    """
    must = (
        "above 0 and at most 1, in steps of 10^-9, for example 'topk:0.01' for one element in a"
        " hundred"
    )
    number = _check_type("keep_frac", frac, int | float, must)
    frac_e9 = round(number * FRAC_UNIT) if 0 < number <= 1 else 0
    if frac_e9 == 0:
        raise SpecError(f"keep_frac={frac!r} is out of range; it must be {must}")
    return frac_e9


def check_block(block: object) -> None:
    """Raise SpecError unless block is a power of two in 32..4096."""
    must = f"a power of two in {BLOCK_MIN}..{BLOCK_MAX}, for example block={BLOCK_DEFAULT}"
    number = _check_type("block", block, int, must)
    if not BLOCK_MIN <= number <= BLOCK_MAX or number & (number - 1):
        raise SpecError(f"block={_short(block)} is out of range; it must be {must}")


def check_rounding(rounding: object) -> None:
    """Raise SpecError unless rounding is one of ROUNDINGS."""
    if rounding not in ROUNDINGS:
        raise SpecError(f"rounding={rounding!r} is unknown; it must be 'nearest' or 'stochastic'")


def suggest(word: str, known: list[str]) -> str:
    """Return " (did you mean ...?)" for the nearest known words, "" if none is near."""
    import difflib  # here: the launcher is to start fast

    near = difflib.get_close_matches(word.lower(), known, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""


_WHOLE = re.compile(r"-?[0-9]+")
_NUMBER = re.compile(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_SPEC = re.compile(
    r"\s*(?P<name>[A-Za-z]\w*)\s*(?::\s*(?P<frac>[^\[\]+]*?)\s*)?(?:\+\s*(?P<values>[^\[\]]*?)\s*)?"
    r"(?:\[(?P<options>[^\[\]]*)\])?\s*"
)


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
    if not issubclass(cls, SparseCodec):
        if match["frac"] is not None or match["values"] is not None:
            raise SpecError(
                f"{spec!r} is no spec: {name} sends every element and takes neither a fraction nor"
                f" values; write {name!r}, or for example 'topk:0.01+int8' to send the largest"
                " hundredth in eight bits"
            )
        return cls(**_options(cls, spec, match["options"] or ""))
    return cls(**_sparse_arguments(cls, spec, match))


def _sparse_arguments(cls: type[SparseCodec], spec: str, match: re.Match[str]) -> dict[str, Any]:
    """Read a spec such as ``topk:0.01+int8[block=128]``."""
    options = _options(cls, spec, match["options"] or "")
    for key, text in (("keep_frac", match["frac"]), ("values", match["values"])):
        if text is not None and key in options:
            raise SpecError(f"{key} stands twice in spec {spec!r}")
        if text is not None:
            options[key] = text
    if "keep_frac" not in options:
        raise SpecError(
            f"{spec!r} does not say which fraction is kept; write {cls.name}:FRAC, for example"
            f" '{cls.name}:0.01' for one element in a hundred"
        )
    if isinstance(options["keep_frac"], str):
        if not _NUMBER.fullmatch(options["keep_frac"]):
            raise SpecError(
                f"{options['keep_frac']!r} in spec {spec!r} is no number; write {cls.name}:FRAC"
                f" with a fraction above 0 and at most 1, for example '{cls.name}:0.01'"
            )
        options["keep_frac"] = float(options["keep_frac"])
    return options


def _options(cls: type[Codec], spec: str, text: str) -> dict[str, Any]:
    """Read the options between the brackets of a spec."""
    known = {field.name: field.type for field in fields(cls)}
    options: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = (part.strip() for part in item.partition("="))
        if key in known and not value:
            raise SpecError(f"{item!r} in spec {spec!r} has no value; write {key}=VALUE")
        if key not in known and _WHOLE.fullmatch(item) and "block" in known:
            raise SpecError(f"{item!r} in spec {spec!r} is no option; write block={item}")
        if key not in known:
            there_are = f"there are {', '.join(known)}" if known else f"{cls.name} has none"
            raise SpecError(
                f"{item!r} in spec {spec!r} is no option; {there_are}{suggest(key, list(known))}"
            )
        if key in options:
            raise SpecError(f"option {key!r} stands twice in spec {spec!r}")
        if known[key] in (int, float):
            options[key] = _number(key, value, known[key] is int, spec)
        else:
            options[key] = value
    return options


def _number(key: str, text: str, is_whole: bool, spec: str) -> int | float:
    """Read a number as people write it, and not all that Python takes for one (1_0, infinity)."""
    if not (_WHOLE if is_whole else _NUMBER).fullmatch(text):
        what = "whole number" if is_whole else "number"
        raise SpecError(f"{_short(f'{key}={text}')} in spec {_short(spec)}: {key} must be a {what}")
    try:
        return int(text) if is_whole else float(text)
    except ValueError:  # more digits than Python reads
        raise SpecError(
            f"{key}={_short(text)} is out of range: it has {len(text)} digits"
        ) from None


def check_without_rounds(codec: Codec) -> None:
    """Raise SpecError for options that mean something only in the rounds of a training."""
    if isinstance(codec, SparseCodec) and (codec.momentum or codec.ramp):
        raise SpecError(
            f"momentum= and ramp= of {codec} are about the rounds of a training; they work in"
            " attach, and must be left out here"
        )


def with_rounding(codec: Codec, rounding: str | None) -> Codec:
    """Return the codec with another rounding, if it can round so and its spec asks for nothing."""
    if rounding is None or getattr(codec, "rounding", None) != "nearest":
        return codec
    if isinstance(codec, SparseCodec) and not codec_table()[codec.values]["stochastic"]:
        return codec
    return replace(codec, rounding=rounding)  # type: ignore[call-arg]
