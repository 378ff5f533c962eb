"""The command ``agentcomm bench``."""

import argparse
import sys
from collections.abc import Sequence

from agentcomm.bench import accuracy, codecs
from agentcomm.bench._shared import BenchError

_HELP = {
    "codecs": (codecs, "time encoding and decoding, beside memcpy and torch's own operations"),
    "accuracy": (accuracy, "train small models with every codec: quality against bytes sent"),
}


def main(words: Sequence[str]) -> int:
    """Run ``agentcomm bench``.

    Args:
        words: what follows ``bench`` on the command line.

    Returns:
        The exit status: 0, or 1 if something is missing or a run failed.
    """
    parser = argparse.ArgumentParser(
        prog="agentcomm bench", description="Measure the codecs on this machine."
    )
    commands = parser.add_subparsers(required=True, metavar="BENCHMARK")
    for name, (module, text) in _HELP.items():
        command = commands.add_parser(name, help=text, description=module.__doc__)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(words)
    try:
        status: int = args.run(args)
    except BenchError as error:
        print(f"agentcomm bench: {error}", file=sys.stderr)
        return 1
    return status
