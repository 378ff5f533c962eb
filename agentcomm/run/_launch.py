"""The command ``agentcomm run``."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from agentcomm.errors import SpecError
from agentcomm.run._settings import OPTIONS, Settings
from agentcomm.run._variables import LAUNCHER_PID, PARTS

_SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")
_DESCRIPTION = """\
Run a script, or a module, with every DistributedDataParallel that it builds sending compressed
gradients; in its own process and in all that it starts. Options end at the script."""


class _Formatter(argparse.HelpFormatter):
    """Argparse's own, which imports shutil at every option only to learn the terminal's width."""

    def __init__(self, prog: str) -> None:
        try:
            width = int(os.environ.get("COLUMNS", 0)) or os.get_terminal_size().columns
        except (ValueError, OSError):
            width = 80
        super().__init__(prog, width=width - 2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agentcomm run",
        usage="agentcomm run [options] (SCRIPT | -m MODULE) [arguments...]",
        description=_DESCRIPTION,
        allow_abbrev=False,
        formatter_class=_Formatter,
    )
    for option in OPTIONS:
        default = "" if option.default in (None, "{}") else f" (default: {option.default})"
        text = f"{option.help}; {option.variable}{default}".replace("%", "%%")
        parser.add_argument(option.flag, dest=option.name, metavar=option.metavar, help=text)
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module")
    parser.add_argument("script", metavar="SCRIPT", help="what python would run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    return parser


def _interpreter_flags() -> list[str]:
    """Return the flags that this interpreter was started with: -O, -W, -X, -u and so on."""
    nwords = len(sys.orig_argv) - len(sys.argv)
    flags = sys.orig_argv[1:nwords]
    return flags[:-1] if flags and flags[-1] == "-m" else flags


def _remove_old_report(report: str) -> None:
    """Remove what an earlier run has left: one process of a machine, before any part is there."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            os.remove(report)
        except FileNotFoundError:
            pass


def _environment(settings: Settings) -> dict[str, str]:
    environ = os.environ | settings.to_environ()
    before = environ.get("PYTHONPATH")
    if not before:
        environ["PYTHONPATH"] = _SITE
    elif _SITE not in before.split(os.pathsep):  # an empty entry is the working directory: it stays
        environ["PYTHONPATH"] = _SITE + os.pathsep + before
    environ[LAUNCHER_PID] = str(os.getpid())
    folder = os.environ.get("TMPDIR", "/tmp")
    temporary = os.path.join(folder, f"agentcomm-{os.getpid()}-{time.time_ns()}.json")
    environ[PARTS] = settings.report or temporary
    return environ


def main(words: Sequence[str], given: Sequence[str] = ()) -> NoReturn:
    """Run ``agentcomm run``: become the script.

    Args:
        words: what follows ``run`` on the command line.
        given: arguments for the script, before those that are in ``words``.
    """
    parser = _parser()
    args = parser.parse_args(words)
    ignored = [
        flag
        for flag, name in (("-I", "isolated"), ("-E", "ignore_environment"), ("-S", "no_site"))
        if getattr(sys.flags, name)
    ]
    if ignored:
        parser.error(
            f"python's {ignored[0]} keeps the run's settings from its processes; leave it out"
        )
    try:
        settings = Settings.read(vars(args), os.environ)
    except SpecError as error:
        parser.error(str(error))
    if settings.report:
        _remove_old_report(settings.report)
    command = [sys.executable, *_interpreter_flags()]
    command += ["-m", args.script] if args.is_module else [args.script]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [*command, *given, *args.arguments], _environment(settings))
