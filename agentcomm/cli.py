"""The command line: ``agentcomm`` and ``python -m agentcomm``."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import agentcomm


def _info() -> dict[str, Any]:
    """Return what a bug report needs to say about this installation."""
    import platform  # here, and below: `agentcomm run` is to start fast

    report: dict[str, Any] = {
        "agentcomm": agentcomm.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
    }
    try:
        from agentcomm import _build_info

        report["built against torch"] = _build_info.TORCH_VERSION
        report["compiler"] = _build_info.COMPILER
        report["commit"] = _build_info.COMMIT
    except ImportError:
        report["built against torch"] = "not built: pip install --no-build-isolation ."
    try:
        from agentcomm import _core

        report["cpu tier"] = _core.cpu_info()["tier"]
        report["wire version"] = _core.WIRE_VERSION
    except ImportError as error:
        report["cpu tier"] = f"_core does not load: {error}"
    try:
        import torch
        import torch.distributed as dist

        report["torch"] = torch.__version__
        names = ("gloo", "nccl", "mpi", "ucc")
        found = [name for name in names if dist.is_available() and dist.is_backend_available(name)]
        report["backends"] = found
        from agentcomm._extension import c10d

        c10d()
        report["transport"] = "ok"
        report["codecs"] = agentcomm.codecs()
    except ImportError as error:
        report["transport"] = str(error)
    return report


def _print_info(as_json: bool) -> int:
    report = _info()
    if as_json:
        import json

        print(json.dumps(report, indent=2))
    else:
        codecs = report.pop("codecs", [])
        for key, value in report.items():
            print(f"{key:>20}  {', '.join(value) if isinstance(value, list) else value}")
        print(
            f"\n{'codec':>20}  {'bits/element':>12}  {'lossless':>8}  {'feedback':>8}  {'block':>6}"
        )
        for row in codecs:
            flags = (
                f"{row['lossless']!s:>8}  {row['feedback']!s:>8}  {row['block_nelems'] or '-':>6}"
            )
            name = f"{row['name']}:FRAC" if row["sparse"] else row["name"]
            print(f"{name:>20}  {row['bits_per_element']:>12.3f}  {flags}")
        print(f"{'FRAC':>20}  elements are sent, with the bits of one")
    return 0 if report.get("transport") == "ok" else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the words after the program's name; None takes those of the process.

    Returns:
        The exit status: 0, or 1 if something is missing from the installation or a benchmark
        failed.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    # torch.distributed.launch puts its word before those of the script that it takes us for.
    given = (
        [words.pop(0)] if words and words[0].startswith(("--local-rank=", "--local_rank=")) else []
    )
    if words[:1] == ["run"]:
        from agentcomm.run import _launch  # here: it is to start fast

        _launch.main(words[1:], given)
    words = [*given, *words]
    if words[:1] == ["bench"]:
        from agentcomm.bench import _command  # here: it needs more than the library does

        return _command.main(words[1:])
    parser = argparse.ArgumentParser(
        prog="agentcomm",
        description="A communication layer for PyTorch that sends compressed, chunked gradients.",
    )
    parser.add_argument("--version", action="version", version=f"agentcomm {agentcomm.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    info = commands.add_parser("info", help="show the build, CPU tier, torch, backends and codecs")
    info.add_argument("--json", action="store_true", help="as JSON")
    commands.add_parser("run", help="run a script with every DDP hooked: run [options] train.py")
    commands.add_parser("bench", help="measure the codecs: bench codecs, bench accuracy")
    arguments = parser.parse_args(words)
    return _print_info(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
