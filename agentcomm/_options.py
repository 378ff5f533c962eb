"""The keywords of ``attach``, and the names that its patterns match."""

import fnmatch
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from agentcomm import _core
from agentcomm._exchange import Lane, check_timeout, chunk_log2_of
from agentcomm._tensors import as_real
from agentcomm.errors import SpecError
from agentcomm.specs import Codec, check_rounding, parse, suggest, with_rounding

Feedback = bool | str


def _check_whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise SpecError(
            f"{name}={value!r} is out of range; it must be a whole number in {low}..{high}"
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
        if self.feedback not in (True, False, "auto", "bf16"):
            raise SpecError(
                f'feedback={self.feedback!r} is unknown; it must be True, False, "auto" or "bf16"'
            )
        if self.rounding is not None:
            check_rounding(self.rounding)
        _check_whole("min_compress_nelems", self.min_compress_nelems, 0, 1 << 62)
        _check_whole("warmup_nrounds", self.warmup_nrounds, 0, 1 << 31)
        _check_whole("seed", self.seed, 0, (1 << 32) - 1)
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


class Names:
    """Names of a module's parameters; a tied parameter has several."""

    def __init__(self, module: torch.nn.Module) -> None:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        self.of: dict[int, list[str]] = {}
        described = []
        for name, param in module.named_parameters(remove_duplicate=False):
            self.of.setdefault(id(param), []).append(name)
            described.append(f"{name} {tuple(param.shape)} {param.dtype}")
        self.all = [name for names in self.of.values() for name in names]
        self.digest = hashlib.blake2b("\n".join(described).encode(), digest_size=8).hexdigest()
        self.elem_nbytes_max = max(
            (as_real(p.detach()).element_size() for p in module.parameters()), default=4
        )

    def check_patterns(self, what: str, patterns: Mapping[str, object]) -> None:
        """Raise SpecError for a pattern that matches no name."""
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in self.all):
                near = suggest(pattern, self.all) or f"; there are {', '.join(self.all[:8])}, ..."
                raise SpecError(f"pattern {pattern!r} in {what} matches no parameter{near}")
