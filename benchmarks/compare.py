#!/usr/bin/env python3
"""Compare two results files: medians of A and B, and their ratio, per mode.

The two files come from two runs, so the drift of the machine is in the ratio; the modes of one
file are comparable with more confidence. A difference inside the quartiles of both is marked "~".
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import _common

# What has to be equal for a ratio to mean something else than a change of the machine.
SAME_ENVIRONMENT = ["benchmark", "link", "nranks", "cores", "cpu", "kernel", "python", "torch"]
IGNORED_SETTINGS = {"modes", "specs"}


def load(path: Path) -> dict[str, Any]:
    """Read a results file."""
    document: dict[str, Any] = json.loads(path.read_text())
    if document.get("schema") != 1:
        raise SystemExit(f"{path}: not a results file of schema 1")
    return document


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Say what else than the code differs between two results files."""
    pairs = [
        (key, a["environment"].get(key), b["environment"].get(key)) for key in SAME_ENVIRONMENT
    ]
    keys = sorted((a["settings"].keys() | b["settings"].keys()) - IGNORED_SETTINGS)
    pairs += [(key, a["settings"].get(key), b["settings"].get(key)) for key in keys]
    return list(dict.fromkeys(f"{key}: {x} | {y}" for key, x, y in pairs if x != y))


def timed(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the summaries of the results that have times, by group and name."""
    return {
        (result["group"], result["name"]): result["seconds"]
        for result in document["results"]
        if "seconds" in result
    }


def main() -> int:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("a", type=Path, metavar="A.json")
    parser.add_argument("b", type=Path, metavar="B.json")
    args = parser.parse_args()
    a, b = load(args.a), load(args.b)
    for name, document in (("A", a), ("B", b)):
        env = document["environment"]
        print(
            f"{name}: {env['benchmark']}, link {env['link']}, {env['nranks']} ranks, "
            f"commit {env['commit']}, {env['date']}"
        )
    for difference in differences(a, b):
        print(f"NOT THE SAME {difference}")

    times_a, times_b = timed(a), timed(b)
    rows = []
    for key in [*times_a, *(key for key in times_b if key not in times_a)]:
        x, y = times_a.get(key), times_b.get(key)
        ratio, noise = "-", ""
        if x and y:
            ratio = f"{x['median'] / y['median']:.3f}"
            noise = "~" if x["q1"] <= y["q3"] and y["q1"] <= x["q3"] else ""
        cells = [
            _common.number(side[quantity] if side else None, ".1f", scale=1e-3)
            for quantity in ("median", "min")
            for side in (x, y)
        ]
        rows.append([" ".join(key), *cells, ratio, noise])
    if not rows:
        raise SystemExit("neither file has times to compare")
    print()
    header = ["group and mode", "A median ms", "B median ms", "A min ms", "B min ms", "A/B", ""]
    print(_common.table(header, rows))
    print("\nA/B: ratio of the medians, above 1: B is faster; ~: their quartiles overlap.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
