"""The settings of a run: options of the command line, variables of its processes.

``agentcomm run`` is to start fast, and dataclasses cost 12 ms: tuples serve here, and what needs
``agentcomm.specs`` imports it when there is something to check.
"""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from agentcomm.errors import SpecError
from agentcomm.run._variables import PREFIX

MIN_COMPRESS_NELEMS = 1024  # as in attach
DEVICES = ("auto", "cpu", "cuda")
LEVELS = ("debug", "info", "warning", "error", "quiet")
PLAIN_SPECS = ("raw", "fp16", "bf16", "fp8", "int8", "int4", "ternary", "sign")  # need no parsing


def _rules(text: str) -> dict[str, str]:
    try:
        rules = json.loads(text)
    except ValueError as error:
        raise SpecError(
            f'{text!r} is no JSON ({error}); write for example \'{{"*.bias": "raw"}}\''
        ) from None
    if not isinstance(rules, dict) or not all(isinstance(spec, str) for spec in rules.values()):
        raise SpecError(
            f'{text!r} maps no patterns to specs; write for example \'{{"*.bias": "raw"}}\''
        )
    for spec in rules.values():
        _spec(spec)
    return rules


def _spec(text: str) -> str:
    if text not in PLAIN_SPECS:
        from agentcomm.specs import parse

        parse(text)
    return text


def _number_or_auto(text: str) -> int | str:
    return "auto" if text == "auto" else _number(text)


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise SpecError(f"{text!r} is no whole number") from None


def _feedback(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.lower(), text)


def _one_of(*values: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in values:
            raise SpecError(f"{text!r} is unknown; it must be one of {', '.join(values)}")
        return text

    return check


def _file(text: str) -> str:
    path = os.path.abspath(text)
    folder = os.path.dirname(path)
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise SpecError(f"{text!r} cannot be written; name a file in a folder that exists")
    return path


class Option(NamedTuple):
    """One setting.

    Attributes:
        name: of the field of ``Settings``; ``--name`` and ``AGENTCOMM_NAME`` follow from it.
        metavar: what help calls the value.
        default: the text that says the default, None without one.
        convert: makes the value of a text; raises SpecError.
        help: one line.
    """

    name: str
    metavar: str
    default: str | None
    convert: Callable[[str], Any]
    help: str

    @property
    def flag(self) -> str:
        """What the command line calls it."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """What the environment calls it."""
        return PREFIX + self.name.upper()


OPTIONS = (
    Option("codec", "SPEC", "int8", _spec, "the codec, as in agentcomm.attach"),
    Option("rules", "JSON", "{}", _rules, "codecs by parameter: '{\"*.bias\": \"raw\"}'"),
    Option("chunk_nbytes", "N", "auto", _number_or_auto, "dense bytes per chunk, or auto"),
    Option("feedback", "MODE", "auto", _feedback, "error feedback: auto, true, false, bf16"),
    Option("min_compress_nelems", "N", "auto", _number_or_auto,
           "smaller parameters go raw; auto: 1024, or 0 if the model has none that large"),
    Option("warmup_nrounds", "N", "0", _number, "the first rounds go raw"),
    Option("device", "DEVICE", "auto", _one_of(*DEVICES),
           "auto: CUDA means the CPU where there is no accelerator; cpu: always; cuda: never"),
    Option("report", "FILE", None, _file, "write the statistics of all ranks there, as JSON"),
    Option("log", "LEVEL", "info", _one_of(*LEVELS), "what to say on stderr: " + ", ".join(LEVELS)),
)  # fmt: skip


# Those that attach takes, and checks, beside the codec.
_OF_ATTACH = ("rules", "chunk_nbytes", "feedback", "min_compress_nelems", "warmup_nrounds")


class Settings(NamedTuple):
    """The settings of a run. Each field is described by its ``Option``."""

    codec: str
    rules: Mapping[str, str]
    chunk_nbytes: int | str
    feedback: bool | str
    min_compress_nelems: int | str
    warmup_nrounds: int
    device: str
    report: str | None
    log: str

    @classmethod
    def read(cls, texts: Mapping[str, str | None], environ: Mapping[str, str]) -> "Settings":
        """Make settings of a command line's texts, by name, and of variables for the others.

        Raises:
            SpecError: names the option or variable, its value and what it may be.
        """
        values: dict[str, Any] = {}
        are_defaults = True
        for option in OPTIONS:
            text, source = texts.get(option.name), option.flag
            if text is None:
                text, source = environ.get(option.variable), option.variable
            if text is None:
                text = option.default
            elif option.name in _OF_ATTACH:
                are_defaults = False
            try:
                values[option.name] = None if text is None else option.convert(text)
            except SpecError as error:
                raise SpecError(f"{source}: {error}") from None
        settings = cls(**values)
        if not are_defaults:
            settings.check()
        return settings

    def check(self) -> None:
        """Raise SpecError for what ``attach`` would not take."""
        from agentcomm._options import Options

        Options(self.codec, **self.attach_options(MIN_COMPRESS_NELEMS))

    def attach_options(self, nelems_max: int) -> dict[str, Any]:
        """Return the keywords of ``attach``.

        Args:
            nelems_max: of the parameters of the model.
        """
        options: dict[str, Any] = {name: getattr(self, name) for name in _OF_ATTACH}
        nelems_min = options.pop("min_compress_nelems")
        if nelems_min == "auto":
            # A model of small parameters alone would not be compressed at all.
            nelems_min = MIN_COMPRESS_NELEMS if nelems_max >= MIN_COMPRESS_NELEMS else 0
        return options | {"min_compress_nelems": nelems_min}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return self._asdict()

    def to_environ(self) -> dict[str, str]:
        """Return the variables that say the same."""
        texts: dict[str, str] = {}
        for option in OPTIONS:
            value = getattr(self, option.name)
            if value is not None:
                is_text = isinstance(value, str)
                texts[option.variable] = value if is_text else json.dumps(value)
        return texts
