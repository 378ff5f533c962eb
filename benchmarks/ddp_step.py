#!/usr/bin/env python3
"""Step time of a DDP model: plain DDP, torch's fp16 hook and agentcomm's codecs in one run.

The model is a chain of square Linear layers (32 MiB of fp32 gradients by default) with a small
batch, so that a step is mostly communication. Every mode has its own DDP model with the same
parameters; the modes take turns, and only the turns of one round are compared with each other.
"""

import argparse
import contextlib
import functools
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import _common
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

PLAIN = "plain"
FP16_HOOK = "fp16-hook"
NOSYNC = "nosync"
DEFAULT_SPECS = ["raw", "fp16", "int8"]
# How the table shows the counters: unit (MiB, ms) and format.
COUNTERS = {
    "wire_nbytes": (2**20, ".2f"),
    "link_nbytes": (2**20, ".2f"),
    "encode_s": (1e-3, ".1f"),
    "wait_s": (1e-3, ".1f"),
    "decode_s": (1e-3, ".1f"),
}
CHECK_NSTEPS = 3  # DDP rebuilds its buckets after the first backward: check before and after


@dataclass(slots=True)
class Mode:
    """One competitor."""

    name: str
    ddp: DistributedDataParallel
    handle: Any = None  # agentcomm's, if it is one of its codecs
    turns: list[_common.Turn] = field(default_factory=list)


def bucket_cap_mb(text: str) -> float | None:
    """Parse a ``--bucket-cap-mb`` argument."""
    return None if text == "default" else float(text)


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = _common.argument_parser(__doc__, link_default="1gbit")
    parser.add_argument(
        "--modes",
        nargs="*",
        default=DEFAULT_SPECS,
        metavar="SPEC",
        help=f"agentcomm specs, and {NOSYNC} for steps without communication; {PLAIN} and "
        f"{FP16_HOOK} always take part; none at all: only those two",
    )
    parser.add_argument(
        "--bucket-cap-mb",
        nargs="+",
        type=bucket_cap_mb,
        default=[None],
        metavar="MB",
        help="DDP's bucket sizes, one table for each; default: 25 with a first bucket of 1 MiB",
    )
    _common.add_turn_arguments(parser, turns=10, steps=5)
    _common.add_settle_argument(parser)
    parser.add_argument(
        "--chunk-nbytes", type=_common.chunk_nbytes, help="for agentcomm.attach (its own default)"
    )
    parser.add_argument("--layers", type=_common.positive, default=8, help="Linear layers")
    parser.add_argument("--width", type=_common.positive, default=1024, help="their width")
    parser.add_argument("--batch", type=_common.positive, default=8, help="samples per rank")
    args = parser.parse_args()
    args.modes = [spec for spec in args.modes if spec not in (PLAIN, FP16_HOOK)]
    return args


def build_mode(name: str, args: argparse.Namespace, cap_mb: float | None) -> Mode:
    """Build the model of one mode, with its hook."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(args.width, args.width, bias=False) for _ in range(args.layers)]
    ddp = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=cap_mb)
    mode = Mode(name, ddp)
    if name == FP16_HOOK:
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name not in (PLAIN, NOSYNC):
        import agentcomm

        keywords = {} if args.chunk_nbytes is None else {"chunk_nbytes": args.chunk_nbytes}
        mode.handle = agentcomm.attach(ddp, name, **keywords)
    return mode


def step(mode: Mode, batch: torch.Tensor, weights: torch.Tensor) -> None:
    """Do what a training step does, less the optimizer.

    The loss is a weighted sum of the outputs, which gives all layers gradients of one magnitude.
    """
    mode.ddp.zero_grad(set_to_none=True)
    with mode.ddp.no_sync() if mode.name == NOSYNC else contextlib.nullcontext():
        loss = torch.sum(mode.ddp(batch) * weights)
        loss.backward()  # type: ignore[no-untyped-call]


def flat_grad(mode: Mode) -> torch.Tensor:
    """Return a copy of all gradients in one tensor."""
    grads = [parameter.grad for parameter in mode.ddp.parameters()]
    return torch.cat([grad.flatten() for grad in grads if grad is not None])


def check_modes(modes: Sequence[Mode], batch: torch.Tensor, weights: torch.Tensor) -> None:
    """Raise unless each mode's gradients are equal on all ranks and right.

    Error feedback makes up in one step for what an earlier one lost, so the mean over the steps is
    compared.
    """
    local = Mode(NOSYNC, modes[0].ddp)
    step(local, batch, weights)
    expected = flat_grad(local)
    dist.all_reduce(expected)
    expected /= dist.get_world_size()
    for mode in modes:
        if mode.name == NOSYNC:
            continue
        mean = torch.zeros_like(expected)
        for _ in range(CHECK_NSTEPS):
            step(mode, batch, weights)
            mean += flat_grad(mode)
        _common.check_result(mode.name, mean / CHECK_NSTEPS, expected)


def counters(mode: Mode) -> dict[str, float]:
    """Read the counters of agentcomm, if it takes part."""
    if mode.handle is None:
        return {}
    stats = mode.handle.stats()
    return {name: getattr(stats, name) for name in COUNTERS if name != "link_nbytes"}


def measure(args: argparse.Namespace, cap_mb: float | None) -> list[dict[str, Any]]:
    """Measure all modes with one bucket size; return one result per mode."""
    modes = [build_mode(name, args, cap_mb) for name in (PLAIN, FP16_HOOK, *args.modes)]
    torch.manual_seed(1 + dist.get_rank())
    batch = torch.randn(args.batch, args.width)
    weights = torch.randn(args.batch, args.width)
    check_modes(modes, batch, weights)
    for mode in modes:
        for _ in range(args.settle if mode.handle and not args.chunk_nbytes else 0):
            step(mode, batch, weights)
    for _ in range(args.turns):
        for mode in modes:
            mode.turns.append(
                _common.take_turn(
                    functools.partial(step, mode, batch, weights),
                    nsteps=args.steps,
                    nwarmup=args.warmup_steps,
                    counters=functools.partial(counters, mode),
                )
            )
    group = f"bucket_cap_mb={'default' if cap_mb is None else f'{cap_mb:g}'}"
    results = summarise_modes(group, {mode.name: _common.gather(mode.turns) for mode in modes})
    for mode, result in zip(modes, results, strict=True):
        result["chunk_nbytes"] = mode.handle.stats().chunk_nbytes if mode.handle else None
        if mode.handle:
            mode.handle.close()
    return results


def summarise_modes(group: str, turns: dict[str, list[list[_common.Turn]]]) -> list[dict[str, Any]]:
    """Return one result per mode from the turns of all modes and ranks."""
    samples = {name: _common.turn_samples(ranks) for name, ranks in turns.items()}
    return [
        {
            "group": group,
            "name": name,
            "seconds": asdict(_common.summarise(samples[name])),
            "speedup": {
                baseline: asdict(_common.speedup(samples[baseline], samples[name]))
                for baseline in (PLAIN, FP16_HOOK)
            },
            "per_step": {counter: _common.per_step(ranks, counter) for counter in COUNTERS},
            "samples_s": samples[name],
            "turns": [[asdict(turn) for turn in rank_turns] for rank_turns in ranks],
        }
        for name, ranks in turns.items()
    ]


def results_table(results: Sequence[dict[str, Any]]) -> str:
    """Return the table of the results of one bucket size."""
    header = ["mode", *_common.MILLISECONDS_HEADER, "x plain", "x fp16-hook"]
    header += ["wire MiB", "link MiB", "encode ms", "wait ms", "decode ms", "chunk MiB"]
    rows = []
    for result in results:
        row = [result["name"], *_common.milliseconds(result["seconds"])]
        row += [f"{result['speedup'][baseline]['median']:.2f}" for baseline in (PLAIN, FP16_HOOK)]
        row += [
            _common.number(result["per_step"][counter], format_spec, scale=scale)
            for counter, (scale, format_spec) in COUNTERS.items()
        ]
        row.append(_common.number(result["chunk_nbytes"], ".3g", scale=2**20))
        rows.append(row)
    return _common.table(header, rows)


def rank_main(args: argparse.Namespace) -> int:
    """Measure and, on rank 0, report."""
    env = _common.environment("ddp_step", args)
    grad_mib = args.layers * args.width**2 * 4 / 2**20
    if dist.get_rank() == 0:
        print(env)
        print(
            f"{args.layers} Linear({args.width}, {args.width}), {grad_mib:g} MiB of gradients, "
            f"batch {args.batch} per rank; {_common.describe_turns(args)}"
        )
    results = []
    for cap_mb in args.bucket_cap_mb:
        group_results = measure(args, cap_mb)
        results += group_results
        if dist.get_rank() == 0:
            print(f"\n{group_results[0]['group']}")
            print(results_table(group_results), flush=True)
    if dist.get_rank() == 0:
        print(
            "\nx: time of the baseline / time of the mode, per pair of turns, median; above 1 is "
            "faster.\nwire: what the mode handed to the transport, per step and rank; link: what "
            "the link counted."
        )
        _common.write_json(args, env, results)
    return 0


if __name__ == "__main__":
    sys.exit(_common.main(parse_args(), rank_main))
