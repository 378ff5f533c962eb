"""What the benchmarks share: arguments, where the numbers come from, statistics, output."""

import argparse
import datetime
import importlib
import json
import math
import os
import platform
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import agentcomm
from agentcomm import _core
from agentcomm.errors import SpecError
from agentcomm.specs import parse

# What the extra `bench` of pyproject.toml holds: modules, and what pip calls them.
EXTRA = {"matplotlib": "matplotlib", "sklearn": "scikit-learn", "tqdm": "tqdm"}
# Codecs whose spec needs a fraction, which stands for them in a list of all codecs.
_SPARSE = ("topk", "randk")
_SPARSE_KEPT_FRAC = 0.01


class BenchError(Exception):
    """A benchmark that cannot run; the message says what is missing."""


def require(module: str) -> Any:
    """Import a module of the extra ``bench``.

    Raises:
        BenchError: it is not installed; the message names pip's command.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = EXTRA[module.partition(".")[0]]
        raise BenchError(
            f"{package} cannot be imported ({error}); install what the extra 'bench' holds: "
            f"{sys.executable} -m pip install {' '.join(EXTRA.values())}"
        ) from error


# ---- arguments -----------------------------------------------------------------------------------


def positive(text: str) -> int:
    """Parse a whole number above 0."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return number


def spec_text(text: str) -> str:
    """Parse a spec and return how it is written."""
    try:
        return str(parse(text))
    except SpecError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def file_path(text: str) -> Path:
    """Parse the path of a file to write, in a folder that exists."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def all_specs(*, lossless: bool) -> list[str]:
    """Return a spec for every codec of this build, two for those that keep a fraction.

    Args:
        lossless: whether those without a loss take part.
    """
    specs = []
    for row in agentcomm.codecs():
        if row["name"] in _SPARSE:
            fraction = f"{row['name']}:{_SPARSE_KEPT_FRAC}"
            specs += [fraction, f"{fraction}+int8"]
        elif lossless or not row["lossless"]:
            specs.append(row["name"])
    return specs


# ---- where the numbers come from -----------------------------------------------------------------


def cpu_model() -> str:
    """Return what the CPU calls itself."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    match = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return match[1] if match else platform.machine()


def commit() -> str:
    """Return the commit that the extensions were built from."""
    try:
        from agentcomm import _build_info
    except ImportError:
        return "unknown"
    return str(_build_info.COMMIT)


def environment(benchmark: str, *, link: str, nranks: int) -> dict[str, Any]:
    """Describe the machine and the software, in the words of ``benchmarks/compare.py``.

    Args:
        benchmark: the name of the benchmark.
        link: what the ranks talk over.
        nranks: number of ranks.
    """
    return {
        "benchmark": benchmark,
        "link": link,
        "nranks": nranks,
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu_model(),
        "tier": _core.cpu_info()["tier"],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "agentcomm": agentcomm.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load_average": os.getloadavg()[0],
    }


def header(env: dict[str, Any]) -> str:
    """Return an environment as two lines of text."""
    return (
        f"{env['benchmark']}: {env['cpu']}, {env['cores']} cores, tier {env['tier']}, load average "
        f"{env['load_average']:.2f}, {env['date']}\n"
        f"torch {env['torch']}, agentcomm {env['agentcomm']}, commit {env['commit']}, "
        f"Python {env['python']}, Linux {env['kernel']}"
    )


# ---- statistics ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Summary:
    """Median, quartiles and minimum of samples."""

    median: float
    q1: float
    q3: float
    min: float
    nsamples: int


def summarise(samples: Sequence[float]) -> Summary:
    """Summarise at least one sample."""
    if len(samples) == 1:
        q1 = q3 = samples[0]
    else:
        q1, _, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return Summary(statistics.median(samples), q1, q3, min(samples), len(samples))


# ---- output --------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, nleft: int = 1) -> str:
    """Lay out rows as text: the first ``nleft`` columns to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = []
    for row in (head, ["-" * width for width in widths], *rows):
        cells = [
            cell.ljust(width) if column < nleft else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return what a user asked for, without where to write it."""
    return {key: value for key, value in vars(args).items() if key not in ("run", "json", "out")}


def _without_nan(value: Any) -> Any:
    """Replace what JSON has no number for."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_text(path: Path, text: str) -> None:
    """Write to a temporary file and rename it: a reader never sees half a file."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a results file; a NaN or an infinity becomes null."""
    write_text(path, json.dumps(_without_nan(document), indent=1, allow_nan=False) + "\n")


@contextmanager
def progress(nunits: int, unit: str) -> Iterator[Any]:
    """Show a bar on stderr while the block runs, if that is a terminal; yields tqdm's bar."""
    with require("tqdm").tqdm(total=nunits, unit=unit, disable=None, file=sys.stderr) as bar:
        yield bar
