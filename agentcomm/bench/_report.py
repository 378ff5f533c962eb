"""What ``agentcomm bench accuracy`` says of its runs: table, markdown, plot."""

import math
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentcomm.bench._ranks import PLAIN
from agentcomm.bench._shared import header, require, table
from agentcomm.bench._tasks import TASKS

_NOTE = (
    "Mean and sample standard deviation over the seeds. The difference is taken to plain DDP of "
    "the same seed, then averaged. MB (10^6 bytes) are those that a rank sends for gradients: as "
    "agentcomm counts them; for plain DDP computed, 2 (n - 1) / n of the gradients."
)


def _mean_and_std(values: Sequence[float]) -> dict[str, float | None]:
    """Return None for what so many values do not have; a run that diverged shows in the mean."""
    has_spread = len(values) > 1 and all(map(math.isfinite, values))
    return {
        "mean": sum(values) / len(values) if values else None,
        "std": statistics.stdev(values) if has_spread else None,
    }


def compare(runs: Sequence[dict[str, Any]], modes: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row per task and mode: its runs over all seeds, and against plain DDP's.

    Args:
        runs: what has been trained so far.
        modes: in the order of the rows.
    """
    rows = []
    for task in dict.fromkeys(run["task"] for run in runs):
        of_task = [run for run in runs if run["task"] == task]
        done = [run for run in of_task if not run["error"]]
        plain = {run["seed"]: run["final"] for run in done if run["mode"] == PLAIN}
        metrics = TASKS[task].metrics
        for mode in modes:
            own = [run for run in done if run["mode"] == mode]
            pairs = [(run["final"], plain[run["seed"]]) for run in own if run["seed"] in plain]
            sent = _mean_and_std([run["sent_nbytes"] for run in own])["mean"]
            dense = _mean_and_std([run["dense_nbytes"] for run in own])["mean"]
            rows.append(
                {
                    "task": task,
                    "mode": mode,
                    "nseeds": len(own),
                    "nfailed": sum(run["mode"] == mode for run in of_task) - len(own),
                    "sent_nbytes": sent,
                    "ratio": dense / sent if dense and sent else None,
                    "final": {
                        metric: _mean_and_std([run["final"][metric] for run in own])
                        for metric in metrics
                    },
                    "minus_plain": {
                        metric: _mean_and_std(
                            [final[metric] - base[metric] for final, base in pairs]
                        )
                        for metric in metrics
                    },
                }
            )
    return rows


def _with_spread(figure: dict[str, float | None], sign: str = "") -> str:
    if figure["mean"] is None:
        return "-"
    spread = "" if figure["std"] is None else f" ± {figure['std']:.4f}"
    return f"{figure['mean']:{sign}.4f}{spread}"


def _cells(row: dict[str, Any]) -> list[str]:
    sent, ratio = row["sent_nbytes"], row["ratio"]
    cells = [
        row["mode"],
        f"{row['nseeds']}" + (f", {row['nfailed']} failed" if row["nfailed"] else ""),
        "-" if sent is None else f"{sent / 1e6:.2f}",
        "-" if ratio is None else f"{ratio:.2f}",
    ]
    for metric, figure in row["final"].items():
        cells.append(_with_spread(figure))
        against = row["minus_plain"][metric]
        cells.append("" if row["mode"] == PLAIN else _with_spread(against, "+"))
    return cells


def _head(task: str) -> list[str]:
    head = ["", "seeds", "MB sent per rank", "times fewer"]
    for metric in TASKS[task].metrics:
        head += [metric, "minus plain"]
    return head


def _by_task(
    rows: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]]
) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Return the name, a title and the rows of every task."""
    parts = []
    for task in dict.fromkeys(row["task"] for row in rows):
        done = [run for run in runs if run["task"] == task and not run["error"]]
        facts = [f"{task}: {TASKS[task].better} is better"]
        if done:
            facts.append(f"{done[0]['nparameters'] / 1e6:.2f} M parameters")
            facts.append(f"{done[0]['nsteps']} steps")
        parts.append((task, ", ".join(facts), [row for row in rows if row["task"] == task]))
    return parts


def text_tables(rows: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]]) -> str:
    """Return a table per task, for a terminal."""
    parts = [
        f"{title}\n{table(_head(task), [_cells(row) for row in own])}"
        for task, title, own in _by_task(rows, runs)
    ]
    return "\n\n".join([*parts, textwrap.fill(_NOTE, 100)])


def markdown(
    rows: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]], env: dict[str, Any]
) -> str:
    """Return the same tables as a document, with where the numbers come from."""
    lines = ["# agentcomm bench accuracy", "", *header(env).splitlines(), ""]
    lines.append(f"{env['nranks']} ranks over {env['link']}. {_NOTE}")
    for task, title, own in _by_task(rows, runs):
        head = _head(task)
        lines += [
            "",
            f"## {title}",
            "",
            f"| {' | '.join(head)} |",
            "|---" + "|---:" * (len(head) - 1) + "|",
        ]
        lines += [f"| {' | '.join(_cells(row))} |" for row in own]
    lines += ["", "![quality against bytes sent](accuracy.png)"]
    for run in runs:
        if run["error"]:
            where = f"{run['task']}, seed {run['seed']}, {run['mode']}"
            lines += ["", f"{where} failed:", "", "```", run["error"].rstrip(), "```"]
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the metric of every mode against the bytes that it sent, a panel per task."""
    matplotlib = require("matplotlib")
    matplotlib.use("Agg")
    plt = require("matplotlib.pyplot")
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    colours = plt.get_cmap("tab20").colors
    names = list(dict.fromkeys(row["mode"] for row in rows))
    figure, axes = plt.subplots(
        1, len(tasks), figsize=(6.5 * len(tasks) + 2, 4.5), layout="constrained", squeeze=False
    )
    for axis, task in zip(axes[0], tasks, strict=True):
        metric = TASKS[task].metrics[0]
        for row in (row for row in rows if row["task"] == task):
            figures = row["final"][metric]
            mean = figures["mean"]
            if mean is None or not math.isfinite(mean):
                continue
            colour = colours[names.index(row["mode"]) % len(colours)]
            if row["mode"] == PLAIN:
                axis.axhline(mean, color=colour, linewidth=0.8, linestyle="--")
            axis.errorbar(
                row["sent_nbytes"] / 1e6, mean, yerr=figures["std"], color=colour, marker="o",
                capsize=3, linestyle="none", label=row["mode"],
            )  # fmt: skip
        axis.set_xscale("log")
        axis.set_xlabel("MB sent per rank")
        axis.set_ylabel(metric)
        axis.set_title(f"{task}: {TASKS[task].better} is better")
        axis.grid(alpha=0.3)
    handles = {
        label: handle
        for axis in axes[0]
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside right upper")
    figure.savefig(path, dpi=120)
    plt.close(figure)
