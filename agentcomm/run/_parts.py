"""The file in which every process of a run keeps its part."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import agentcomm

SCHEMA = 1


def _new_document(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "agentcomm": agentcomm.__version__,
        "settings": settings,
        "ranks": [],
    }


@contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold a lock: that of the file's folder, since the file itself is replaced."""
    descriptor = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read(path: str) -> dict[str, Any] | None:
    """Return the document, None if nobody has written one."""
    try:
        with open(path, encoding="utf-8") as file:
            document: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        return None
    return document


def write(path: str, settings: dict[str, Any], part: dict[str, Any]) -> None:
    """Put a process's part in, in the place of what it wrote before.

    Args:
        path: of the file.
        settings: of the run, for the one who comes first.
        part: has "rank", "host" and "pid".
    """
    with _locked(path):
        document = read(path) or _new_document(settings)
        mine = (part["host"], part["pid"])
        others = [other for other in document["ranks"] if (other["host"], other["pid"]) != mine]
        document["ranks"] = sorted([*others, part], key=lambda each: (each["rank"], each["pid"]))
        scratch = f"{path}.{os.getpid()}"
        with open(scratch, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
        os.replace(scratch, path)
