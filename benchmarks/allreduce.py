#!/usr/bin/env python3
"""How much of a link an all-reduce uses: agentcomm's codecs beside torch.distributed.

One fp32 tensor is averaged over the ranks again and again. The efficiency of a mode is what one
rank has to send, in bits, over the line rate times the median time; it is given where --link is a
rate. At an MTU of 1500, TCP over Ethernet leaves 0.956 of the line rate.
"""

import argparse
import functools
import sys
from dataclasses import asdict
from typing import Any

import _common
import torch
import torch.distributed as dist

DENSE = "dense"
DENSE_FP16 = "dense-fp16"


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = _common.argument_parser(__doc__, link_default="1gbit")
    parser.add_argument(
        "--specs",
        nargs="*",
        default=["fp16", "int8"],
        metavar="SPEC",
        help=f"agentcomm specs; {DENSE} (torch's all_reduce) and {DENSE_FP16} (the same, cast to "
        "fp16 and back) always take part",
    )
    parser.add_argument(
        "--nelems", type=_common.positive, default=25 * 2**20 // 4, help="fp32 elements"
    )
    _common.add_turn_arguments(parser, turns=10, steps=5)
    _common.add_settle_argument(parser)
    args = parser.parse_args()
    if args.nranks < 2:
        parser.error("--nranks must be 2 or more: one rank sends nothing")
    args.specs = [spec for spec in args.specs if spec not in (DENSE, DENSE_FP16)]
    return args


def all_reduce(mode: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Replace the tensor by its mean over the ranks."""
    if mode == DENSE:
        tensor /= dist.get_world_size()
        dist.all_reduce(tensor, group=group)
    elif mode == DENSE_FP16:
        half = tensor.half()
        half /= dist.get_world_size()
        dist.all_reduce(half, group=group)
        tensor.copy_(half)
    else:
        import agentcomm

        agentcomm.all_reduce(tensor, mode, group=group)


def encoded_nbytes(mode: str, nelems: int) -> int:
    """Return how many bytes a mode makes of a tensor, headers of one frame included."""
    if mode == DENSE:
        return nelems * 4
    if mode == DENSE_FP16:
        return nelems * 2
    import agentcomm

    return int(agentcomm.encode(torch.zeros(nelems), mode).numel())


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Check and measure all modes; return one result per mode."""
    nranks = dist.get_world_size()
    modes = [DENSE, DENSE_FP16, *args.specs]
    torch.manual_seed(1 + dist.get_rank())
    source = torch.randn(args.nelems)
    expected = source.clone()
    dist.all_reduce(expected)
    expected /= nranks
    # After its first call a mode averages equal tensors, which changes nothing of the traffic.
    tensors = {mode: source.clone() for mode in modes}
    # A group for each, so that agentcomm's chunk size is the best one for that spec.
    groups = {mode: dist.new_group() for mode in modes}
    for mode, tensor in tensors.items():
        all_reduce(mode, tensor, groups[mode])
        _common.check_result(mode, tensor, expected)
        for _ in range(args.settle if mode in args.specs else 0):
            all_reduce(mode, tensor, groups[mode])

    turns: dict[str, list[_common.Turn]] = {mode: [] for mode in modes}
    for _ in range(args.turns):
        for mode, tensor in tensors.items():
            step = functools.partial(all_reduce, mode, tensor, groups[mode])
            turns[mode].append(
                _common.take_turn(step, nsteps=args.steps, nwarmup=args.warmup_steps)
            )
    ranks = {mode: _common.gather(turns[mode]) for mode in modes}
    samples = {mode: _common.turn_samples(ranks[mode]) for mode in modes}

    rate_bps = _common.line_rate_bps(args.link)
    results = []
    for mode in modes:
        seconds = _common.summarise(samples[mode])
        sent_nbytes = 2 * (nranks - 1) / nranks * encoded_nbytes(mode, args.nelems)
        sent_bps = sent_nbytes * 8 / seconds.median
        results.append(
            {
                "group": f"nelems={args.nelems}",
                "name": mode,
                "seconds": asdict(seconds),
                "speedup": {
                    baseline: asdict(_common.speedup(samples[baseline], samples[mode]))
                    for baseline in (DENSE, DENSE_FP16)
                },
                "sent_nbytes": sent_nbytes,
                "sent_bps": sent_bps,
                "link_nbytes": _common.per_step(ranks[mode], "link_nbytes"),
                "efficiency_frac": sent_bps / rate_bps if rate_bps else None,
                "samples_s": samples[mode],
                "turns": [[asdict(turn) for turn in rank_turns] for rank_turns in ranks[mode]],
            }
        )
    return results


def results_table(results: list[dict[str, Any]]) -> str:
    """Return the table of the results."""
    header = ["mode", *_common.MILLISECONDS_HEADER, f"x {DENSE}", f"x {DENSE_FP16}"]
    header += ["sent MiB", "link MiB", "Gbit/s", "efficiency"]
    rows = []
    for result in results:
        row = [result["name"], *_common.milliseconds(result["seconds"])]
        row += [f"{result['speedup'][base]['median']:.2f}" for base in (DENSE, DENSE_FP16)]
        row += [
            _common.number(result["sent_nbytes"], ".2f", scale=2**20),
            _common.number(result["link_nbytes"], ".2f", scale=2**20),
            _common.number(result["sent_bps"], ".2f", scale=1e9),
            _common.number(result["efficiency_frac"], ".3f"),
        ]
        rows.append(row)
    return _common.table(header, rows)


def rank_main(args: argparse.Namespace) -> int:
    """Measure and, on rank 0, report."""
    env = _common.environment("allreduce", args)
    if dist.get_rank() == 0:
        print(env)
        print(f"{args.nelems} fp32 elements; {_common.describe_turns(args)}\n", flush=True)
    results = measure(args)
    if dist.get_rank() == 0:
        print(results_table(results))
        print(
            "\nx: time of the baseline / time of the mode, per pair of turns, median; above 1 is "
            "faster.\nsent: 2(n-1)/n of the encoded tensor, computed; link: what the link counted, "
            "per step and rank."
        )
        _common.write_json(args, env, results)
    return 0


if __name__ == "__main__":
    sys.exit(_common.main(parse_args(), rank_main))
