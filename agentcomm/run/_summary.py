"""What a run says at its end."""

import os
import sys
from typing import Any

from agentcomm.run._variables import LOG, PARTS, REPORT

_NO_MODEL = "agentcomm: no DistributedDataParallel was built: nothing was compressed"


def print_at_exit() -> None:
    """Say, in the process that the user started, what became of the gradients."""
    path = os.environ.get(PARTS)
    if path is None:
        return
    text = _NO_MODEL
    if os.path.exists(path):
        from agentcomm.run import _parts

        document = _parts.read(path)
        assert document is not None
        text = text_of(document)
        if os.environ.get(REPORT) != path:
            os.remove(path)
    is_quiet = os.environ.get(LOG) in ("warning", "error", "quiet")
    if not is_quiet and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(text + "\n")


def text_of(document: dict[str, Any]) -> str:
    """Return the summary of a report: of the lowest rank that has built a model."""
    ranks = [rank for rank in document["ranks"] if rank["models"]]
    if not ranks:  # processes that had something to say
        return _NO_MODEL
    first = ranks[0]
    seen = sorted({rank["rank"] for rank in ranks})
    what = f"{len(first['models'])} DDP models" if len(first["models"]) != 1 else "one DDP model"
    others = f"; the report has ranks {', '.join(map(str, seen))}" if len(seen) > 1 else ""
    lines = [f"agentcomm: rank {first['rank']} of {first['nranks']} had {what}{others}"]
    for model in first["models"]:
        lines.append(f"  {model['name']}, {model['nparameters']:,} parameters: {_line(model)}")
    return "\n".join(lines)


def _line(model: dict[str, Any]) -> str:
    stats = model["stats"]
    if stats is None:
        return f"{model['hook']}, not compressed by agentcomm"
    if not stats["rounds"]:
        return f"{model['codec']}, no rounds: no gradient reached the hook"
    return (
        f"{model['codec']}, {stats['rounds']:,} rounds, {stats['dense_nbytes'] / 1e6:.3f} MB dense,"
        f" {stats['wire_nbytes'] / 1e6:.3f} MB sent, ratio {stats['ratio']:.2f},"
        f" codec {stats['encode_s'] + stats['decode_s']:.2f} s, waiting {stats['wait_s']:.2f} s"
    )
